"""Pure functions between OpenAI's requests and the engine's: choices to generate, chunks and answers to send."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from raylm.core.sampling import MAX_SEED, SamplingParams
from raylm.errors import RequestRejected
from raylm.serving.errors import HttpError
from raylm.serving.openai_protocol import (
    ChatAnswer,
    ChatChoice,
    ChatRequest,
    Completion,
    CompletionRequest,
    GenerationRequest,
    TextChoice,
    Usage,
)
from raylm.serving.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion to generate. `prefix` is the echoed prompt, put before its text."""

    index: int
    prompt_ids: list[int]
    params: SamplingParams
    prefix: str = ""


class ChoiceDelta(NamedTuple):
    """Text that the choice of this index gained; with a finish reason it is the last."""

    choice: int
    text: str
    finish_reason: str | None
    num_tokens: int


class EncodedPrompt(NamedTuple):
    """One prompt, tokenised. `field` is where it came from; `echo` is put before each of its completions."""

    token_ids: list[int]
    field: str
    echo: str = ""


class TokenLimit(NamedTuple):
    """How many tokens the request allows each completion, by which field, and what holds without it.

    Both None: as many as the model has room for.
    """

    field: str
    value: int | None
    default: int | None


class Job(NamedTuple):
    """One HTTP request, ready to run."""

    choices: list[Choice]
    prompt_tokens: int


def sampling_params(request: GenerationRequest) -> SamplingParams:
    """The request's sampling as the engine knows it. Raises RequestRejected where a value is out of its range."""
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        # vLLM's clients write -1 for "keep all".
        top_k=0 if request.top_k is None or request.top_k == -1 else request.top_k,
        min_p=0.0 if request.min_p is None else request.min_p,
        seed=request.seed,
        max_tokens=request.max_tokens,
        n=1 if request.n is None else request.n,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=bool(request.ignore_eos),
    )


def check_options(request: GenerationRequest) -> None:
    """What must fit together in one request. Raises RequestRejected."""
    if request.stream_options is not None and not request.stream:
        raise RequestRejected("stream_options is only allowed together with stream=true", param="stream_options")
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    num = 1 if request.n is None else request.n
    if best_of is not None and best_of != num:
        raise RequestRejected(
            f"best_of must be left out or equal n ({num}): choosing among more completions is not supported, "
            f"got {best_of}",
            param="best_of",
            code="unsupported_parameter",
        )


def check_num_choices(num_prompts: int, n: int, limit: int) -> None:
    """Raises RequestRejected when one HTTP request asks for too many completions."""
    if num_prompts * n > limit:
        raise RequestRejected(
            f"{num_prompts} prompts with n={n} make {num_prompts * n} completions, at most {limit} are allowed",
            param="n" if n > 1 else "prompt",
        )


def token_limit(request: GenerationRequest, default: int | None) -> TokenLimit:
    """The limit on each completion's tokens. Raises RequestRejected where it is below 1."""
    if not isinstance(request, ChatRequest) or request.max_completion_tokens is None:
        return TokenLimit("max_tokens", request.max_tokens, default)
    limit = TokenLimit("max_completion_tokens", request.max_completion_tokens, default)
    if request.max_completion_tokens < 1:
        raise RequestRejected(f"{limit.field} must be at least 1, got {limit.value}", param=limit.field)
    return limit


def plan(model: ServedModel, prompts: list[EncodedPrompt], params: SamplingParams, limit: TokenLimit) -> Job:
    """The choices of a request: n for each prompt, prompt by prompt, each with its own seed and room for tokens.

    Raises RequestRejected when a prompt does not fit into the model together with the tokens it asks for.
    """
    choices: list[Choice] = []
    for prompt in prompts:
        max_tokens = _max_tokens(model, len(prompt.token_ids), limit)
        for number in range(params.n):
            own = replace(params, n=1, seed=_seed(params.seed, number), max_tokens=max_tokens)
            choices.append(Choice(len(choices), prompt.token_ids, own, prompt.echo))
    return Job(choices, sum(len(prompt.token_ids) for prompt in prompts))


