"""What a request asks of the engine: sampling, scheduling, how many tokens and how many completions."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from raylm.api.identity import Identity
from raylm.api.protocol import ChatRequest, CompletionRequest, GenerationRequest
from raylm.api.scheduling import request_options
from raylm.api.structure import Asked, structure_of
from raylm.config.sampling import SamplingDefaults
from raylm.core.options import RequestOptions
from raylm.core.sampling import ALL_TOKENS, MAX_BEAM_WIDTH, SamplingParams
from raylm.core.sampling_checks import integer
from raylm.errors import RequestRejected
from raylm.generation.job import TokenLimit, Wanted
from raylm.generation.listing import LogprobForm
from raylm.generation.quote import quote
from raylm.text.truncation import Truncation

MAX_BEST_OF = 20
"""OpenAI's limit."""
_MAX_ID_DIGITS = 10


class PromptForm(NamedTuple):
    """What becomes of a prompt: special tokens around a text (such as BOS), and the last tokens alone where it is cut.
    With `echo` it is put before each of its completions."""

    add_special_tokens: bool
    truncation: Truncation | None
    echo: bool


class RequestName(NamedTuple):
    """What the client calls its request; "" where it has no name for it. is_whole_id: it is the answer's id as it is;
    otherwise it stands behind the prefix of the API's ids."""

    given: str = ""
    is_whole_id: bool = False

    def reply_id(self, prefix: str) -> str:
        return self.given if self.is_whole_id or not self.given else prefix + self.given


class AnswerForm(NamedTuple):
    """How the answer is sent and what it holds beside texts.

    interval: tokens of a choice that one event of a stream holds at least, but for its first and last. timings: how
    long it took.
    """

    stream: bool
    include_usage: bool
    continuous_usage: bool
    interval: int
    token_ids: bool
    logprobs: LogprobForm = LogprobForm()
    name: RequestName = RequestName()
    timings: bool = False


class Asking(NamedTuple):
    """All that the fields of a request ask for, but for its prompts."""

    wanted: Wanted
    prompt: PromptForm
    answer: AnswerForm
    structure: Asked | None
    """The form of the text; the params have it once it is compiled."""


def asking(
    request: GenerationRequest, sampling: SamplingDefaults, identity: Identity, *, default_max_tokens: int | None
) -> Asking:
    """`sampling` and `default_max_tokens` hold where the request says nothing.

    Raises RequestRejected where a value is out of its range or does not fit together with another.
    """
    n = 1 if request.n is None else request.n
    prompt = _prompt_form(request)
    logprobs = _logprob_form(request)
    limit = _token_limit(request, default_max_tokens)
    echo_only = limit.value == 0 and logprobs.of_prompt is None
    params = _sampling_params(request, n, sampling, logprobs, max_tokens=None if echo_only else request.max_tokens)
    _check_together(request, params, n)
    form = _answer_form(request)._replace(logprobs=logprobs)
    structure = structure_of(request)
    if structure is not None:
        if params.beam_width:
            raise RequestRejected(
                f"use_beam_search is not possible together with {structure.param}", param="use_beam_search"
            )
        # What cannot go with a structure is refused before that costs a compilation.
        replace(params, structure=structure.structure)
    return Asking(Wanted(params, _options(request, identity), limit, n, echo_only), prompt, form, structure)


