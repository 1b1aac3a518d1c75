"""OpenAI's own client: whole and streamed answers, both of its event loops, its parsing of models of pydantic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from tests.support.asked import DEMO, PARIS

pytestmark = pytest.mark.serve
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": PARIS}]


class Capital(BaseModel):
    country: Literal["France", "Italy"]
    city: Literal["Paris", "Rome"]


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=DEMO, messages=MESSAGES, temperature=0, max_tokens=24)
    with client.chat.completions.stream(
        model=DEMO, messages=MESSAGES, temperature=0, max_tokens=24, stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert len(deltas) > 3
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage == whole.usage
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
