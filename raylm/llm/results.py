"""What requests give: completions and their outputs, under vLLM's names, as they grow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from raylm.core.sampling import SamplingParams
from raylm.core.step import Logprobs, TokenDelta
from raylm.generation.choices import Said, ToolCall
from raylm.generation.reader import ChoiceReader, Reading
from raylm.text.processor import TextProcessor


class Logprob(NamedTuple):
    """What the model finds of a token at some position.

    rank: 1 for the likeliest; None for a token of params.logprob_token_ids that was not sampled: it is not counted.
    decoded_token: the token's text by itself; of a part of a character that is U+FFFD.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclasses.dataclass(slots=True)
class Output:
    """One generated sequence. `token_ids` ends with the stop token where one ended it; `text` has no stop string unless
    params.include_stop_str_in_output.

    stop_reason: the stop string, or the one of params.stop_token_ids, that ended it; None where the model's own end or
        the length did.
    reasoning: what the model thought before it answered, in a chat whose model sets that off; no part of text.
    tool_calls: the tools that the model calls, in a chat that offers any. The finish reason is "tool_calls" then, where
        the sequence ended by itself.
    logprobs: for each of token_ids what could stand at its position, by token id: itself, and the likeliest tokens (or
        those of params.logprob_token_ids). None unless params.logprobs asked for them.
    cumulative_logprob: the sum of the log probabilities of token_ids; None with logprobs.
    message: what went wrong, with the finish reasons "error" and "deadline".
    finish_reason: None while the sequence grows.
    index: the sequence's place among params.n.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    stop_reason: str | int | None = None
    message: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)
    index: int = 0


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds since the epoch; time_in_queue in seconds. None: not reached yet.

    first_scheduled_time: when the first step with tokens of the prompt began; time_in_queue: from arrival until then.
    first_token_time, last_token_time: when this process got the first and the latest tokens of any output.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    time_in_queue: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclasses.dataclass(slots=True)
class Completion:
    """What one prompt gave: params.n outputs. `prompt` is None where token ids or messages were given.

    prompt_logprobs: for each of prompt_token_ids as Output.logprobs, None for the first, which follows nothing; None
        unless params.prompt_logprobs asked for them.
    num_cached_tokens: tokens of the prompt that were in the prefix cache.
    request_id: the caller's; LLM counts its own.
    metrics: times of the request; None until the request is with the engine.

    The last three depend on what ran before, the outputs do not: completions are compared without them.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Output]
    num_cached_tokens: int = dataclasses.field(default=0, compare=False)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    request_id: str = dataclasses.field(default="", compare=False)
    metrics: RequestMetrics | None = dataclasses.field(default=None, compare=False)

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended."""
        return bool(self.outputs) and all(output.finish_reason is not None for output in self.outputs)


class GrowingOutput:
    """One output on its way: tokens in, text out."""

    def __init__(
        self, completion: Completion, text: TextProcessor, params: SamplingParams, reading: Reading | None
    ) -> None:
        self._said = Said()
        self._reader = None if reading is None else ChoiceReader(reading)
        self.output = Output("", [], None, index=len(completion.outputs))
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._text = text
        self._are_ranked = not params.logprob_token_ids
        self._lists_prompt = params.prompt_logprobs is not None
        self.completion = completion
        self._is_first = not completion.outputs
        self._stream = text.stream(params)
        completion.outputs.append(self.output)

    def push(self, delta: TokenDelta, now: float) -> bool:
        """Take a step's tokens, which came at `now` (seconds since the epoch); True when the sequence is complete."""
        piece = self._stream.push(delta.token_ids, delta.finish_reason)
        output = self.output
        token_ids = delta.token_ids[: piece.num_tokens]
        output.token_ids += token_ids
        reason = piece.finish_reason
        if self._reader is None:
            self._said.add(piece.text)
        else:
            pieces, reason = self._reader.pieces(piece.text, reason)
            self._said.take(pieces)
        if output.logprobs is not None and delta.logprobs is not None:
            self._list(token_ids, delta.logprobs.first(piece.num_tokens))
        if self._is_first:
            self._take_news(delta)
        self._time(delta, now)
        if piece.finish_reason is None:
            return False
        self.show()
        output.finish_reason, output.stop_reason = reason or piece.finish_reason, piece.stop_reason
        output.message = delta.message
        metrics = self.completion.metrics
        if metrics is not None and self.completion.finished:
            metrics.finished_time = now
        return True

    def show(self) -> None:
        """Write what there is of the text into the output. `push` does so at the end alone: joining the text at every
        token costs time that grows with its length."""
        output = self.output
        output.text, output.reasoning, output.tool_calls = self._said.text, self._said.reasoning, self._said.calls

    def _time(self, delta: TokenDelta, now: float) -> None:
        metrics = self.completion.metrics
        if metrics is None:
            return
        if delta.token_ids:
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now
        if delta.waited is not None and metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = max(now - delta.waited.prefill_s, metrics.arrival_time)
            metrics.time_in_queue = metrics.first_scheduled_time - metrics.arrival_time

    def _list(self, token_ids: list[int], found: Logprobs) -> None:
        output = self.output
        assert output.logprobs is not None and output.cumulative_logprob is not None
        output.logprobs += _listed(token_ids, found, self._text, are_ranked=self._are_ranked)
        for value in found.values:
            output.cumulative_logprob += value

    def _take_news(self, delta: TokenDelta) -> None:
        """What the first sequence's first delta says of the prompt."""
        completion = self.completion
        completion.num_cached_tokens += delta.num_cached_tokens
        if not self._lists_prompt or completion.prompt_logprobs is not None:
            return
        completion.prompt_logprobs = [None]
        if (found := delta.prompt_logprobs) is not None:
            token_ids = completion.prompt_token_ids[1:]
            completion.prompt_logprobs += _listed(token_ids, found, self._text, are_ranked=True)


def _listed(
    token_ids: list[int], found: Logprobs, text: TextProcessor, *, are_ranked: bool
) -> Iterator[dict[int, Logprob]]:
    """For each token itself and those listed with it; `are_ranked`: these are the likeliest."""
    tops = zip(found.top_ids, found.top_values, strict=True)
    for token, value, rank, (ids, values) in zip(token_ids, found.values, found.ranks, tops, strict=True):
        listed = {token: Logprob(value, rank, _text_of(token, text))}
        for place, (other, its_value) in enumerate(zip(ids, values, strict=True), start=1):
            listed.setdefault(other, Logprob(its_value, place if are_ranked else None, _text_of(other, text)))
        yield listed


def _text_of(token: int, text: TextProcessor) -> str:
    return text.token_bytes(token).decode(errors="replace")
