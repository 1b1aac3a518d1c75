"""Ollama's API, asked by Ollama's own client over HTTP and by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from pydantic import BaseModel

from raylm.api.ollama.reading import read_format, read_messages, read_options, read_think
from raylm.api.ollama.request import Options
from raylm.config.sampling import SamplingDefaults
from raylm.core.step import TokenDelta
from raylm.core.structure import StructuredOutput
from raylm.errors import EngineDeadError, Overloaded, RequestRejected
from tests.api.thinking_models import CALL, TEXT, THOUGHT, prompt_of, saying, scripted, with_grammars
from tests.support.live_http import listening
from tests.support.openai_fakes import Server, ended, said

HI = [{"role": "user", "content": "1 + 2?"}]
IMAGE = "iVBORw0KGgo="


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def now() -> str:
    """Tells the time."""
    return "noon"


TOOLS = [add, now]


@pytest.fixture
def thinker() -> Server:
    return saying(TEXT)


@pytest.fixture
def address(thinker: Server) -> Iterator[str]:
    with listening(thinker.app) as url:
        yield url


@pytest.fixture
def client(address: str) -> Iterator[ollama.Client]:
    own = ollama.Client(host=address)
    yield own
    own._client.close()


async def post(server: Server, path: str = "/api/chat", **fields: Any) -> Any:
    return await server.http.post(path, json={"model": "tiny", "messages": HI, **fields})


async def generate(server: Server, **fields: Any) -> Any:
    return await server.http.post("/api/generate", json={"model": "tiny", "prompt": "1 + 2?", **fields})


def lines_of(response: Any) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def called(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def check_end(answer: Any, server: Server) -> None:
    assert answer.done and answer.done_reason == "stop"
    assert answer.prompt_eval_count == len(server.generator.requests[-1].prompt_ids)
    assert answer.eval_count == len(TEXT) + 1
    assert answer.total_duration == answer.prompt_eval_duration + answer.eval_duration > 0
    assert answer.load_duration == 0 and answer.created_at.endswith("Z")


def test_a_chat(client: ollama.Client, thinker: Server) -> None:
    answer = client.chat("tiny", HI, tools=TOOLS, think=True)
    assert answer.message.thinking and answer.message.thinking.strip() == "I add."
    assert answer.message.content and answer.message.content.strip() == "Let me add."
    assert called(answer.message) == [("add", {"a": 1, "b": 2}), ("now", {})]
    check_end(answer, thinker)
    assert '"description": "Adds two numbers."' in prompt_of(thinker)


def test_a_stream(client: ollama.Client, thinker: Server) -> None:
    answers = list(client.chat("tiny:latest", HI, tools=TOOLS, think=True, stream=True))
    assert "".join(answer.message.thinking or "" for answer in answers).strip() == "I add."
    assert "".join(answer.message.content or "" for answer in answers).strip() == "Let me add."
    assert [call for answer in answers for call in called(answer.message)] == [("add", {"a": 1, "b": 2}), ("now", {})]
    assert [answer.done for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert {answer.model for answer in answers} == {"tiny"}
    check_end(answers[-1], thinker)


async def test_the_asynchronous_client(address: str, thinker: Server) -> None:
    own = ollama.AsyncClient(host=address)
    texts = [answer.message.content or "" async for answer in await own.chat("tiny", HI, stream=True)]
    # Without tools a call is text.
    assert "".join(texts).strip() == TEXT.removeprefix(THOUGHT)
    answer = await own.generate("tiny", "1 + 2?", think=False)
    assert answer.response and answer.response.strip() == TEXT.removeprefix(THOUGHT) and answer.thinking is None
    check_end(answer, thinker)
    await own._client.aclose()


def test_a_loop_with_tools(client: ollama.Client, thinker: Server) -> None:
    first = client.chat("tiny", HI, tools=TOOLS)
    thinker.generator.script = said("It is 3.")
    results = [{"role": "tool", "content": "3", "tool_name": "add"}, {"role": "tool", "content": "noon"}]
    last = client.chat("tiny", [*HI, first.message, *results], tools=TOOLS)
    assert last.message.content == "It is 3." and last.done_reason == "stop"
    prompt = prompt_of(thinker, 1)
    assert "tool: 3" in prompt and "I add." in prompt and "'name': 'add'" in prompt


def test_models(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == "tiny" and model.modified_at is not None and model.modified_at.year == 2023
    (running,) = client.ps().models
    assert (running.model, running.context_length, running.digest) == ("tiny", 4000, model.digest)
    for name in ("tiny", "tiny:latest"):
        shown = client.show(name)
        assert shown.modelinfo is not None
        architecture = shown.modelinfo["general.architecture"]
        assert shown.modelinfo[f"{architecture}.context_length"] == 4000
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.parameters and "temperature 1" in shown.parameters.splitlines()


def test_a_model_that_does_not_think() -> None:
    server = Server(*said("x"))
    with listening(server.app) as url:
        own = ollama.Client(host=url)
        assert own.show("tiny").capabilities == ["completion", "tools"]
        with pytest.raises(ollama.ResponseError, match="does not support thinking") as refused:
            own.chat("tiny", HI, think=True)
        assert refused.value.status_code == 400
        assert own.chat("tiny", HI, think=False).message.content == "x"
        own._client.close()


def test_what_is_refused(client: ollama.Client, thinker: Server) -> None:
    refused: list[tuple[int, str, Any]] = [
        (404, "POST /api/pull is not supported", lambda: client.pull("tiny")),
        (404, "POST /api/push is not supported", lambda: client.push("tiny")),
        (404, "POST /api/create is not supported", lambda: client.create("mine", from_="tiny")),
        (404, "POST /api/copy is not supported", lambda: client.copy("tiny", "mine")),
        (404, "DELETE /api/delete is not supported", lambda: client.delete("tiny")),
        (404, "POST /api/embed is not supported", lambda: client.embed("tiny", "x")),
        (404, "POST /api/embeddings is not supported", lambda: client.embeddings("tiny", "x")),
        (404, "'huge' does not exist", lambda: client.chat("huge:latest", HI)),
        (404, "does not exist", lambda: client.show("huge")),
        (400, "images", lambda: client.chat("tiny", [{**HI[0], "images": [IMAGE]}])),
        (400, "images", lambda: client.generate("tiny", "x", images=[IMAGE])),
        (400, "suffix", lambda: client.generate("tiny", "x", suffix="y")),
        (400, "context", lambda: client.generate("tiny", "x", context=[1])),
        (400, "options.mirostat", lambda: client.chat("tiny", HI, options={"mirostat": 1})),
        (400, "options.top_p", lambda: client.chat("tiny", HI, options={"top_p": 2})),
        (400, "logprobs", lambda: client.chat("tiny", HI, logprobs=True)),
    ]
    for status, says, ask in refused:
        with pytest.raises(ollama.ResponseError) as error:
            ask()
        assert error.value.status_code == status and says in error.value.error
    assert thinker.generator.requests == []


def test_an_error_ends_a_stream(client: ollama.Client, thinker: Server) -> None:
    thinker.generator.script = [b"ab", EngineDeadError("The engine died")]
    with pytest.raises(ollama.ResponseError, match="The engine died"):
        list(client.chat("tiny", HI, stream=True))
    thinker.generator.script = [Overloaded("the queue is full", retry_after=1)]
    with pytest.raises(ollama.ResponseError, match="the queue is full") as overloaded:
        list(client.chat("tiny", HI, stream=True))
    assert overloaded.value.status_code == 503


def test_no_messages_and_no_prompt_load_a_model(client: ollama.Client, thinker: Server) -> None:
    assert client.generate("tiny").done_reason == "load"
    assert client.generate("tiny", keep_alive=0).done_reason == "unload"
    answer = client.chat("tiny", [])
    assert (answer.done, answer.done_reason, answer.message.content) == (True, "load", "")
    assert thinker.generator.requests == []


async def test_streams_are_the_default_and_lines_of_json() -> None:
    lines = lines_of(await post(saying(f"{THOUGHT}Thr\u2028ee.", size=1000)))
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(line["message"].get("thinking", "") for line in lines).strip() == "I add."
    assert "".join(line["message"]["content"] for line in lines).strip() == "Thr\u2028ee."
    assert all(line["message"]["role"] == "assistant" for line in lines)
    lines = lines_of(await generate(saying("Three.")))
    assert "".join(line["response"] for line in lines) == "Three." and "message" not in lines[0]
    assert lines[-1]["done_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 4, 1000])
async def test_a_call_is_one_line(size: int) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    lines = lines_of(await post(saying(CALL, size=size), tools=[tool]))
    (calls,) = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    assert [call["function"] for call in calls] == [{"index": 0, "name": "add", "arguments": {"a": 1, "b": 2}}]


async def test_raw_prompts_and_system_prompts() -> None:
    server = saying("x")
    await generate(server, raw=True)
    await generate(server, system="Be kind.")
    assert prompt_of(server, 0) == "1 + 2?"
    assert prompt_of(server, 1).startswith("system: Be kind.\nuser: 1 + 2?\n")


async def test_options_reach_the_model() -> None:
    server = scripted(b"a", TokenDelta("", [*b"b"], "length"))
    options = {
        "num_predict": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": 9,
        "stop": ["x", "y"],
        "repeat_penalty": 1.5,
        "num_ctx": 99,
        "num_gpu": 1,
    }
    lines = lines_of(await post(server, options=options, keep_alive="5m", think="low"))
    assert lines[-1]["done_reason"] == "length"
    params = server.generator.requests[0].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (2, 0.5, 7, 0.25)
    assert (params.min_p, params.seed, params.stop, params.repetition_penalty) == (0.125, 9, ("x", "y"), 1.5)
    assert "[True low]" in prompt_of(server)


@pytest.mark.parametrize("tokens", [-1, -2, 0, 100_000])
async def test_an_answer_may_be_as_long_as_the_model_allows(tokens: int) -> None:
    server = scripted(b"a", ended())
    await post(server, options={"num_predict": tokens, "seed": -1})
    asked = server.generator.requests[0]
    assert asked.params.max_tokens == 4000 - len(asked.prompt_ids)
    assert asked.params.seed not in (None, -1)


def test_options_in_ollamas_words() -> None:
    for wrong, says in (
        (Options(repeat_penalty=3.0), "options.repeat_penalty must be a number in (0, 2], got 3.0"),
        (Options(top_p=3.0), "options.top_p must be"),
        (Options(stop=["x"] * 99), "options.stop has 99 strings"),
    ):
        with pytest.raises(RequestRejected) as refused:
            read_options(wrong, SamplingDefaults())
        assert str(refused.value).startswith(says) and says.startswith(str(refused.value.param))
    assert read_options(Options(top_k=-1), SamplingDefaults(temperature=0.5)).temperature == 0.5


def test_formats() -> None:
    class Sum(BaseModel):
        value: int

    schema = Sum.model_json_schema()
    asked = read_format(schema)
    assert asked is not None and asked.structure == StructuredOutput("json_schema", json.dumps(schema))
    asked = read_format("json")
    assert asked is not None and (asked.structure, asked.param) == (StructuredOutput("json_object"), "format")
    assert read_format("") is read_format(None) is None
    with pytest.raises(RequestRejected, match='^format must be "json" or a JSON schema'):
        read_format("xml")


@pytest.mark.parametrize(
    ("think", "is_on", "is_shown"),
    [(None, None, True), (True, True, True), (False, False, False), ("high", True, True)],
)
def test_think(think: Any, is_on: bool | None, is_shown: bool) -> None:
    thinking = read_think(think)
    assert (thinking.options.kwargs.get("enable_thinking"), thinking.is_shown) == (is_on, is_shown)
    assert thinking.options.reasoning_effort == (think if isinstance(think, str) else None)


def test_think_that_is_none() -> None:
    for wrong in ("huge", 1, {}):
        with pytest.raises(RequestRejected, match="^think must be"):
            read_think(wrong)


def test_results_find_their_calls() -> None:
    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("a", "b", "a")]
    results = [{"role": "tool", "tool_name": "b", "content": "1"}, {"role": "tool", "content": "2"}]
    found = read_messages([{"role": "assistant", "thinking": "hm", "tool_calls": calls}, *results])
    assert found[0]["content"] == "" and found[0]["reasoning_content"] == "hm"
    assert [(message["tool_call_id"], message["name"]) for message in found[1:]] == [("call_2", "b"), ("call_1", "a")]


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("hi", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "images": ["x"]}, "messages[0].images"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, "messages[0].tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_messages_that_are_none(message: Any, place: str) -> None:
    with pytest.raises(RequestRejected) as refused:
        read_messages([message])
    assert str(refused.value).startswith(f"{place} ")


async def test_errors_have_ollamas_shape(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    server = saying("x", api_keys_file=str(keys), strict=True)
    assert (await post(server)).status_code == 401
    server.http.headers["authorization"] = "Bearer secret"
    for response, says in (
        (await post(server, options={"mystery": 1}), "options.mystery"),
        (await post(server, mystery=1), "mystery"),
        (await server.http.post("/api/show", json={}), "model is required"),
        (await server.http.post("/api/tags"), "takes GET and HEAD, not POST"),
    ):
        assert response.status_code in (400, 405)
        assert response.json().keys() == {"error"} and says in response.json()["error"]
    version = (await server.http.get("/api/version")).json()["version"]
    assert version.count(".") == 2


async def test_refused_routes_are_not_among_those_that_there_are() -> None:
    message = (await saying("x").http.get("/nothing")).json()["error"]["message"]
    assert "/api/chat" in message and "/v1/messages" in message
    assert "/api/pull" not in message and "/v1/messages/batches" not in message


async def test_a_format_becomes_the_form_of_the_answer() -> None:
    server = saying("{}")
    grammars = with_grammars(server)
    for form in ("json", {"type": "object"}):
        assert (await generate(server, format=form)).status_code == 200
    assert [(structure.kind, param) for structure, param in grammars.asked] == [
        ("json_object", "format"),
        ("json_schema", "format"),
    ]
    assert all(asked.params.structure is not None for asked in server.generator.requests)
