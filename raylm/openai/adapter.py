"""Pure functions between OpenAI's requests and the engine's: choices to generate, chunks and answers to send."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from raylm import __version__
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams, draw_seed
from raylm.errors import RequestRejected
from raylm.openai.errors import HttpError
from raylm.openai.lines import one_line
from raylm.openai.logprobs import Entries
from raylm.openai.params import TokenLimit, Wanted
from raylm.openai.protocol import (
    ChatAnswer,
    ChatChoice,
    Completion,
    PromptDetails,
    PromptList,
    TextChoice,
    TokenIds,
    Usage,
)
from raylm.openai.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class PromptJob:
    """params.n sequences to generate from one prompt; they are numbered from `first` on in the whole request.

    `prefix` is the echoed prompt, put before their texts. With `echo_only` that is all, and no engine is asked.
    """

    first: int
    prompt_ids: list[int]
    params: SamplingParams
    options: RequestOptions
    prefix: str = ""
    echo_only: bool = False


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


class EncodedPrompt(NamedTuple):
    """One prompt, tokenised. `field` is where it came from; `echo` is put before each of its completions."""

    token_ids: list[int]
    field: str
    echo: str = ""


class Job(NamedTuple):
    """One HTTP request, ready to run: `n` completions of each prompt."""

    prompts: list[PromptJob]
    n: int
    prompt_tokens: int

    @property
    def num_sequences(self) -> int:
        return sum(prompt.params.n for prompt in self.prompts)


def plan(model: ServedModel, prompts: list[EncodedPrompt], asked: Wanted) -> Job:
    """Each prompt with its own room for tokens and, where the request gives none, a seed of its own.

    Raises RequestRejected when a prompt does not fit into the model together with the tokens it asks for.
    """
    jobs = []
    common = model.text.prepare(asked.params)
    for number, prompt in enumerate(prompts):
        max_tokens = None if asked.echo_only else _max_tokens(model, len(prompt.token_ids), asked.limit)
        seed = draw_seed() if common.seed is None else common.seed
        params = replace(common, max_tokens=max_tokens, seed=seed)
        first = number * params.n
        jobs.append(PromptJob(first, prompt.token_ids, params, asked.options, prompt.echo, asked.echo_only))
    return Job(jobs, asked.n, sum(len(prompt.token_ids) for prompt in prompts))


def check_prompt(model: ServedModel, token_ids: list[int], field: str) -> None:
    """Raises RequestRejected when a prompt is empty, too long for the model or not made of its tokens."""
    if not token_ids:
        raise RequestRejected("The prompt has no tokens", param=field)
    if len(token_ids) >= model.max_model_len:
        raise too_long(model, f"{len(token_ids)} tokens", field)
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < model.vocab_size:
            raise RequestRejected(
                f"{field} holds the token id {token}, but those of {model.name} go from 0 to {model.vocab_size - 1}",
                param=field,
            )


def too_long(model: ServedModel, size: str, field: str) -> RequestRejected:
    return RequestRejected(
        f"The prompt has {size}, but {model.name} takes {model.max_model_len} tokens in all, at least one of them for "
        "the completion",
        param=field,
        code="context_length_exceeded",
    )


def _max_tokens(model: ServedModel, num_prompt: int, limit: TokenLimit) -> int:
    room = model.max_model_len - num_prompt
    if limit.value is None:
        return room if limit.default is None else min(limit.default, room)
    if limit.value > room:
        raise RequestRejected(
            f"{limit.field} is {limit.value} and the prompt has {num_prompt} tokens: {num_prompt + limit.value} "
            f"together, but {model.name} takes {model.max_model_len} tokens in all",
            param=limit.field,
            code="context_length_exceeded",
        )
    return limit.value


FINGERPRINT = f"raylm-{__version__}"
"""OpenAI's system_fingerprint: with another one, the same seed may give other tokens."""


class Reply(NamedTuple):
    """What every answer and chunk of one HTTP request says of it. `created` is in seconds since the epoch."""

    id: str
    created: int
    model: str
    chat: bool


class Ended(NamedTuple):
    """One choice of an answer, complete. Token ids are those to return, if any."""

    text: str
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: TokenIds = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET
    logprobs: msgspec.Raw | None = None
    prompt_logprobs: PromptList = msgspec.UNSET


def answer(reply: Reply, ends: list[Ended], usage: Usage) -> bytes:
    """The JSON of an answer that is not streamed."""
    choices: list[ChatChoice] | list[TextChoice]
    prompt_ids: TokenIds = msgspec.UNSET
    prompt_list: PromptList = msgspec.UNSET
    if reply.chat:
        choices = [
            ChatChoice(index, ChatAnswer(end.text), end.finish_reason, end.logprobs, end.stop_reason, end.token_ids)
            for index, end in enumerate(ends)
        ]
        prompt_ids, prompt_list = ends[0].prompt_token_ids, ends[0].prompt_logprobs
    else:
        choices = [_text_choice(index, end) for index, end in enumerate(ends)]
    kind = "chat.completion" if reply.chat else "text_completion"
    return msgspec.json.encode(
        Completion(reply.id, kind, reply.created, reply.model, choices, usage, FINGERPRINT, prompt_ids, prompt_list)
    )


def _text_choice(index: int, end: Ended) -> TextChoice:
    return TextChoice(
        index,
        end.text,
        end.finish_reason,
        end.logprobs,
        end.stop_reason,
        end.token_ids,
        end.prompt_token_ids,
        end.prompt_logprobs,
    )


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, PromptDetails(cached_tokens))


DONE = b"data: [DONE]\n\n"


def event(value: msgspec.Struct) -> bytes:
    """One SSE event."""
    return b"data: " + one_line(msgspec.json.encode(value)) + b"\n\n"


def error_event(error: HttpError) -> bytes:
    """An error after the answer has begun: the status is sent, so the stream carries it, as OpenAI's clients expect."""
    return b"data: " + one_line(error.body()) + b"\n\n" + DONE
