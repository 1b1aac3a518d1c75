"""Ollama's own client: whole and streamed chats, both of its event loops, prompts, schemas, the models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.clients.pieces import in_pieces
from tests.support.asked import DEMO, PARIS
from tests.support.client_packages import client_package

ollama = client_package("ollama")
pytestmark = pytest.mark.serve
MESSAGES = [{"role": "user", "content": PARIS}]
OPTIONS = {"temperature": 0, "num_predict": 24}


class Capital(BaseModel):
    country: Literal["France", "Italy"]
    city: Literal["Paris", "Rome"]


@pytest.fixture
def client(serve_url: str) -> Iterator[Any]:
    own = ollama.Client(host=serve_url, timeout=120)
    yield own
    own._client.close()


def test_a_stream_says_what_the_whole_answer_says(client: Any) -> None:
    whole = client.chat(DEMO, MESSAGES, options=OPTIONS)
    streamed = in_pieces(lambda: list(client.chat(f"{DEMO}:latest", MESSAGES, options=OPTIONS, stream=True)))
    assert "Paris" in whole.message.content
    assert "".join(answer.message.content for answer in streamed) == whole.message.content
    last = streamed[-1]
    assert (last.done_reason, last.eval_count) == (whole.done_reason, whole.eval_count)
    assert last.prompt_eval_count == whole.prompt_eval_count > 0
    assert 0 < last.prompt_eval_duration < last.total_duration


async def test_the_asynchronous_client_streams_too(serve_url: str) -> None:
    own = ollama.AsyncClient(host=serve_url, timeout=120)
    stream = await own.generate(DEMO, PARIS, options=OPTIONS, stream=True)
    assert "Paris" in "".join([answer.response async for answer in stream])
    await own._client.aclose()


def test_an_answer_keeps_to_a_schema(client: Any) -> None:
    options = {"temperature": 0, "num_predict": 64}
    answer = client.chat(DEMO, MESSAGES, format=Capital.model_json_schema(), options=options)
    assert isinstance(Capital.model_validate_json(answer.message.content), Capital)
    assert client.generate(DEMO, PARIS, format="json", options=options).response.lstrip().startswith("{")


def test_the_models(client: Any) -> None:
    assert DEMO in [model.model for model in client.list().models]
    shown = client.show(DEMO)
    assert shown.modelinfo["raylm.context_length"] > 0 and "tools" in shown.capabilities
    with pytest.raises(ollama.ResponseError, match="/api/pull is not supported"):
        client.pull(DEMO)