def _seed(seed: int | None, number: int) -> int | None:
    """Choice `number` draws from seed + number, around the end of the range."""
    if seed is None:
        return None
    seed += number
    return seed if seed <= MAX_SEED else seed - 2 * (MAX_SEED + 1)


def check_prompt(model: ServedModel, token_ids: list[int], field: str) -> None:
    """Raises RequestRejected when a prompt is empty, too long for the model or not made of its tokens."""
    if not token_ids:
        raise RequestRejected("The prompt has no tokens", param=field)
    if len(token_ids) >= model.max_model_len:
        raise RequestRejected(
            f"The prompt has {len(token_ids)} tokens, but {model.name} takes {model.max_model_len} tokens in all, "
            "at least one of them for the completion",
            param=field,
            code="context_length_exceeded",
        )
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < model.vocab_size:
            raise RequestRejected(
                f"{field} holds the token id {token}, but those of {model.name} go from 0 to {model.vocab_size - 1}",
                param=field,
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


class Reply(NamedTuple):
    """What every answer and chunk of one HTTP request says of it. `created` is in seconds since the epoch."""

    id: str
    created: int
    model: str
    chat: bool


def answer(reply: Reply, texts: list[str], reasons: list[str | None], usage: Usage) -> bytes:
    """The JSON of an answer that is not streamed."""
    ends = list(zip(texts, reasons, strict=True))
    choices: list[ChatChoice] | list[TextChoice]
    if reply.chat:
        choices = [ChatChoice(index, ChatAnswer(text), reason) for index, (text, reason) in enumerate(ends)]
    else:
        choices = [TextChoice(index, text, reason) for index, (text, reason) in enumerate(ends)]
    kind = "chat.completion" if reply.chat else "text_completion"
    return msgspec.json.encode(Completion(reply.id, kind, reply.created, reply.model, choices, usage))


def usage_of(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


class ChunkEncoder:
    """Makes the SSE events of one stream. All but the text is encoded once, because each token pays for a chunk."""

    def __init__(self, reply: Reply, num_choices: int, *, include_usage: bool) -> None:
        self._reply = reply
        self._kind = "chat.completion.chunk" if reply.chat else "text_completion"
        start = (
            f'data: {{"id":{_json(reply.id)},"object":"{self._kind}","created":{reply.created},'
            f'"model":{_json(reply.model)},"choices":[{{"index":'
        )
        first = ',"delta":{"role":"assistant","content":' if reply.chat else ',"text":'
        later = ',"delta":{"content":' if reply.chat else ',"text":'
        self._first = [f"{start}{index}{first}".encode() for index in range(num_choices)]
        self._later = [f"{start}{index}{later}".encode() for index in range(num_choices)]
        self._heads = list(self._first)
        self._reason = ('},"logprobs":null,' if reply.chat else ',"logprobs":null,').encode() + b'"finish_reason":'
        # With include_usage every chunk has the field, and only the last one its numbers.
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._tail = self._reason + b"null" + self._end

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """The event of a delta; empty when it would say nothing new."""
        index, text, reason, _ = delta
        head = self._heads[index]
        if reason is None:
            later = self._later[index]
            if head is later:
                return head + _text(text) + self._tail if text else b""
            self._heads[index] = later
            return head + _text(text) + self._tail
        return head + _text(text) + self._reason + _json(reason).encode() + self._end

    def usage(self, usage: Usage) -> bytes:
        """The event with the usage, which comes after the last choice's."""
        return event(Completion(self._reply.id, self._kind, self._reply.created, self._reply.model, [], usage))


DONE = b"data: [DONE]\n\n"


def event(value: msgspec.Struct) -> bytes:
    """One SSE event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def error_event(error: HttpError) -> bytes:
    """An error after the answer has begun: the status is sent, so the stream carries it, as OpenAI's clients expect."""
    return b"data: " + error.body() + b"\n\n" + DONE


_encode = msgspec.json.Encoder().encode


def _text(text: str) -> bytes:
    """A JSON string that no client takes for several lines: some split at Unicode's line ends too."""
    encoded = _encode(text)
    if encoded.isascii():
        return encoded
    for raw, escaped in _LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return encoded


_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def _json(value: str) -> str:
    return _encode(value).decode()
