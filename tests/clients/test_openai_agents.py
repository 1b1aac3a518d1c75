"""openai-agents: a run that calls a function and answers, over chat completions and over responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI

from tests.support.asked import DEMO
from tests.support.client_packages import client_package

agents = client_package("agents")
pytestmark = pytest.mark.serve


@pytest.fixture(params=["chat completions", "responses"])
async def model(base_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    agents.set_tracing_disabled(True)
    kinds = {"chat completions": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        yield kinds[request.param](model=DEMO, openai_client=client)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_calls_its_function_and_answers(model: Any, streamed: bool) -> None:
    asked: list[str] = []

    @agents.function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return f"It is sunny in {city}."

    agent = agents.Agent(
        name="forecaster",
        instructions="Answer briefly.",
        tools=[weather],
        model=model,
        model_settings=agents.ModelSettings(
            tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=200
        ),
    )
    if streamed:
        result = agents.Runner.run_streamed(agent, "How is the weather in Rome?", max_turns=4)
        events = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in events and "run_item_stream_event" in events
    else:
        result = await agents.Runner.run(agent, "How is the weather in Rome?", max_turns=4)
    assert len(asked) == 1
    assert result.final_output
