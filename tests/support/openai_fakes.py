"""A model without an engine for tests of the HTTP face: a token is a byte, and the answer is a script."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import httpx

from raylm.config.chat import ChatConfig
from raylm.config.mcp import McpConfig
from raylm.config.responses import ResponsesConfig
from raylm.config.serving import HttpConfig
from raylm.core.control import Control
from raylm.core.drafting import DraftCounters
from raylm.core.load import Load
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.step import TokenDelta
from raylm.errors import Overloaded, RaylmError
from raylm.generation.ability import ability_of
from raylm.generation.served_model import EngineStats, ServedModel, Text
from raylm.serving.http import build_http_app
from raylm.serving.identity.shares import Shares
from raylm.stacks import ProcessStacks
from raylm.text.chat import ChatTemplate
from raylm.text.chat_options import ChatOptions
from raylm.text.definition import TokenizerInfo
from raylm.text.stop import StopTable

END = 256
"""The end-of-sequence token."""


class Piece(NamedTuple):
    text: str
    finish_reason: str | None
    num_tokens: int
    stop_reason: str | int | None = None


class ByteDetokenizer:
    """Text of bytes as they come; other tokens are none."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id] if token_id < END else []))


class ByteStream:
    """Text of bytes; a stop string that arrives in one push ends it."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = stop

    def push(self, token_ids: list[int], finish_reason: str | None) -> Piece:
        spoken = token_ids[:-1] if finish_reason == "stop" else token_ids
        text = self._decoder.decode(bytes(spoken), final=finish_reason is not None)
        for stop in self._stop:
            if stop in text:
                return Piece(text[: text.index(stop)], "stop", len(token_ids), stop)
        return Piece(text, finish_reason, len(token_ids))


TEMPLATE = ChatTemplate(
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}",
    {},
)


class ByteText:
    def __init__(self, template: ChatTemplate = TEMPLATE) -> None:
        self.chat_template = template

    def encode(self, prompt: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        return list(prompt.encode())

    def render(self, messages: Sequence[Any], options: ChatOptions | None = None) -> str:
        return self.chat_template.render(messages, options)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        end = b"" if skip_special_tokens else b"<end>"
        return b"".join(bytes([token]) if token < END else end for token in ids).decode()

    def token_names(self, ids: Sequence[int]) -> list[str]:
        return [f"<{token:02x}>" for token in ids]

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        return TokenizerInfo({"eos_token": "<end>"}, None, (END,), "the template")

    def detokenizer(self, params: SamplingParams, *, continues_prompt: bool) -> ByteDetokenizer:
        return ByteDetokenizer()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END else b"<end>"

    def prepare(self, params: SamplingParams) -> SamplingParams:
        return params

    def stop_table(self, params: SamplingParams) -> StopTable | None:
        return StopTable(params.stop) if params.stop else None

    def stream(
        self, params: SamplingParams, *, continues_prompt: bool = False, stops: StopTable | None = None
    ) -> ByteStream:
        return ByteStream([stop for stop, _ in stops.patterns] if stops is not None else ())


class Asked(NamedTuple):
    """What one call of generate was given."""

    request_ids: list[str]
    prompt_ids: list[int]
    params: SamplingParams
    options: RequestOptions


Item = bytes | Exception | TokenDelta | asyncio.Event | None
Script = Sequence[Item]


class ScriptedGenerator:
    """Plays `script` for every sequence: bytes are tokens, an exception is raised, None waits for ever, an event until
    it is set. An exception at the beginning refuses the request; with an `admission` it is taken when that is set.
    `refused` are the numbers of calls that are refused though the script goes on.

    A script's delta that has a request_id of its own is the number of the sequence that it is for. Without a script it
    counts: letters from that of the seed, plus the sequence's number, on until max_tokens. A seed that the request did
    not give counts as 0.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.requests: list[Asked] = []
        self.admission: asyncio.Event | None = None
        self.refused: set[int] = set()
        self.live = 0
        self.num_deltas = 0
        self.aborted: list[str] = []

    def generate(
        self, request_ids: Sequence[str], prompt_ids: list[int], params: SamplingParams, options: RequestOptions
    ) -> ScriptedDeltas:
        asked = Asked(list(request_ids), prompt_ids, params, options)
        self.requests.append(asked)
        return ScriptedDeltas(self, asked)


