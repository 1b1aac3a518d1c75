"""No request holds the event loop: what stopped every stream before is refused or done elsewhere."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from time import thread_time
from typing import Any

import pytest

from raylm.api import running_requests
from raylm.api.ollama import models as ollama_models
from raylm.api.parser import parse
from raylm.api.protocol import ChatRequest, CompletionRequest
from raylm.config.serving import HttpConfig
from raylm.errors import RequestRejected
from raylm.text.processor import TextProcessor
from raylm.text.tokenizer import Tokenizer
from tests.support.held_loop import ALLOWED_S, longest_call, measured
from tests.support.openai_fakes import ScriptedGenerator, Server, ended

pytestmark = pytest.mark.usefixtures("heap_apart")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": MESSAGES, "max_tokens": 1} | fields).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 1} | fields).encode()


def raw(name: str, value: bytes) -> bytes:
    return b'{"model":"tiny","' + name.encode() + b'":' + value + b"}"


def nested(depth: int, count: int) -> bytes:
    return b"[" + b",".join([b"[" * depth + b"]" * depth] * count) + b"]"


ATTACKS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "a prompt of 7.6 MB": (COMPLETIONS, lambda: completion(prompt="a b " * 1_900_000), "at least"),
    "a prompt of 7.6 MB to cut": (
        COMPLETIONS,
        lambda: completion(prompt="a b " * 1_900_000, truncate_prompt_tokens=5),
        "at most 262144 can be truncated",
    ),
    "8 MB in one character": (COMPLETIONS, lambda: raw("prompt", b'"' + b"a" * (8 * 2**20 - 99) + b'"'), "at least"),
    "a message of 7.6 MB": (CHAT, lambda: chat(messages=[{"role": "user", "content": "a b " * 1_900_000}]), "at least"),
    "1,024 prompts with a long stop string": (
        COMPLETIONS,
        lambda: completion(prompt=["x"] * 1024, stop="a" * 20_000),
        "1024",
    ),
    "deep prompts": (COMPLETIONS, lambda: raw("prompt", nested(190, 20_000)), "32768 JSON values"),
    "deep messages": (CHAT, lambda: raw("messages", nested(190, 20_000)), "32768 JSON values"),
    "lists within the depth": (CHAT, lambda: raw("messages", nested(60, 60_000)), "32768 JSON values"),
    "200,000 messages": (
        CHAT,
        lambda: chat(messages=[{"role": "user", "content": "x"}] * 200_000),
        "32768 JSON values",
    ),
    "8,000 messages": (CHAT, lambda: chat(messages=[{"role": "user", "content": "x"}] * 8_000), "8000 messages"),
    "content parts": (
        CHAT,
        lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 9000}]),
        "9000 content parts",
    ),
    "500,000 unknown fields": (CHAT, lambda: chat(**{f"f{i}": 1 for i in range(500_000)}), "32768 JSON values"),
    "30,000 unknown fields": (CHAT, lambda: chat(**{f"f{i}": 1 for i in range(30_000)}), "fields"),
    "logit_bias of 400,000": (CHAT, lambda: chat(logit_bias={str(i): 1 for i in range(400_000)}), "32768 JSON values"),
    "logit_bias of 30,000": (CHAT, lambda: chat(logit_bias={str(i): 1 for i in range(30_000)}), "logit_bias"),
    "30,000 allowed tokens": (COMPLETIONS, lambda: completion(allowed_token_ids=[1] * 30_000 + [-1]), "got -1"),
    "256 long bad words": (
        COMPLETIONS,
        lambda: completion(prompt=[1], bad_words=["ab" * 60] * 255 + ["7" * 1024]),
        "of 1024 tokens, at most 64",
    ),
    "300 bad words": (COMPLETIONS, lambda: completion(bad_words=["ab"] * 300), "bad_words has 300 strings"),
    "30,000 stop strings": (COMPLETIONS, lambda: completion(stop=["ab"] * 30_000), "16"),
    "30,000 stop tokens": (COMPLETIONS, lambda: completion(stop_token_ids=[1] * 30_000), "30000 entries"),
    "a million token ids elsewhere": (
        COMPLETIONS,
        lambda: completion(stop_token_ids=[1] * 1_000_000),
        "32768 JSON values",
    ),
    "2,000 prompts": (COMPLETIONS, lambda: completion(prompt=[[1] * 30] * 2000), "prompt holds 2000 lists"),
    "2,700,000 lists": (COMPLETIONS, lambda: raw("prompt", b"[" + b"[]," * 2_700_000 + b"[]]"), "32768 JSON values"),
    "1,300,000 token ids": (COMPLETIONS, lambda: raw("prompt", b"[" + b"12345," * 1_300_000 + b"1]"), "1300001 tokens"),
    "floats": (COMPLETIONS, lambda: raw("prompt", b"[" + b"1.5," * 1_000_000 + b"1]"), "token ids"),
    "a long string where a number belongs": (CHAT, lambda: chat(temperature="\\\n" * 2_000_000), "temperature"),
    "many values where a number belongs": (CHAT, lambda: chat(temperature=["x", {"a": 1}] * 6_000), "temperature"),
    "a model's name of 8 MB": (CHAT, lambda: chat(model="é" * 1_000_000), "does not exist"),
    "a content of 8 MB that is no text": (
        CHAT,
        lambda: chat(messages=[{"role": "user", "content": {"é": "\n" * 4_000_000}}]),
        "content",
    ),
    "a field's name of 7.8 MB": (CHAT, lambda: chat(**{"é" * 1_300_000: 1, "temperature": "x"}), "temperature"),
    "a field given twice, of 30,000": (
        CHAT,
        lambda: raw("messages", b'[{"user":1,"user":1,' + b",".join(b'"f%d":1' % i for i in range(30_000)) + b"}]"),
        "is required",
    ),
    "a role of 8 MB": (CHAT, lambda: chat(messages=[{"role": "x" * 8_000_000, "content": ""}]), "role"),
}


STRICT = (
    *("a field's name of 7.8 MB", "a field given twice, of 30,000", "deep prompts", "8,000 messages"),
    *("30,000 unknown fields", "1,300,000 token ids", "floats"),
)
"""Attacks that are made once more on a server that looks for fields given twice."""


@pytest.mark.parametrize(("name", "strict"), [*((name, False) for name in ATTACKS), *((name, True) for name in STRICT)])
async def test_an_attack_is_refused_and_holds_nobody(
    name: str, strict: bool, smollm: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, make, part = ATTACKS[name]
    body = make()
    with longest_call() as call, suppress(RequestRejected):
        parse(ChatRequest if path == CHAT else CompletionRequest, bytearray(body), HttpConfig(strict=strict))
    assert call.seconds < ALLOWED_S, call.callback
    server = Server(ended(), max_model_len=2048, text=smollm, strict=strict)
    async with measured(monkeypatch) as longest:
        response = await server.http.post(path, content=body)
    assert longest.seconds < ALLOWED_S, longest.callback
    error = response.json()["error"]
    assert response.status_code in (400, 404) and error["message"]
    assert len(response.content) < 3000
    if not (strict and "field" in name):
        assert part in error["message"]


@pytest.mark.parametrize(
    ("path", "module", "reads"),
    [("/v1/abort", running_requests, "parse_plain"), ("/api/show", ollama_models, "read_fields")],
)
async def test_a_large_body_is_read_aside(path: str, module: Any, reads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    read = getattr(module, reads)

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return read(*args)

    monkeypatch.setattr(module, reads, noted)
    body = json.dumps({"rid": "x" * 100_000, "name": "tiny"}).encode()
    await Server(ended(), strict=False).http.post(path, content=body)
    (thread,) = threads
    assert thread is not threading.current_thread()


@pytest.fixture
def lock_kept() -> Iterator[None]:
    """A thread has Python's lock until it lets go of it by itself, as the loop does in each turn."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("lock_kept")
