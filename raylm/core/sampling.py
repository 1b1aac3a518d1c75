"""What a user may ask of the sampling of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from raylm.errors import RequestRejected

MAX_SEED = 2**63 - 1
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_BEAM_WIDTH = 16
_LISTS = (list, tuple, set, frozenset)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request; every field is checked when the object is made.

    temperature: 0 is greedy; otherwise logits are divided by it (up to 100).
    top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
    top_k: keep the k likeliest tokens; 0 keeps all.
    min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    presence_penalty: taken from the logits of tokens that this completion has generated, in [-2, 2]; 0 is off.
    frequency_penalty: the same for each time that it has generated them.
    repetition_penalty: logits of tokens that the prompt has or the completion has generated are divided by it where
        they are over 0, else multiplied by it, in (0, 2]; 1 is off. It comes before the other two.
    seed: same seed, prompt and model give the same tokens; None draws one.
    max_tokens: tokens to generate at most; None means up to the model's length.
    n: completions per prompt.
    logprobs: report the log probability of every sampled token, as the model gives it: penalties do not change it.
    beam_width: over 0, search for the likeliest sequences with so many beams, up to 16, instead of sampling; n of them
        come back at their end, the best first. temperature, penalties and their like then do nothing.
    length_penalty: beams are compared by their log probability over length ** length_penalty.
    early_stopping: end a beam search as soon as beam_width sequences have ended, even if a running one could be better.
    stop: strings that end the text (and are not part of it).
    stop_token_ids: tokens that end the text.
    ignore_eos: do not end at the model's end-of-sequence tokens.

    Raises RequestRejected, naming the field, the value and the limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    n: int = 1
    logprobs: bool = False
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, bounds in _NUMBERS.items():
            self._set(name, _number(name, getattr(self, name), bounds))
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                self._set(name, integer(name, value, low, high))
        for name in _FLAGS:
            if type(value := getattr(self, name)) is not bool:
                raise RequestRejected(f"{name} must be true or false, got {value!r:.300}", param=name)
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_tokens(self.stop_token_ids))
        self._check_together()

    def _set(self, name: str, value: object) -> None:
        """What travels to engines and workers is of the very type that they expect, not of one derived from it."""
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if 0 < self.beam_width < self.n:
            raise RequestRejected(f"n is {self.n}, but beam_width {self.beam_width} gives no more sequences", param="n")
        if self.beam_width and self.logprobs:
            raise RequestRejected(
                "logprobs are not reported for a beam search; leave one of the two out", param="logprobs"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


class _Bounds(NamedTuple):
    low: float
    high: float
    low_open: bool = False


_NUMBERS = {
    "temperature": _Bounds(0.0, 100.0),
    "top_p": _Bounds(0.0, 1.0, low_open=True),
    "min_p": _Bounds(0.0, 1.0),
    "presence_penalty": _Bounds(-2.0, 2.0),
    "frequency_penalty": _Bounds(-2.0, 2.0),
    "repetition_penalty": _Bounds(0.0, 2.0, low_open=True),
    "length_penalty": _Bounds(-10.0, 10.0),
}
_INTEGERS = {
    "top_k": (0, 2**31 - 1),
    "n": (1, MAX_N),
    "beam_width": (0, MAX_BEAM_WIDTH),
    "seed": (-MAX_SEED - 1, MAX_SEED),
    "max_tokens": (1, 2**31 - 1),
}
_OPTIONAL = ("seed", "max_tokens")
_FLAGS = ("logprobs", "early_stopping", "ignore_eos")


def integer(name: str, value: object, low: int, high: int) -> int:
    """The value of a field; raises RequestRejected."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestRejected(f"{name} must be an integer from {low} to {high}, got {value!r:.300}", param=name)
    return int(value)


def _number(name: str, value: object, bounds: _Bounds) -> float:
    low, high, low_open = bounds
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not low <= value <= high
        or (low_open and value == low)
    ):
        bracket = "(" if low_open else "["
        raise RequestRejected(f"{name} must be a number in {bracket}{low:g}, {high:g}], got {value!r:.300}", param=name)
    return float(value)


def _stop_strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, _LISTS):
        raise RequestRejected(f"stop must be a string or a list of strings, got {value!r:.300}", param="stop")
    if len(value) > MAX_STOP_STRINGS:
        raise RequestRejected(f"stop has {len(value)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop")
    for text in value:
        if not isinstance(text, str) or not text:
            raise RequestRejected(f"stop must hold non-empty strings, got {text!r:.300}", param="stop")
    return tuple(map(str, value))


def _stop_tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, _LISTS):
        raise RequestRejected(f"stop_token_ids must be a list of integers, got {value!r:.300}", param="stop_token_ids")
    return tuple(integer("stop_token_ids", token, 0, 2**31 - 1) for token in value)
