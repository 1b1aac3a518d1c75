"""What a request asks of the engine, tokens and all: prompts, how many sequences of each, how each is sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams, draw_seed
from raylm.errors import RequestRejected
from raylm.generation.served_model import ServedModel


class TokenLimit(NamedTuple):
    """How many tokens the request allows each completion, by which field, and what holds without it.

    Both None: as many as the model has room for.
    """

    field: str
    value: int | None
    default: int | None


class Wanted(NamedTuple):
    """What a request wants of each of its prompts: params.n sequences are generated, the best `n` of them returned.

    echo_only: max_tokens is 0 and nothing is asked of the prompt, so no engine is, and params say nothing of
    max_tokens.
    """

    params: SamplingParams
    options: RequestOptions
    limit: TokenLimit
    n: int
    echo_only: bool = False


class EncodedPrompt(NamedTuple):
    """One prompt, tokenised. `field` is where it came from; `echo` is put before each of its completions."""

    token_ids: list[int]
    field: str
    echo: str = ""


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


class Job(NamedTuple):
    """One request, ready to run: `n` completions of each prompt."""

    prompts: list[PromptJob]
    n: int
    prompt_tokens: int

    @property
    def num_sequences(self) -> int:
        return sum(prompt.params.n for prompt in self.prompts)


def plan(model: ServedModel, prompts: list[EncodedPrompt], wanted: Wanted) -> Job:
    """Each prompt with its own room for tokens and, where the request gives none, a seed of its own.

    Raises RequestRejected when a prompt does not fit into the model together with the tokens it asks for.
    """
    jobs = []
    common = model.text.prepare(wanted.params)
    for number, prompt in enumerate(prompts):
        max_tokens = None if wanted.echo_only else _max_tokens(model, len(prompt.token_ids), wanted.limit)
        seed = draw_seed() if common.seed is None else common.seed
        params = replace(common, max_tokens=max_tokens, seed=seed)
        first = number * params.n
        jobs.append(PromptJob(first, prompt.token_ids, params, wanted.options, prompt.echo, wanted.echo_only))
    return Job(jobs, wanted.n, sum(len(prompt.token_ids) for prompt in prompts))


def check_prompt(model: ServedModel, token_ids: list[int], field: str) -> None:
    """Raises RequestRejected when a prompt is empty, too long for the model or not made of its tokens."""
    if not token_ids:
        raise RequestRejected("The prompt has no tokens", param=field)
    if len(token_ids) >= model.max_model_len:
        raise too_long(model, f"{len(token_ids)} tokens", field)
    check_token_ids(model, token_ids, field)


def check_token_ids(model: ServedModel, token_ids: list[int], field: str) -> None:
    """Raises RequestRejected when they are not all of the model's."""
    for token in (min(token_ids), max(token_ids)) if token_ids else ():
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
