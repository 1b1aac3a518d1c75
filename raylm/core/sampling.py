"""What a user may ask of the sampling of one request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial

from raylm.core import sampling_checks as checks
from raylm.core.sampling_checks import Bounds
from raylm.core.structure import StructuredOutput
from raylm.core.thinking import ThinkingSection, check_thinking
from raylm.errors import RequestRejected

MAX_SEED = 2**63 - 1
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 4096
MAX_BEAM_WIDTH = 16
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 2**18
MAX_LOGPROB_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_LOGITS_PROCESSORS = 16
MIN_FLOAT32 = 2.0**-126
"""The smallest normal number of float32. A temperature below it is 0; a top_p or typical_p below it is raised to it."""
ALL_TOKENS = -1
"""In logprobs and prompt_logprobs: the whole vocabulary."""


def draw_seed() -> int:
    """A seed for a request that has none."""
    return random.getrandbits(62)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request; every field is checked when the object is made.

    temperature: 0 is greedy; otherwise logits are divided by it (up to 100).
    top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
    top_k: keep the k likeliest tokens; 0 keeps all.
    min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    typical_p: keep the tokens whose information is closest to the distribution's entropy, as few as reach this
        probability (locally typical sampling), in (0, 1]; 1 keeps all.
    presence_penalty: taken from the logits of tokens that this completion has generated, in [-2, 2]; 0 is off.
    frequency_penalty: the same for each time that it has generated them.
    repetition_penalty: logits of tokens that the prompt has or the completion has generated are divided by it where
        they are over 0, else multiplied by it, in (0, 2]; 1 is off. It comes before the other two.
    logit_bias: added to the logits of these tokens: a mapping from token to bias, or pairs of them; each bias is in
        [-100, 100].
    allowed_token_ids: only these tokens can be sampled; empty allows all.
    bad_words: strings that the completion must not have: the last token of one is not sampled where its others have
        been. A token sequence, so a text that is cut into other tokens is not found.
    bad_token_ids: the same as token sequences. What turns text into tokens adds those of bad_words to it.
    min_tokens: before so many tokens no end-of-sequence token and none of stop_token_ids is sampled.
    logits_processors: names of user-written processors of the logits, in the order in which they run; the engine's
        `generation.logits_processors` says which there are.
    seed: same seed, prompt and model give the same tokens; None draws one.
    max_tokens: tokens to generate at most; None means up to the model's length. 0, with prompt_logprobs only, computes
        the prompt and generates nothing.
    n: completions per prompt.
    logprobs: report the log probability and the rank of every sampled token, and the likeliest tokens at its position,
        this many (0: none of those; -1: the whole vocabulary). None reports nothing. The engine's
        `generation.max_logprobs` is the limit.
    prompt_logprobs: the same for the tokens of the prompt, from the second on.
    logprob_token_ids: with logprobs, report these tokens at each position instead of the likeliest.
    beam_width: over 0, search for the likeliest sequences with so many beams, up to 16, instead of sampling; n of them
        come back at their end, the best first. temperature, top_p, top_k, min_p, typical_p, penalties and seed then do
        nothing. Not possible with it are logit_bias, allowed_token_ids, bad_words, bad_token_ids, min_tokens,
        logits_processors, logprob_token_ids, structure and thinking_token_budget.
    length_penalty: beams are compared by their log probability over length ** length_penalty.
    early_stopping: end a beam search as soon as beam_width sequences have ended, even if a running one could be better.
    stop: strings that end the text.
    stop_token_ids: tokens that end the text.
    include_stop_str_in_output: the stop string that ended the text is part of it.
    ignore_eos: do not end at the model's end-of-sequence tokens.
    skip_special_tokens: leave special tokens out of the text.
    structure: the form that the text must have, such as a JSON schema: only tokens that it allows are sampled. The
        tokens that end the text are allowed where the form is complete.
    thinking_token_budget: tokens that one thinking section of the answer may have; behind them its end mark is forced,
        whatever else is asked for. -1 is no limit.
    thinking: the marks of such sections. The text side knows them from the model's format; an engine needs them where
        there is a budget.
    spaces_between_special_tokens: off, with skip_special_tokens off too, the text is without the space that some
        tokenizers write between two special tokens.

    Raises RequestRejected, naming the field, the value and the limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logits_processors: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    structure: StructuredOutput | None = None
    thinking_token_budget: int = -1
    thinking: ThinkingSection | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, (default, check) in _CHECKS.items():
            value = getattr(self, name)
            if value is not default:
                # What travels to engines and workers is of the very type that they expect, not of one derived from it.
                object.__setattr__(self, name, check(name, value))
        self._check_together()

    def _check_together(self) -> None:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestRejected(
                "max_tokens must be at least 1, got 0 (which computes a prompt for its prompt_logprobs alone)",
                param="max_tokens",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestRejected(
                f"min_tokens is {self.min_tokens}, more than the {self.max_tokens} of max_tokens", param="min_tokens"
            )
        if self.logprob_token_ids and self.logprobs is None:
            raise RequestRejected("logprob_token_ids is only allowed together with logprobs", param="logprob_token_ids")
        if self.structure is not None:
            self._check_structure()
        if 0 < self.beam_width < self.n:
            raise RequestRejected(f"n is {self.n}, but beam_width {self.beam_width} gives no more sequences", param="n")
        if self.beam_width:
            self._check_beams()

    def _check_beams(self) -> None:
        """A beam search ranks tokens by the model's own probabilities, and knows only the likeliest of a position."""
        others = {
            "logprob_token_ids": bool(self.logprob_token_ids),
            "logit_bias": bool(self.logit_bias),
            "allowed_token_ids": bool(self.allowed_token_ids),
            "bad_words": bool(self.bad_words),
            "bad_token_ids": bool(self.bad_token_ids),
            "min_tokens": bool(self.min_tokens),
            "logits_processors": bool(self.logits_processors),
            "thinking_token_budget": self.thinking_token_budget >= 0,
        }
        for name, is_set in others.items():
            if is_set:
                raise RequestRejected(f"{name} is not possible together with a beam search (beam_width)", param=name)

    def _check_structure(self) -> None:
        """A structure decides alone which tokens may be sampled, and when the text may end."""
        others = {
            "beam_width": bool(self.beam_width),
            "min_tokens": bool(self.min_tokens),
            "allowed_token_ids": bool(self.allowed_token_ids),
            "bad_words": bool(self.bad_words or self.bad_token_ids),
            "ignore_eos": self.ignore_eos and not self.stop_token_ids,
        }
        for name, is_set in others.items():
            if is_set:
                raise RequestRejected(f"{name} is not possible together with structured output", param=name)
        begins_at_once = self.structure is not None and not self.structure.begin_after
        if begins_at_once and self.thinking_token_budget >= 0 and self.thinking is not None and self.thinking.begun:
            raise RequestRejected(
                "thinking_token_budget is only possible with structured output that begins after the thinking "
                "(structure.begin_after)",
                param="thinking_token_budget",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def named_tokens(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Fields that hold tokens to sample or to report, with these tokens: all must be the model's."""
        yield "logit_bias", tuple(token for token, _ in self.logit_bias)
        yield "allowed_token_ids", self.allowed_token_ids
        yield "logprob_token_ids", self.logprob_token_ids
        yield "bad_token_ids", tuple(token for word in self.bad_token_ids for token in word)
        if self.thinking is not None:
            yield "thinking", (*self.thinking.begin, *self.thinking.end)


_Check = Callable[[str, object], object]
_MAX_INT = 2**31 - 1


def _number(low: float, high: float, *, low_open: bool = False) -> _Check:
    bounds = Bounds(low, high, low_open)
    return lambda name, value: checks.number(name, value, bounds)


def _in_float32(low: float, high: float, *, low_open: bool = False, underflow: float) -> _Check:
    """A number that is `underflow` where it is too small for float32, in which devices compute."""
    check = _number(low, high, low_open=low_open)

    def rounded(name: str, value: object) -> object:
        found = check(name, value)
        return underflow if isinstance(found, float) and found < MIN_FLOAT32 else found

    return rounded


def _integer(low: int, high: int = _MAX_INT) -> _Check:
    return lambda name, value: checks.integer(name, value, low, high)


_of_each_field: dict[str, _Check] = {
    "temperature": _in_float32(0, 100, underflow=0.0),
    "top_p": _in_float32(0, 1, low_open=True, underflow=MIN_FLOAT32),
    "top_k": _integer(0),
    "min_p": _number(0, 1),
    "typical_p": _in_float32(0, 1, low_open=True, underflow=MIN_FLOAT32),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 2, low_open=True),
    "logit_bias": partial(checks.biases, most=MAX_LOGIT_BIAS, bounds=Bounds(-100, 100)),
    "allowed_token_ids": partial(checks.tokens, most=MAX_ALLOWED_TOKENS),
    "bad_words": partial(checks.strings, most=MAX_BAD_WORDS, max_chars=MAX_BAD_WORD_CHARS),
    # A bad word may be two token sequences: with a space before it, and without.
    "bad_token_ids": partial(checks.token_lists, most=2 * MAX_BAD_WORDS, max_tokens=MAX_BAD_WORD_TOKENS),
    "min_tokens": _integer(0),
    "logits_processors": partial(checks.strings, most=MAX_LOGITS_PROCESSORS, max_chars=MAX_BAD_WORD_CHARS),
    "seed": _integer(-MAX_SEED - 1, MAX_SEED),
    "max_tokens": _integer(0),
    "n": _integer(1, MAX_N),
    "logprobs": _integer(ALL_TOKENS),
    "prompt_logprobs": _integer(ALL_TOKENS),
    "logprob_token_ids": partial(checks.tokens, most=MAX_LOGPROB_TOKENS),
    "beam_width": _integer(0, MAX_BEAM_WIDTH),
    "length_penalty": _number(-10, 10),
    "early_stopping": checks.flag,
    "stop": partial(checks.strings, most=MAX_STOP_STRINGS),
    "stop_token_ids": partial(checks.tokens, most=MAX_STOP_TOKENS),
    "include_stop_str_in_output": checks.flag,
    "ignore_eos": checks.flag,
    "structure": checks.structure,
    "thinking_token_budget": _integer(-1),
    "thinking": check_thinking,
    "skip_special_tokens": checks.flag,
    "spaces_between_special_tokens": checks.flag,
}
_CHECKS = {field.name: (field.default, _of_each_field[field.name]) for field in fields(SamplingParams)}
"""Of each field its default, which is not checked again, and its check. Without one this module is not imported."""