class ScriptedDeltas:
    """The deltas of one prompt's sequences, in turn."""

    engine_id = "scripted"
    route = "prefix; matched-tokens=16"

    def __init__(self, generator: ScriptedGenerator, asked: Asked) -> None:
        self._generator = generator
        self._number = len(generator.requests) - 1
        self._live = dict.fromkeys(asked.request_ids)
        generator.live += len(self._live)
        self._steps = self._play(asked)
        self._ended: list[TokenDelta] = []
        self._aborted = asyncio.Event()

    async def admitted(self) -> None:
        await asyncio.sleep(0)
        if self._generator.admission is not None:
            waits = [asyncio.ensure_future(event.wait()) for event in (self._generator.admission, self._aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        script = self._generator.script
        error = script[0] if script and isinstance(script[0], Exception) else None
        if self._number in self._generator.refused:
            error = Overloaded("the queue is full", retry_after=1)
        if error is not None:
            for refused in list(self._live):
                self._forget(refused)
            raise error

    def __aiter__(self) -> ScriptedDeltas:
        return self

    async def __anext__(self) -> TokenDelta:
        await asyncio.sleep(0)
        for request_id, item in self._steps:
            if request_id in self._live:
                return await self._step(request_id, item)
        if self._ended:
            return self._ended.pop(0)
        raise StopAsyncIteration

    async def _step(self, request_id: str, item: Item) -> TokenDelta:
        if isinstance(item, Exception):
            for failed in list(self._live):
                self._forget(failed)
            raise item
        if item is None:
            await self._aborted.wait()
            return self._ended.pop(0)
        if isinstance(item, asyncio.Event):
            await item.wait()
            item = b""
        delta = item if isinstance(item, TokenDelta) else TokenDelta("", list(item or b""))
        if delta.finish_reason is not None:
            self._forget(request_id)
        self._generator.num_deltas += 1
        return delta._replace(request_id=request_id)

    def end(self, request_id: str) -> None:
        if request_id in self._live:
            self._forget(request_id)
            self._generator.aborted.append(request_id)

    def abort(self) -> None:
        self._ended = [TokenDelta(request_id, [], "abort") for request_id in self._live]
        for request_id in list(self._live):
            self.end(request_id)
        self._aborted.set()

    async def aclose(self) -> None:
        for request_id in list(self._live):
            self.end(request_id)

    def _forget(self, request_id: str) -> None:
        del self._live[request_id]
        self._generator.live -= 1

    def _play(self, asked: Asked) -> Iterator[tuple[str, Item]]:
        script = self._generator.script
        ids = asked.request_ids
        if script is not None:
            for item in script:
                own = item.request_id if isinstance(item, TokenDelta) else ""
                yield from ((request_id, item) for number, request_id in enumerate(ids) if own in ("", str(number)))
            return
        last = asked.params.max_tokens
        assert last is not None
        for step in range(1, last + 1):
            for number, request_id in enumerate(ids):
                token = ord("a") + (_small(asked.params.seed) + number + step - 1) % 26
                yield request_id, TokenDelta("", [token], "length" if step == last else None)


def _small(seed: int | None) -> int:
    assert seed is not None, "a request has a seed, whether its client gave one or not"
    return seed if abs(seed) < 2**32 else 0


def usage(prompt: int, completion: int, *, cached: int = 0) -> dict[str, Any]:
    """An answer's usage as clients see it."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def ended(text: bytes = b"") -> TokenDelta:
    """The last delta of a model that has said enough."""
    return TokenDelta("", [*text, END], "stop")


def said(text: str, *, size: int = 3) -> list[TokenDelta]:
    """The deltas of a model that writes a text, so many bytes at a time."""
    data = text.encode()
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    return [*(TokenDelta("", [*part], None) for part in parts), ended()]


class ScriptedEngine:
    """An engine that is told things."""

    model = "tiny"

    def __init__(self, engine_id: str, *, workers: int = 2) -> None:
        self.engine_id = engine_id
        self.workers = workers
        self.told: list[Control] = []
        self.error: RaylmError | None = None

    async def control(self, op: Control) -> list[str]:
        if self.error is not None:
            raise self.error
        self.told.append(op)
        return [f"rank {rank}" for rank in range(self.workers)]


class Catalog:
    """One model, "tiny" (64 tokens long); "late" is known but has no engine, unless tiny is `alone`."""

    def __init__(
        self, generator: ScriptedGenerator, text: Text, max_model_len: int = 64, *, alone: bool = False
    ) -> None:
        self.alone = alone
        ability = ability_of(text.chat_template, ChatConfig())
        self.model = ServedModel("tiny", 1_700_000_000, max_model_len, 257, text, generator, ability=ability)
        self.is_ready = self.is_alive = True
        self.handles = [ScriptedEngine("engine-0"), ScriptedEngine("engine-1")]
        self.engine_stats = [
            EngineStats(
                "tiny",
                "engine-0",
                Load(
                    3,
                    2,
                    0.25,
                    9,
                    num_swaps=4,
                    prefix_queries=100,
                    prefix_hits=75,
                    waiting_tokens=60,
                    drafts=DraftCounters(10, 30, 17, (9, 6, 2)),
                ),
            )
        ]

    def get(self, name: str) -> ServedModel | None:
        return self.model if name == "tiny" else None

    def names(self) -> list[str]:
        return ["tiny"] if self.alone else ["tiny", "late"]

    def aliases(self) -> dict[str, str]:
        return dict.fromkeys(self.model.aliases, "tiny")

    def ready(self) -> bool:
        return self.is_ready

    def unready(self) -> dict[str, str]:
        return {} if self.is_ready else {"late": "no engine is up"}

    def alive(self) -> bool:
        return self.is_alive

    def stats(self) -> list[EngineStats]:
        return self.engine_stats

    def engines(self, name: str) -> list[ScriptedEngine]:
        return self.handles if name == "tiny" else []

    async def stacks(self, names: Collection[str]) -> list[ProcessStacks]:
        return [ProcessStacks(f"engine of {name}", "node", 7, "thread main\n") for name in names]


class Server:
    """The application over a scripted generator, with ways to talk to it."""

    def __init__(
        self,
        *script: Item,
        max_model_len: int = 64,
        alone: bool = False,
        template: ChatTemplate = TEMPLATE,
        text: Text | None = None,
        responses: ResponsesConfig | None = None,
        mcp: McpConfig | None = None,
        shares: Shares | None = None,
        **config: Any,
    ) -> None:
        self.generator = ScriptedGenerator(script or None)
        self.catalog = Catalog(self.generator, text or ByteText(template), max_model_len, alone=alone)
        self.app = build_http_app(self.catalog, HttpConfig(**config), responses, mcp, shares)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://raylm")

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", **fields})


def sse(response: httpx.Response) -> list[Any]:
    """The events of a stream, parsed; the last must be [DONE]."""
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\n")
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


class RawClient:
    """Drives the application by hand, message by message, as a server does."""

    def __init__(self, app: Any, body: bytes, path: str = "/v1/chat/completions", chunks: int = 1) -> None:
        self.sent: list[Any] = []
        self.arrived = asyncio.Event()
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.received = 0
        size = max(1, len(body) // chunks)
        self._parts = [body[start : start + size] for start in range(0, len(body), size)]
        scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": [], "query_string": b""}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            self.received += 1
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.arrived.set()
