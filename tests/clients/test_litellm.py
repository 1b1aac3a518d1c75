"""litellm: its providers `openai` and `hosted_vllm`, streamed and whole, and tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.asked import DEMO, PARIS, WEATHER_PARAMETERS
from tests.support.client_packages import client_package

litellm = client_package("litellm")
pytestmark = [
    pytest.mark.serve,
    # Its own types, read by a newer pydantic.
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict class:UserWarning"),
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER_PARAMETERS}}]


class Asked:
    """One provider of litellm's, pointed to the session's server."""

    def __init__(self, base_url: str, provider: str) -> None:
        self._base_url = base_url
        self._model = f"{provider}/{DEMO}"

    def __call__(self, **fields: Any) -> Any:
        return litellm.completion(
            model=self._model,
            messages=[{"role": "user", "content": PARIS}],
            api_base=self._base_url,
            api_key="none",
            temperature=0,
            max_tokens=64,
            num_retries=0,
            **fields,
        )


@pytest.fixture(params=["openai", "hosted_vllm"])
def ask(base_url: str, request: pytest.FixtureRequest) -> Asked:
    return Asked(base_url, request.param)


def test_a_stream_says_what_the_whole_answer_says(ask: Asked) -> None:
    whole = ask()
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0
    parts = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True)]
    assert "".join(parts) == whole.choices[0].message.content


@pytest.mark.parametrize("streamed", [False, True])
def test_a_required_tool_is_called(ask: Asked, streamed: bool) -> None:
    answer = ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=streamed)
    if streamed:
        answer = litellm.stream_chunk_builder(list(answer))
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert answer.choices[0].finish_reason == "tool_calls"
