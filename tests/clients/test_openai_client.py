"""OpenAI's own client: whole and streamed answers, both of its event loops, its parsing of models of pydantic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from tests.clients.pieces import in_pieces
from tests.support.asked import DEMO, PARIS, WEATHER_PARAMETERS, get_weather

pytestmark = pytest.mark.serve
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": PARIS}]


WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_PARAMETERS}}


class Capital(BaseModel):
    country: Literal["France", "Italy"]
    city: Literal["Paris", "Rome"]


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=DEMO, messages=MESSAGES, temperature=0, max_tokens=24)
    finals = []

    def ask() -> list[str]:
        with client.chat.completions.stream(
            model=DEMO, messages=MESSAGES, temperature=0, max_tokens=24, stream_options={"include_usage": True}
        ) as stream:
            found = [event.delta for event in stream if event.type == "content.delta"]
            finals.append(stream.get_final_completion())
        return found

    deltas = in_pieces(ask)
    final = finals[-1]
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage is not None and whole.usage is not None
    # The second may have found the prompt in the cache, the first not.
    assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert "Paris" in (whole.choices[0].message.content or "")


async def test_the_asynchronous_client_streams_too(base_url: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        stream = await client.chat.completions.create(
            model=DEMO, messages=MESSAGES, temperature=0, max_tokens=24, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "Paris" in "".join(parts)


def test_an_answer_is_parsed_into_a_model(client: OpenAI) -> None:
    completion = client.chat.completions.parse(
        model=DEMO, messages=MESSAGES, response_format=Capital, temperature=0, max_tokens=64
    )
    assert isinstance(completion.choices[0].message.parsed, Capital)
    with client.chat.completions.stream(
        model=DEMO, messages=MESSAGES, response_format=Capital, temperature=0, max_tokens=64
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == completion.choices[0].message.parsed


@pytest.mark.parametrize("streamed", [False, True])
def test_a_required_tool_is_called_and_its_result_answered(client: OpenAI, streamed: bool) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How is the weather in Rome?"}]
    asked: Any = {"model": DEMO, "messages": messages, "tools": [WEATHER], "temperature": 0, "max_tokens": 200}
    once = {"tool_choice": "required", "parallel_tool_calls": False}
    if streamed:
        with client.chat.completions.stream(**asked, **once) as stream:
            ends = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            choice = stream.get_final_completion().choices[0]
        assert len(ends) == 1
    else:
        choice = client.chat.completions.create(**asked, **once).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function" and call.function.name == "get_weather"
    result = get_weather(**json.loads(call.function.arguments))
    fields = {"id", "type", "function"}
    messages.append({"role": "assistant", "tool_calls": [call.model_dump(include=fields)]})
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(**asked, tool_choice="none").choices[0]
    assert answer.message.content and not answer.message.tool_calls


def test_a_response_is_streamed_and_gone_on_from(client: OpenAI) -> None:
    asked: Any = {"model": DEMO, "temperature": 0, "max_output_tokens": 60}
    whole = client.responses.create(input=PARIS, **asked)
    assert "Paris" in whole.output_text
    with client.responses.stream(input=PARIS, **asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == whole.output_text
    more = client.responses.create(input="And of Italy?", previous_response_id=whole.id, **asked)
    assert client.responses.retrieve(more.id).output_text == more.output_text
    client.responses.delete(more.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(more.id)


def test_completions_and_log_probabilities(client: OpenAI) -> None:
    answer = client.completions.create(model=DEMO, prompt=["One two", "Red green"], max_tokens=4, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None and len(choice.logprobs.token_logprobs or ()) == 4


def test_errors_are_the_clients_own_classes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model=DEMO, messages=MESSAGES, temperature=-1)
    assert found.value.param == "temperature"
