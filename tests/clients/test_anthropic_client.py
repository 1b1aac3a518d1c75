"""Anthropic's own client: whole and streamed messages, both of its event loops, counted tokens, a loop with a tool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic, AsyncAnthropic, BadRequestError

from tests.clients.pieces import in_pieces
from tests.support.asked import DEMO, PARIS, WEATHER_PARAMETERS, get_weather

pytestmark = pytest.mark.serve
MESSAGES: list[Any] = [{"role": "user", "content": PARIS}]
GREEDY: dict[str, Any] = {"model": DEMO, "extra_body": {"temperature": 0}}
ASKED: dict[str, Any] = {**GREEDY, "messages": MESSAGES, "max_tokens": 24}
WEATHER: Any = {"name": "get_weather", "description": "The weather in a city.", "input_schema": WEATHER_PARAMETERS}


@pytest.fixture
def client(serve_url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=serve_url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_a_stream_says_what_the_whole_message_says(client: Anthropic) -> None:
    whole = client.messages.create(**ASKED)
    finals = []

    def ask() -> list[str]:
        with client.messages.stream(**ASKED) as stream:
            found = list(stream.text_stream)
            finals.append(stream.get_final_message())
        return found

    parts = in_pieces(ask)
    final = finals[-1]
    assert whole.content[0].type == "text" and "Paris" in whole.content[0].text
    assert "".join(parts) == whole.content[0].text
    assert final.content[0].type == "text" and final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason == "end_turn"
    sizes = [answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) for answer in (whole, final)]
    counted = client.messages.count_tokens(model=DEMO, messages=MESSAGES).input_tokens
    assert sizes == [counted, counted]
    assert final.usage.output_tokens == whole.usage.output_tokens <= 24


async def test_the_asynchronous_client_streams_too(serve_url: str) -> None:
    own = AsyncAnthropic(base_url=serve_url, api_key="none", max_retries=0, timeout=120)
    async with own as client, client.messages.stream(**ASKED, system="Answer in one sentence.") as stream:
        parts = [part async for part in stream.text_stream]
    assert "Paris" in "".join(parts)


def test_an_answer_ends_where_it_is_told_to(client: Anthropic) -> None:
    message = client.messages.create(**ASKED, stop_sequences=["Paris"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")
    short = client.messages.create(**{**ASKED, "max_tokens": 2})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)


def test_a_loop_with_a_tool(client: Anthropic) -> None:
    asked: dict[str, Any] = {**GREEDY, "max_tokens": 64, "tools": [WEATHER]}
    question: Any = {"role": "user", "content": "What is the weather in Paris?"}
    forced = {"type": "any", "disable_parallel_tool_use": True}
    whole = client.messages.create(**asked, messages=[question], tool_choice=forced)
    with client.messages.stream(**asked, messages=[question], tool_choice=forced) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        (call,) = [block for block in message.content if block.type == "tool_use"]
        assert call.name == "get_weather" and call.input in ({"city": "Paris"}, {"city": "Rome"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)}
        answered: Any = {"role": "assistant", "content": message.content}
        turns = [question, answered, {"role": "user", "content": [result]}]
        last = client.messages.create(**asked, messages=turns, tool_choice={"type": "none"})
        assert [block.type for block in last.content] == ["text"]


def test_images_are_refused_by_name(client: Anthropic) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}
    with pytest.raises(BadRequestError, match="images, are not supported"):
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": [image]}]})
