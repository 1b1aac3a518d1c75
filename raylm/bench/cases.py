"""What a benchmark runs: cases from the command line or a file, turned into requests by a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylm.errors import ConfigError

DEFAULT_OUTPUT_LEN = 128
Message = dict[str, str]

# Common words, about a token each. Chat prompts must be text, for servers tokenise them.
_WORDS = """
    time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work government number night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head house
"""
_WORD_LIST = _WORDS.split()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A number of tokens, or a range of them. `label` is what the user wrote."""

    low: int
    high: int

    @property
    def label(self) -> int | str:
        return self.low if self.low == self.high else f"{self.low}-{self.high}"

    def spread(self, count: int, rng: random.Random) -> list[int]:
        """`count` lengths, evenly over the range, in an order drawn from `rng`."""
        steps = max(1, count - 1)
        lengths = [self.low + round((self.high - self.low) * index / steps) for index in range(count)]
        rng.shuffle(lengths)
        return lengths


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says once the answer before is there and `think_s` seconds are over."""

    text: str
    output_len: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a benchmark: token ids, a text or a conversation, and how many tokens to generate. The turns
    behind it are further requests, each with the conversation so far."""

    prompt: list[int] | str | list[Message]
    output_len: int
    turns: tuple[Turn, ...] = ()

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], dict)

    @property
    def lengths(self) -> list[int]:
        """The tokens to generate, of it and of its turns."""
        return [self.output_len, *(turn.output_len for turn in self.turns)]

    def following(self, answer: str) -> Request | None:
        """The next turn of a conversation whose last message was answered so; None at its end."""
        if not self.turns:
            return None
        turn, *rest = self.turns
        assert isinstance(self.prompt, list)
        said = ({"role": "assistant", "content": answer}, {"role": "user", "content": turn.text})
        return Request([*self.prompt, *said], turn.output_len, tuple(rest))


@dataclass(frozen=True, slots=True)
class Case:
    """`requests` requests of `input_len` tokens each, of which the first `common_len` are the same; the output lengths
    are spread over a range."""

    name: str
    requests: int
    input_len: int
    output_len: Lengths
    common_len: int = 0

    @property
    def output_label(self) -> int | str:
        return self.output_len.label

    def token_requests(self, seed: int, token_ids: Sequence[int]) -> list[Request]:
        """Prompts of tokens drawn from `token_ids`. The same seed gives the same requests."""
        rng = random.Random(f"{self.name}:{seed}")
        lengths, own_len = self.output_len.spread(self.requests, rng), self.input_len - self.common_len
        common = rng.choices(token_ids, k=self.common_len)
        return [Request(common + rng.choices(token_ids, k=own_len), length) for length in lengths]

    def chat_requests(self, seed: int) -> list[Request]:
        """Conversations of one message of `input_len` random words (about a token a word; usage tells the truth)."""
        rng = random.Random(f"{self.name}:{seed}")
        lengths, own_len = self.output_len.spread(self.requests, rng), self.input_len - self.common_len
        common = f"{random_text(rng, self.common_len)} " if self.common_len else ""
        texts = (common + random_text(rng, own_len) for _ in lengths)
        return [Request([{"role": "user", "content": text}], n) for text, n in zip(texts, lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class Dataset:
    """The requests of a file, as a case."""

    name: str
    entries: tuple[Request, ...]
    redraw: Callable[[int], Dataset] | None = None
    """As many others of the same kind, by a seed; None for a file's own."""

    @property
    def requests(self) -> int:
        return sum(len(entry.lengths) for entry in self.entries)

    @property
    def output_label(self) -> int | str:
        lengths = [length for entry in self.entries for length in entry.lengths]
        return Lengths(min(lengths), max(lengths)).label


def random_text(rng: random.Random, words: int) -> str:
    """Common words, about a token each."""
    return " ".join(rng.choices(_WORD_LIST, k=words))


def parse_case(text: str) -> Case:
    """`name:requests:input_len:output_len`. Raises ConfigError.

    output_len may be a range such as 8-128; input_len may be a sum such as 2048+512: all prompts begin with the same
    2,048 tokens, and go on with 512 of their own.
    """
    parts = text.split(":")
    if len(parts) != 4 or not parts[0]:
        raise ConfigError(f"--case {text!r} must be name:requests:input_len:output_len, such as short:16:128:8-64")
    name, requests, input_len, output_len = parts
    common, plus, own = input_len.rpartition("+")
    common_len = _positive(text, "the common part of input_len", common) if plus else 0
    return Case(
        name,
        _positive(text, "requests", requests),
        common_len + _positive(text, "input_len", own),
        _lengths(text, output_len),
        common_len,
    )


def load_dataset(path: str) -> Dataset:
    """Read JSON lines of {"prompt": text or token ids} or {"messages": [...]}, with "output_len" where wanted.

    Raises ConfigError naming the file, the line and what is allowed.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset {path!r} cannot be read: {error}") from None
    entries = tuple(_entry(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip())
    if not entries:
        raise ConfigError(f"--dataset {path!r} holds no requests")
    return Dataset(Path(path).stem, entries)


def prompt_token_ids(vocab_size: int, avoid: Sequence[int] = ()) -> list[int]:
    """Token ids that random prompts are drawn from.

    The middle of the vocabulary: special tokens and padding stand at its start or its end.
    """
    edge = vocab_size // 10
    banned = set(avoid)
    found = [token for token in range(edge, vocab_size - edge) if token not in banned]
    if not found:
        raise ConfigError(f"a vocabulary of {vocab_size} tokens leaves none to draw random prompts from")
    return found


def _entry(where: str, line: str) -> Request:
    try:
        data = json.loads(line)
    except ValueError:
        raise ConfigError(f"{where}: not valid JSON") from None
    if not isinstance(data, dict) or ("prompt" in data) == ("messages" in data):
        raise ConfigError(f'{where}: must be an object with either "prompt" or "messages"')
    prompt: Any = data.get("prompt", data.get("messages"))
    if not _is_prompt(prompt, chat="messages" in data):
        raise ConfigError(f"{where}: the prompt must be a text, a list of token ids or a list of messages")
    output_len = data.get("output_len", DEFAULT_OUTPUT_LEN)
    if isinstance(output_len, bool) or not isinstance(output_len, int) or output_len < 1:
        raise ConfigError(f"{where}: output_len must be an integer of at least 1, got {output_len!r}")
    return Request(prompt, output_len)


def _is_prompt(prompt: object, *, chat: bool) -> bool:
    if isinstance(prompt, str):
        return bool(prompt) and not chat
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(item, dict) if chat else type(item) is int for item in prompt)


def _lengths(case: str, text: str) -> Lengths:
    low, dash, high = text.partition("-")
    first = _positive(case, "output_len", low)
    last = _positive(case, "output_len", high) if dash else first
    if last < first:
        raise ConfigError(f"--case {case!r}: output_len {text!r} must be a number or a rising range such as 8-128")
    return Lengths(first, last)


def _positive(case: str, field: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--case {case!r}: {field} must be an integer of at least 1, got {text!r}")
    return int(text)
