"""langchain-openai: ChatOpenAI, whole and streamed, structured output and bound tools."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.clients.pieces import in_pieces
from tests.support.asked import DEMO, PARIS
from tests.support.client_packages import client_package

langchain_openai = client_package("langchain_openai")
tools = client_package("langchain_core.tools")
pytestmark = pytest.mark.serve


class Capital(BaseModel):
    """The capital of a country."""

    city: Literal["Paris", "Rome"]


@pytest.fixture
def model(base_url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=base_url, api_key="none", model=DEMO, temperature=0, max_tokens=64, max_retries=0
    )


def test_a_stream_says_what_the_whole_answer_says(model: Any) -> None:
    whole = model.invoke(PARIS)
    assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] > 0
    chunks = in_pieces(lambda: list(model.stream(PARIS)))
    assert "".join(chunk.content for chunk in chunks) == whole.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: Any, method: str) -> None:
    found = model.with_structured_output(Capital, method=method).invoke(PARIS)
    assert isinstance(found, Capital)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_bound_tool_is_called_and_its_answer_read(model: Any, streamed: bool) -> None:
    @tools.tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        return f"It is sunny in {city}."

    history: list[Any] = [("user", "How is the weather in Rome?")]
    bound = model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    if streamed:
        first, *more = bound.stream(history)
        for chunk in more:
            first += chunk
        message = first
    else:
        message = bound.invoke(history)
    (call,) = message.tool_calls
    assert call["name"] == "weather" and set(call["args"]) == {"city"}
    answer = weather.invoke(call)
    assert answer.tool_call_id == call["id"]
    assert model.invoke([*history, message, answer]).content
