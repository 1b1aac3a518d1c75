"""A small OpenAI-compatible server for tests: raw HTTP on loopback, in a thread, with answers made by rule."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeServer:
    """What it answers with. Each output token is one chunk, or `merge` of them."""

    merge: int = 1
    usage: bool = True
    cached: int | None = None
    """Of each prompt's 10 tokens, where usage tells it."""
    status: int = 200
    fail_every: int = 0
    """Every n-th request ends with an error event instead of [DONE]."""
    close: bool = False
    """Answer without a length and close the connection."""
    split: int = 0
    """Write the answer in pieces of this many bytes."""
    models: list[str] = field(default_factory=lambda: ["fake"])
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    """Of every request, in small letters; empty where there is none."""
    sessions: list[str] = field(default_factory=list)
    """The header x-session-id of every request."""
    connections: int = 0
    url: str = ""

    @contextmanager
    def running(self) -> Iterator[FakeServer]:
        ready = threading.Event()
        stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

        async def serve() -> None:
            end = asyncio.Event()
            stop.append((asyncio.get_running_loop(), end))
            self._tasks: set[asyncio.Task[None]] = set()
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            ready.set()
            await end.wait()
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.wait_closed()

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        assert ready.wait(120)
        try:
            yield self
        finally:
            loop, end = stop[0]
            loop.call_soon_threadsafe(end.set)
            thread.join(120)
            assert not thread.is_alive()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) and await self._answer(head, reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        method, path, _ = head.decode().split(" ", 2)
        headers = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
        body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))) or b"{}")
        self.authorizations.append(headers.get("authorization", ""))
        self.sessions.append(headers.get("x-session-id", ""))
        if method == "GET":
            answer = _sized(200, json.dumps({"data": [{"id": name} for name in self.models]}))
        else:
            self.requests.append((path, body))
            answer = self._completion(body)
        step = self.split or len(answer)
        for place in range(0, len(answer), step):
            writer.write(answer[place : place + step])
            await writer.drain()
            await asyncio.sleep(0)
        return not self.close

    def _completion(self, body: dict[str, Any]) -> bytes:
        if self.status != 200:
            return _sized(self.status, json.dumps({"error": {"message": "no"}}))
        if not body.get("stream"):
            return _sized(200, json.dumps({"choices": [{"message": {"content": "hi"}}]}))
        events = self._events(body)
        if self.close:
            return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"".join(events)
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
        return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"

    def _events(self, body: dict[str, Any]) -> list[bytes]:
        chat = "messages" in body
        tokens = body["max_tokens"]
        events = [_event({"choices": [{"delta": {"role": "assistant"}}]})] if chat else []
        for start in range(0, tokens, self.merge):
            text = " w" * min(self.merge, tokens - start)
            events.append(_event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]}))
        if self.fail_every and len(self.requests) % self.fail_every == 0:
            return [*events, _event({"error": {"message": "the engine died"}})]
        if self.usage:
            usage: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": tokens}
            if self.cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
            events.append(_event({"choices": [], "usage": usage}))
        return [*events, b"data: [DONE]\n\n"]


def _event(data: object) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _sized(status: int, body: str) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
