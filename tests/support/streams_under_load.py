"""Clients without a pause for engines whose every token says its position (tests/support/paced.py): every stream is
compared with what it must be."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.support.paced_config import position_token

MAX_TOKENS = 400


@dataclass
class Seen:
    """What clients saw."""

    whole: int = 0
    aborted: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)


class Client:
    """One stream after another. A request that is refused with Retry-After is counted, and another asked a second
    later."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seen: Seen, rng: random.Random) -> None:
        self._session = session
        self._url = url
        self._seen = seen
        self._rng = rng
        self._leaving = False

    def leave(self) -> None:
        """Ask nothing more; the stream that runs is read to its end."""
        self._leaving = True

    async def run(self, until: float) -> None:
        while not self._leaving and time.monotonic() < until:
            try:
                await self.ask()
            except (aiohttp.ClientError, TimeoutError) as error:
                self._seen.wrong.append(f"{type(error).__name__}: {error}")

    async def ask(self) -> None:
        """One stream. Raises aiohttp.ClientError or TimeoutError where it is cut."""
        rng = self._rng
        length, tokens = rng.randrange(1, 600), rng.randrange(2, MAX_TOKENS)
        leaves_at = rng.randrange(tokens) if rng.random() < 0.1 else None
        body = {
            "model": "m",
            "prompt": [rng.randrange(5, 40_000) for _ in range(length)],
            "max_tokens": tokens,
            "n": rng.choice((1, 1, 3)),
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        found: dict[int, list[int]] = {}
        usage = None
        last = time.monotonic()
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            if answer.status == 503 and "retry-after" in answer.headers:
                # Nothing has begun: OpenAI's clients ask again by themselves.
                await self._refused()
                return
            if answer.status != 200:
                self._seen.wrong.append(f"{answer.status}: {(await answer.read())[:300]!r}")
                return
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                self._seen.longest_gap_s, last = max(self._seen.longest_gap_s, now - last), now
                event = json.loads(line[6:])
                if "error" in event and event["error"]["code"] == "overloaded" and not found:
                    await self._refused()  # It was held, so that headers went out, but not begun.
                    return
                if "error" in event:
                    self._seen.wrong.append(line.decode()[:300])
                    return
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    found.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
                if leaves_at is not None and sum(map(len, found.values())) > leaves_at:
                    self._seen.aborted += 1
                    return
        self._check(found, usage, length, tokens, body["n"])

    async def _refused(self) -> None:
        self._seen.refused += 1
        await asyncio.sleep(1)

    def _check(self, found: dict[int, list[int]], usage: Any, length: int, tokens: int, n: int) -> None:
        must_be = [position_token(length + place) for place in range(tokens)]
        if any(found.get(index) != must_be for index in range(n)):
            self._seen.wrong.append(f"of {n} x {tokens} tokens came {[len(each) for each in found.values()]}")
        elif usage is None or usage["completion_tokens"] != n * tokens or usage["prompt_tokens"] != length:
            self._seen.wrong.append(f"usage {usage} of a prompt of {length} and {n} x {tokens} tokens")
        else:
            self._seen.whole += 1


def open_session() -> aiohttp.ClientSession:
    """Connections without a limit of number or time; a stream may be silent for two minutes."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