_SAME = (
    *("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "seed", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
    "thinking_token_budget",
)
"""Fields that SamplingParams has under the same name and with the same meaning; null is its default, or the model's."""
_LISTS = ("allowed_token_ids", "bad_words", "logits_processors", "logprob_token_ids", "stop", "stop_token_ids")


def _sampling_params(
    request: GenerationRequest,
    n: int,
    defaults: SamplingDefaults,
    logprobs: LogprobForm,
    *,
    max_tokens: int | None,
) -> SamplingParams:
    given = {name: value for name in _SAME if (value := getattr(request, name, None)) is not None}
    if request.top_k is not None:
        # vLLM's clients write -1 for "keep all".
        given["top_k"] = 0 if request.top_k == -1 else request.top_k
    if request.logit_bias is not None:
        given["logit_bias"] = _biases(request.logit_bias)
    lists = {name: tuple(value) for name in _LISTS if (value := getattr(request, name))}
    given |= {"max_tokens": max_tokens, "n": n, "logprobs": logprobs.top, "prompt_logprobs": logprobs.of_prompt}
    params = SamplingParams(**{**defaults.fields(), **given, **lists})
    if request.use_beam_search:
        if params.logprob_token_ids:
            raise RequestRejected(
                "logprob_token_ids is not allowed together with use_beam_search=true: a beam search knows only the "
                "likeliest tokens",
                param="logprob_token_ids",
            )
        return replace(
            params,
            beam_width=_num_candidates(request, n, MAX_BEAM_WIDTH),
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            early_stopping=bool(request.early_stopping),
        )
    if request.best_of is None:
        return params
    num = _num_candidates(request, n, MAX_BEST_OF)
    # The best are chosen by the log probabilities of their tokens.
    return params if num == n else replace(params, n=num, logprobs=params.logprobs or 0)


def _logprob_form(request: GenerationRequest) -> LogprobForm:
    if isinstance(request, ChatRequest):
        top = request.top_logprobs
        if top is not None and not request.logprobs and top != 0:
            raise RequestRejected("top_logprobs is only allowed together with logprobs=true", param="top_logprobs")
        if top is not None:
            integer("top_logprobs", top, ALL_TOKENS, 2**31 - 1)
        top = (top or 0) if request.logprobs else None
    else:
        assert isinstance(request, CompletionRequest)
        top = request.logprobs
    if request.prompt_logprobs is not None and request.stream:
        raise RequestRejected(
            "prompt_logprobs is not allowed together with stream=true (a stream has those of an echoed prompt: "
            "echo=true with logprobs)",
            param="prompt_logprobs",
        )
    of_echo = isinstance(request, CompletionRequest) and bool(request.echo)
    is_chat = isinstance(request, ChatRequest)
    return LogprobForm(top, request.prompt_logprobs, of_echo, bool(request.return_tokens_as_token_ids), is_chat)


def _biases(value: object) -> list[tuple[int, object]]:
    """The entries of logit_bias; SamplingParams checks their numbers. Raises RequestRejected."""
    if not isinstance(value, dict):
        raise RequestRejected(f"logit_bias must be an object, got {quote(value)}", param="logit_bias")
    for key in value:
        # int() takes spaces, signs, underscores and other alphabets' digits too.
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS):
            raise RequestRejected(
                f'logit_bias must name tokens by their ids, such as "50256", got {quote(key)}', param="logit_bias"
            )
    return [(int(key), bias) for key, bias in value.items()]


def _prompt_form(request: GenerationRequest) -> PromptForm:
    is_chat = isinstance(request, ChatRequest)
    special = not is_chat if request.add_special_tokens is None else request.add_special_tokens
    cut = None if request.truncate_prompt_tokens is None else Truncation(request.truncate_prompt_tokens)
    return PromptForm(special, cut, isinstance(request, CompletionRequest) and bool(request.echo))


def _answer_form(request: GenerationRequest) -> AnswerForm:
    stream, options = bool(request.stream), request.stream_options
    if options is not None and not stream:
        raise RequestRejected("stream_options is only allowed together with stream=true", param="stream_options")
    usage = options is not None and bool(options.include_usage)
    continuous = options is not None and bool(options.continuous_usage_stats)
    if continuous and not usage:
        field = "stream_options.continuous_usage_stats"
        raise RequestRejected(f"{field} is only allowed together with include_usage=true", param=field)
    interval = (
        1 if request.stream_interval is None else integer("stream_interval", request.stream_interval, 1, 2**31 - 1)
    )
    if interval > 1 and not stream:
        raise RequestRejected("stream_interval is only allowed together with stream=true", param="stream_interval")
    return AnswerForm(
        stream,
        usage,
        continuous,
        interval,
        bool(request.return_token_ids),
        name=_name(request),
        timings=bool(request.timings),
    )


def _name(request: GenerationRequest) -> RequestName:
    if request.request_id and request.rid:
        raise RequestRejected("rid is not allowed together with request_id: both name the request", param="rid")
    return RequestName(request.rid or request.request_id or "", is_whole_id=bool(request.rid))


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


def _options(request: GenerationRequest, identity: Identity) -> RequestOptions:
    return request_options(
        identity,
        user=request.user,
        priority=request.priority,
        deadline_s=request.deadline_s,
        queue_timeout_s=request.queue_timeout_s,
        cache_salt=request.cache_salt,
    )


def _token_limit(request: GenerationRequest, default: int | None) -> TokenLimit:
    if not isinstance(request, ChatRequest) or request.max_completion_tokens is None:
        return TokenLimit("max_tokens", request.max_tokens, default)
    limit = TokenLimit("max_completion_tokens", request.max_completion_tokens, default)
    if request.max_completion_tokens < 0:
        raise RequestRejected(f"{limit.field} must be at least 0, got {limit.value}", param=limit.field)
    return limit


def check_num_sequences(num_prompts: int, wanted: Wanted, limit: int) -> None:
    """Raises RequestRejected when one HTTP request asks for too many completions."""
    each = wanted.params.n
    if num_prompts * each > limit:
        name = "best_of" if each > wanted.n else "n"
        raise RequestRejected(
            f"{num_prompts} prompts with {name}={each} make {num_prompts * each} completions, "
            f"at most {limit} are allowed",
            param=name if each > 1 else "prompt",
        )
