"""What the tests of clients and examples ask of the demo model."""

from __future__ import annotations

DEMO = "smollm2-135m"
PARIS = "What is the capital of France?"
WEATHER_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."
