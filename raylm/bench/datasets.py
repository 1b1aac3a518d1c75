"""Requests that look like those of users: shared system prompts, conversations, a file of ShareGPT's."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from raylm.bench.cases import Dataset, Lengths, Message, Request, Turn, random_text
from raylm.errors import ConfigError

_CHARS_PER_TOKEN = 4
_MIN_TOKENS, _MAX_PROMPT, _MAX_TOTAL = 4, 1024, 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """What is drawn: `requests` requests (or conversations), each in one of `groups` that share a system prompt of
    `prefix_len` tokens; per turn a message of `input_len` tokens and an answer of `output_len`; behind an answer the
    user thinks for `think_s` seconds on average (of an exponential distribution), then says the next.

    Lengths are words, about a token each: servers tokenise them.
    """

    requests: int = 64
    groups: int = 8
    prefix_len: int = 512
    input_len: Lengths = Lengths(128, 128)
    output_len: Lengths = Lengths(64, 64)
    turns: Lengths = Lengths(1, 1)
    think_s: float = 0.0


def prefix_dataset(shape: Shape, seed: int) -> Dataset:
    """Single messages behind shared system prompts."""
    return _drawn("prefix", shape, seed)


def multi_turn_dataset(shape: Shape, seed: int) -> Dataset:
    """Conversations behind shared system prompts. A turn is sent with all before it, once its answer is there."""
    return _drawn("multi-turn", shape, seed)


def _drawn(name: str, shape: Shape, seed: int) -> Dataset:
    rng = random.Random(f"{name}:{seed}")
    systems = [random_text(rng, shape.prefix_len) for _ in range(shape.groups)]
    counts = shape.turns.spread(shape.requests, rng)
    inputs = iter(shape.input_len.spread(sum(counts), rng))
    outputs = iter(shape.output_len.spread(sum(counts), rng))
    entries = []
    for index, count in enumerate(counts):
        turns = [
            Turn(
                random_text(rng, next(inputs)),
                next(outputs),
                rng.expovariate(1 / shape.think_s) if place and shape.think_s else 0.0,
            )
            for place in range(count)
        ]
        messages: list[Message] = [{"role": "system", "content": systems[index % shape.groups]}]
        entries.append(_conversation(messages, turns))
    # Groups in turn, but not in the same order each time: a fixed order could fit the number of replicas.
    rng.shuffle(entries)
    return Dataset(name, tuple(entries), partial(_drawn, name, shape))


def sharegpt_dataset(path: str, *, requests: int, turns: int, seed: int) -> Dataset:
    """Conversations of a file in ShareGPT's format, up to `turns` exchanges of each, `requests` of them drawn by `seed`
    (all, where there are fewer).

    The length asked for is that of the file's own answer, at four characters a token. As in vLLM's bench, left out are
    conversations whose first message or answer is under 4 tokens, the message over 1024, or both over 2048. Raises
    ConfigError.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--dataset-path {path!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path!r} is not valid JSON: {error}") from None
    if not isinstance(data, list):
        raise ConfigError(f'--dataset-path {path!r} must be a list of objects with "conversations", as ShareGPT\'s is')
    talks = [found for entry in data if (found := _exchanges(entry)) and _is_usual(found[0])]
    if not talks:
        raise ConfigError(f"--dataset-path {path!r} holds no conversation with a message and an answer of usual length")
    rng = random.Random(f"sharegpt:{seed}")
    rng.shuffle(talks)
    return Dataset("sharegpt", tuple(_conversation([], talk[:turns]) for talk in talks[:requests]))


def _conversation(messages: list[Message], turns: list[Turn]) -> Request:
    first, *rest = turns
    return Request([*messages, {"role": "user", "content": first.text}], first.output_len, tuple(rest))


def _exchanges(entry: object) -> list[Turn]:
    """What a person said and an assistant answered, from the conversation's first message on."""
    said = entry.get("conversations") if isinstance(entry, dict) else None
    lines = [_line(line) for line in said] if isinstance(said, list) else []
    found: list[Turn] = []
    while lines and lines[0][0] != "user":
        lines.pop(0)
    for (role, text), (answerer, answer) in list(pairwise(lines))[::2]:
        if (role, answerer) != ("user", "assistant") or not text:
            break
        found.append(Turn(text, max(1, _tokens(answer))))
    return found


def _line(line: object) -> tuple[str, str]:
    if not isinstance(line, dict) or not isinstance(line.get("value"), str):
        return "", ""
    speakers = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
    return speakers.get(str(line.get("from")), ""), line["value"]


def _is_usual(first: Turn) -> bool:
    prompt = _tokens(first.text)
    return (
        min(prompt, first.output_len) >= _MIN_TOKENS
        and prompt <= _MAX_PROMPT
        and prompt + first.output_len <= _MAX_TOTAL
    )


def _tokens(text: str) -> int:
    return -(-len(text) // _CHARS_PER_TOKEN)
