"""What a user may ask of the sampling of one request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raylm.errors import RequestRejected

MAX_SEED = 2**63 - 1
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_BEAM_WIDTH = 16


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
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 2.0, low_open=True)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_int("n", self.n, 1, MAX_N)
        _check_int("beam_width", self.beam_width, 0, MAX_BEAM_WIDTH)
        _check_number("length_penalty", self.length_penalty, -10.0, 10.0)
        if 0 < self.beam_width < self.n:
            raise RequestRejected(f"n is {self.n}, but beam_width {self.beam_width} gives no more sequences", param="n")
        if self.beam_width and self.logprobs:
            raise RequestRejected(
                "logprobs are not reported for a beam search; leave one of the two out", param="logprobs"
            )
        if self.seed is not None:
            _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestRejected(
                f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop"
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestRejected(f"stop must hold non-empty strings, got {text!r}", param="stop")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, 2**31 - 1)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _check_number(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    wrong = isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    if wrong or value < low or value > high or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise RequestRejected(f"{name} must be a number in {bracket}{low:g}, {high:g}], got {value!r}", param=name)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestRejected(f"{name} must be an integer from {low} to {high}, got {value!r}", param=name)
