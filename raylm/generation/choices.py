"""The choices of a request: what each gains as it grows, what it is at its end, and what all of them cost."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from time import perf_counter
from typing import NamedTuple

from raylm.generation.job import Job
from raylm.generation.listing import Entries, joined
from raylm.generation.pieces import CallArguments, CallBegin, Piece, Reasoning, Text


class ChoiceDelta(NamedTuple):
    """Text that the sequence of this number gained; with a finish reason it is the last.

    `logprob` is the log probability of its tokens, where it was asked for. `num_cached` are tokens of its prompt that
    the engine had in its cache, with the first delta of a prompt's first sequence. `token_ids` are the num_tokens that
    are counted; the text of the last ones may come later. `stop_reason` is the stop string or token that ended it.
    """

    choice: int
    text: str
    finish_reason: str | None
    num_tokens: int
    logprob: float = 0.0
    num_cached: int = 0
    token_ids: list[int] = []
    stop_reason: str | int | None = None
    entries: Entries | None = None
    """Of the tokens whose text this is, where the client asked for log probabilities."""
    prompt_list: bytes | None = None
    """With a sequence's first delta: the JSON of `prompt_logprobs`, where they were asked for."""
    pieces: tuple[Piece, ...] | None = None
    """What the text is made of; None where all of it is the answer's text. A marker is in the text and in no piece."""
    num_reasoning: int = 0
    """How many of the tokens are reasoning."""

    def pieces_or_text(self) -> tuple[Piece, ...]:
        """Its pieces; one of text where it was not read."""
        if self.pieces is not None:
            return self.pieces
        return (Text(self.text),) if self.text else ()


class Counts(NamedTuple):
    """Tokens of one request. A prompt counts once, however many choices it has."""

    prompt: int
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


class Times(NamedTuple):
    """Seconds from a request's arrival; None where there was no token. tokens_per_s: of the tokens behind the first
    delta's, where there are any."""

    first_token_s: float | None
    total_s: float
    tokens_per_s: float | None


class Tally:
    """Counts the tokens of one request and knows its times. Those of sequences that were not chosen count too, as with
    OpenAI."""

    def __init__(self, prompt_tokens: int, started: float | None = None) -> None:
        """started: when the request arrived (perf_counter); now where that is None."""
        self._started = perf_counter() if started is None else started
        self._first_at: float | None = None
        self._first_tokens = 0
        self._prompt = prompt_tokens
        self._completion = 0
        self._cached = 0
        self._reasoning = 0

    def add(self, delta: ChoiceDelta) -> None:
        if self._first_at is None and delta.num_tokens:
            self._first_at = perf_counter()
            self._first_tokens = delta.num_tokens
        self._completion += delta.num_tokens
        self._cached += delta.num_cached
        self._reasoning += delta.num_reasoning

    def counts(self) -> Counts:
        return Counts(self._prompt, self._completion, self._cached, self._reasoning)

    def times(self) -> Times:
        """Until now."""
        now = perf_counter()
        if self._first_at is None:
            return Times(None, now - self._started, None)
        later = self._completion - self._first_tokens
        rate = later / (now - self._first_at) if later and now > self._first_at else None
        return Times(self._first_at - self._started, now - self._started, rate)


class ToolCall(NamedTuple):
    """A tool that the model calls; `arguments` is JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


class Said:
    """What one sequence says, thinks and calls, as it grows and when it is complete."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._begins: list[CallBegin] = []
        self._arguments: list[list[str]] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str | None:
        """None where there was none."""
        return "".join(self._reasoning) if self._reasoning else None

    @property
    def calls(self) -> list[ToolCall]:
        return [
            ToolCall(begin.id, begin.name, "".join(parts))
            for begin, parts in zip(self._begins, self._arguments, strict=True)
        ]

    def add(self, text: str) -> None:
        """More of the text."""
        self._texts.append(text)

    def take(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Text(text):
                    self._texts.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallBegin():
                    self._begins.append(piece)
                    self._arguments.append([])
                case CallArguments(number, text):
                    self._arguments[number].append(text)


class Whole:
    """One sequence, as it grows and when it is complete."""

    def __init__(self, prompt_ids: list[int]) -> None:
        """`prompt_ids`: the tokens of its prompt."""
        self._said = Said()
        self._logprob = 0.0
        self._entries: list[Entries] = []
        self.prompt_list: bytes | None = None
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return self._said.text

    @property
    def reasoning(self) -> str | None:
        """None where there was none."""
        return self._said.reasoning

    @property
    def calls(self) -> list[ToolCall]:
        return self._said.calls

    @property
    def entries(self) -> Entries | None:
        """Its tokens' log probabilities, where they were asked for."""
        return joined(self._entries) if self._entries else None

    @property
    def mean_logprob(self) -> float:
        """The log probability a token, by which best_of compares."""
        return self._logprob / max(1, len(self.token_ids))

    def push(self, delta: ChoiceDelta) -> None:
        if delta.pieces is None:
            self._said.add(delta.text)
        else:
            self._said.take(delta.pieces)
        self._logprob += delta.logprob
        self.token_ids += delta.token_ids
        if delta.entries is not None:
            self._entries.append(delta.entries)
        if delta.prompt_list is not None:
            self.prompt_list = delta.prompt_list
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


async def gather(job: Job, deltas: AsyncGenerator[ChoiceDelta, None], tally: Tally) -> list[Whole]:
    """Wait for all sequences; returns job.n of each prompt, the best first where there are more to choose from."""
    sequences = [Whole(prompt.prompt_ids) for prompt in job.prompts for _ in range(prompt.params.n)]
    async with aclosing(deltas):
        async for delta in deltas:
            tally.add(delta)
            sequences[delta.choice].push(delta)
    chosen: list[Whole] = []
    for prompt in job.prompts:
        own = sequences[prompt.first : prompt.first + prompt.params.n]
        if len(own) > job.n:
            own.sort(key=lambda whole: whole.mean_logprob, reverse=True)
        chosen += own[: job.n]
    return chosen
