"""What a request asks of the engine: sampling, scheduling, how many tokens and how many completions."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from raylm.config.sampling import SamplingDefaults
from raylm.core.options import RequestOptions
from raylm.core.sampling import MAX_BEAM_WIDTH, SamplingParams
from raylm.errors import RequestRejected
from raylm.openai.protocol import ChatRequest, GenerationRequest

MAX_BEST_OF = 20
"""OpenAI's limit."""


class TokenLimit(NamedTuple):
    """How many tokens the request allows each completion, by which field, and what holds without it.

    Both None: as many as the model has room for.
    """

    field: str
    value: int | None
    default: int | None


class Wanted(NamedTuple):
    """What a request wants of each of its prompts: params.n sequences are generated, the best `n` of them returned."""

    params: SamplingParams
    options: RequestOptions
    limit: TokenLimit
    n: int


def wanted(request: GenerationRequest, sampling: SamplingDefaults, *, default_max_tokens: int | None) -> Wanted:
    """`sampling` and `default_max_tokens` hold where the request says nothing.

    Raises RequestRejected where a value is out of its range or does not fit together with another.
    """
    n = 1 if request.n is None else request.n
    params = _sampling_params(request, n, sampling)
    _check_together(request, params, n)
    return Wanted(params, _options(request), _token_limit(request, default_max_tokens), n)


def _sampling_params(request: GenerationRequest, n: int, defaults: SamplingDefaults) -> SamplingParams:
    # vLLM's clients write -1 for "keep all".
    top_k = 0 if request.top_k == -1 else request.top_k
    params = SamplingParams(
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        top_k=defaults.top_k if top_k is None else top_k,
        min_p=defaults.min_p if request.min_p is None else request.min_p,
        presence_penalty=0.0 if request.presence_penalty is None else request.presence_penalty,
        frequency_penalty=0.0 if request.frequency_penalty is None else request.frequency_penalty,
        repetition_penalty=(
            defaults.repetition_penalty if request.repetition_penalty is None else request.repetition_penalty
        ),
        seed=request.seed,
        max_tokens=request.max_tokens,
        n=n,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=bool(request.ignore_eos),
    )
    if request.use_beam_search:
        return replace(
            params,
            beam_width=_num_candidates(request, n, MAX_BEAM_WIDTH),
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            early_stopping=bool(request.early_stopping),
        )
    if request.best_of is None:
        return params
    num = _num_candidates(request, n, MAX_BEST_OF)
    return params if num == n else replace(params, n=num, logprobs=0)


def _num_candidates(request: GenerationRequest, n: int, limit: int) -> int:
    """Sequences among which n are chosen."""
    if request.best_of is None:
        if n > limit:
            raise RequestRejected(f"n must be at most {limit} with use_beam_search=true, got {n}", param="n")
        return n
    if not n <= request.best_of <= limit:
        raise RequestRejected(
            f"best_of must be an integer from n ({n}) to {limit}, got {request.best_of}", param="best_of"
        )
    return request.best_of


def _check_together(request: GenerationRequest, params: SamplingParams, n: int) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestRejected("stream_options is only allowed together with stream=true", param="stream_options")
    if request.stream and params.n > n:
        raise RequestRejected(
            f"best_of must equal n ({n}) together with stream=true, got {params.n}: "
            "which completions are the best is known at their end",
            param="best_of",
        )
    if params.beam_width:
        return
    for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(request, name) not in (None, neutral):
            raise RequestRejected(f"{name} is only allowed together with use_beam_search=true", param=name)


def _options(request: GenerationRequest) -> RequestOptions:
    return RequestOptions(
        tenant=request.user or "",
        priority=0 if request.priority is None else request.priority,
        deadline_s=request.deadline_s,
        queue_timeout_s=request.queue_timeout_s,
        cache_salt=request.cache_salt or "",
    )


def _token_limit(request: GenerationRequest, default: int | None) -> TokenLimit:
    if not isinstance(request, ChatRequest) or request.max_completion_tokens is None:
        return TokenLimit("max_tokens", request.max_tokens, default)
    limit = TokenLimit("max_completion_tokens", request.max_completion_tokens, default)
    if request.max_completion_tokens < 1:
        raise RequestRejected(f"{limit.field} must be at least 1, got {limit.value}", param=limit.field)
    return limit


def check_num_sequences(num_prompts: int, asked: Wanted, limit: int) -> None:
    """Raises RequestRejected when one HTTP request asks for too many completions."""
    each = asked.params.n
    if num_prompts * each > limit:
        name = "best_of" if each > asked.n else "n"
        raise RequestRejected(
            f"{num_prompts} prompts with {name}={each} make {num_prompts * each} completions, "
            f"at most {limit} are allowed",
            param=name if each > 1 else "prompt",
        )