async def test_other_tasks_go_on_while_a_long_prompt_becomes_tokens(
    smollm: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer lets go of Python's lock, so the loop turns while it works: with the lock not a single time. A busy
    machine may have held the loop's thread for as long: then it is asked once more."""
    turns = turns_meanwhile = 0
    encode = Tokenizer._unlocked

    def counted(own: Tokenizer, *arguments: Any) -> Any:
        nonlocal turns_meanwhile
        before = turns
        encoding = encode(own, *arguments)
        turns_meanwhile += turns - before
        return encoding

    monkeypatch.setattr(Tokenizer, "_unlocked", counted)
    server = Server(ended(), max_model_len=200_000, text=smollm)
    prompt = "The quick brown fox jumps over the lazy dog. " * 9_000
    for _ in range(10):
        asked = asyncio.create_task(server.http.post(COMPLETIONS, content=completion(prompt=prompt)))
        while not asked.done():
            await asyncio.sleep(0)
            turns += 1
        assert "token id" in asked.result().json()["error"]["message"]  # The model has 257 tokens, its tokenizer more.
        if turns_meanwhile:
            return
    raise AssertionError("the loop did not turn while the tokenizer worked")


@pytest.mark.parametrize("many", [{"n": 128}, {"prompt": ["x"] * 1024}], ids=str)
async def test_choices_share_what_looks_for_stop_strings(
    many: dict[str, Any], smollm: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = [letter * 1023 + "!" for letter in "abcdefghijklmnop"]
    server = Server(ended(), max_model_len=2048, text=smollm)
    server.catalog.model = replace(server.catalog.model, vocab_size=100_000)
    async with measured(monkeypatch) as longest:
        response = await server.http.post(COMPLETIONS, content=completion(stop=stop, **many))
    assert response.status_code == 200, response.text
    assert longest.seconds < ALLOWED_S, longest.callback


async def test_prompts_share_what_is_said_of_their_tokens(
    smollm: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(ended(), max_model_len=2048, text=smollm)
    server.catalog.model = replace(server.catalog.model, vocab_size=100_000)
    many = {"allowed_token_ids": list(range(20_000)), "logit_bias": {str(token): 1 for token in range(1024)}}
    async with measured(monkeypatch) as longest:
        body = completion(prompt=["x"] * 512, bad_words=["ab cd"] * 256, **many)
        response = await server.http.post(COMPLETIONS, content=body)
    assert response.status_code == 200, response.text
    assert longest.seconds < ALLOWED_S, longest.callback


async def test_an_echo_is_no_longer_than_a_body() -> None:
    server = Server(ended(), max_model_len=100_000, max_body_bytes=100_000)
    answer = await server.complete(prompt="x" * 1000, echo=True, n=101)
    assert "101000 characters" in answer.json()["error"]["message"] and answer.json()["error"]["param"] == "echo"
    assert (await server.complete(prompt="x" * 1000, echo=True, n=100)).status_code == 200


class SlowGenerator(ScriptedGenerator):
    """Each prompt takes it half a millisecond to send, as long ones do."""

    def generate(self, *arguments: Any) -> Any:
        end = thread_time() + 0.0005
        while thread_time() < end:
            pass
        return super().generate(*arguments)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thousand_prompts_are_sent_in_turns(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(ended())
    server.catalog.model = replace(server.catalog.model, generator=SlowGenerator([ended()]))
    async with measured(monkeypatch) as longest:
        response = await server.http.post(COMPLETIONS, content=completion(prompt=["x"] * 1024, stream=stream))
    assert response.status_code == 200, response.text
    assert longest.seconds < ALLOWED_S, longest.callback


@pytest.mark.parametrize("strict", [False, True])
async def test_token_ids_up_to_the_body_limit_are_taken(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[number % 250 + 1] * 20_000 for number in range(80)]
    server = Server(ended(), max_model_len=32_768, strict=strict)
    body = completion(prompt=prompts)
    async with measured(monkeypatch) as longest:
        response = await server.http.post(COMPLETIONS, content=body)
    assert longest.seconds < ALLOWED_S, longest.callback
    assert response.status_code == 200, response.text
    assert [asked.prompt_ids for asked in server.generator.requests] == prompts


async def test_large_texts_are_taken_whatever_is_in_them(smollm: TextProcessor) -> None:
    """Brackets, commas, quotes and backslashes inside of strings are no values."""
    content = json.dumps([{"a": [1, '\\"[{']}] * 30_000)
    server = Server(ended(), max_model_len=2_000_000)
    response = await server.http.post(CHAT, content=chat(messages=[{"role": "user", "content": content}]))
    assert response.status_code == 200, response.text
    assert content in bytes(server.generator.requests[0].prompt_ids).decode()
