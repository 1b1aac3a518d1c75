"""Hostile requests, from a seed: too large, too deep, too many, of wrong types, damaged; and some that are right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

MODEL = "smollm2-135m"
MAX_BODY_BYTES = 8 * 2**20
_LETTERS = ("ab ", "the cat sat on a mat. ", "日本語", "😀\u0301é", '"\\[{,', "\x00\x04\t\n", "<|im_end|>")
_NAMES = ("n", "stop", "temperature", "logit_bias", "stream_options", "seed", "user", "top_k", "tools", "best_of")
_PATHS = ("/v1/chat/completions", "/v1/completions")


class Hostile(NamedTuple):
    """One request. With `leaves_after` the client reads as many events of the answer and goes."""

    kind: str
    path: str
    body: bytes
    leaves_after: int | None = None


def hostile(random: Random) -> Hostile:
    kind = random.choice(list(_KINDS))
    return _KINDS[kind](kind, random)


def size(random: Random, most: int) -> int:
    """Most are small, some are as large as can be."""
    return int(math.exp(random.uniform(0, math.log(most))))


def _value(random: Random, depth: int = 3) -> Any:
    kind = random.randrange(9 if depth else 6)
    if kind < 6:
        numbers = (0, random.randrange(-(2**70), 2**70), random.gauss(0, 1e6))
        return (*numbers, None, random.random() < 0.5, _text(random))[kind]
    if kind < 8:
        return [_value(random, depth - 1) for _ in range(random.randrange(4))]
    return {_text(random)[:8]: _value(random, depth - 1) for _ in range(random.randrange(4))}


def _text(random: Random, most: int = 40) -> str:
    letters = random.choice(_LETTERS)
    return "".join(random.choices(letters, k=min(size(random, most), 4096))) * max(1, size(random, most) // 4096)


def _valid(random: Random, **fields: Any) -> tuple[str, dict[str, Any]]:
    path = random.choice(_PATHS)
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": random.randint(1, 4)}
    if path == _PATHS[0]:
        asked["messages"] = [{"role": "user", "content": _text(random)}]
    else:
        asked["prompt"] = random.choice([_text(random), [_text(random)] * 3, [random.randrange(49_000)] * 9])
    return path, asked | fields


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")[: MAX_BODY_BYTES + 9]


def _right(kind: str, random: Random) -> Hostile:
    path, asked = _valid(random, stream=random.random() < 0.5, n=random.randint(1, 3))
    return Hostile(kind, path, _json(asked))


def _leaver(kind: str, random: Random) -> Hostile:
    path, asked = _valid(random, stream=True, max_tokens=200)
    return Hostile(kind, path, _json(asked), leaves_after=random.randrange(3))


def _wrong_types(kind: str, random: Random) -> Hostile:
    path, asked = _valid(random)
    wrong = {random.choice((*asked, *_NAMES)): _value(random) for _ in range(random.randint(1, 3))}
    return Hostile(kind, path, _json(asked | wrong))


def _damaged(kind: str, random: Random) -> Hostile:
    path, asked = _valid(random)
    body = bytearray(_json(asked))
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(body))
        body[at : at + random.randrange(3)] = random.randbytes(random.randrange(4))
    return Hostile(kind, path, bytes(body[: random.randint(0, len(body))]))


def _long_text(kind: str, random: Random) -> Hostile:
    text = random.choice(["a b ", "a", " ", "\n", "日本", "x" * 9 + " ", "\\", '"', "1", "\x04"])
    text *= size(random, MAX_BODY_BYTES // len(text.encode()))
    chat = random.random() < 0.5
    asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    return Hostile(kind, _PATHS[not chat], _json({"model": MODEL, "max_tokens": 1, **asked}))


def _many(kind: str, random: Random) -> Hostile:
    """Too many of something."""
    count = size(random, 400_000)
    path, asked = _valid(random)
    name, value = random.choice(
        [
            ("messages", [{"role": "user", "content": "x"}] * count),
            ("messages", [{"role": "user", "content": [{"type": "text", "text": "x"}] * count}]),
            ("prompt", ["x"] * min(count, 2_000)),
            ("prompt", [[1, 2]] * count),
            ("prompt", [12345] * count * 3),
            ("prompt", [1.5] * count),
            ("stop", ["x"] * count),
            ("stop", "x" * count),
            ("stop_token_ids", [7] * count),
            ("logit_bias", {str(number): 1 for number in range(count)}),
            ("tools", [{"type": "function"}] * count),
        ]
    )
    path = _PATHS[0] if name == "messages" else _PATHS[1] if name == "prompt" else path
    asked |= {name: value}
    if random.random() < 0.2:
        asked |= {f"unknown_{number}": None for number in range(count)}
    return Hostile(kind, path, _json(asked))


def _costly_stops(kind: str, random: Random) -> Hostile:
    stop = [letter * size(random, 30_000) for letter in "abc"[: random.randint(1, 3)]]
    asked = {"model": MODEL, "prompt": ["x"] * size(random, 60), "stop": stop, "max_tokens": 1}
    return Hostile(kind, _PATHS[1], _json(asked))


def _deep(kind: str, random: Random) -> Hostile:
    depth, count = size(random, 3000), size(random, 20_000)
    opening, closing = random.choice([(b"[", b"]"), (b'{"a":', b"}")])
    one = opening * depth + (b"" if opening == b"[" else b"1") + closing * depth
    count = min(count, MAX_BODY_BYTES // (len(one) + 1))
    name = random.choice(["prompt", "messages", "logit_bias", "x"]).encode()
    body = b'{"model":"' + MODEL.encode() + b'","' + name + b'":[' + b",".join([one] * count) + b"]}"
    return Hostile(kind, random.choice(_PATHS), body)


def _too_large(kind: str, random: Random) -> Hostile:
    return Hostile(
        kind, random.choice(_PATHS), b'{"model":"' + b"x" * (MAX_BODY_BYTES + random.randrange(4096)) + b'"}'
    )


_KINDS: dict[str, Callable[[str, Random], Hostile]] = {
    "right": _right,
    "leaves": _leaver,
    "wrong types": _wrong_types,
    "damaged": _damaged,
    "long text": _long_text,
    "many": _many,
    "costly stops": _costly_stops,
    "deep": _deep,
    "too large": _too_large,
}
