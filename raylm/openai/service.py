"""OpenAIService: OpenAI's operations on the models of a catalog; knows text and tokens, but no HTTP connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from time import perf_counter
from typing import TypeVar
from uuid import uuid4

import msgspec

from raylm.config.serving import HttpConfig
from raylm.errors import Overloaded, RequestRejected
from raylm.openai.adapter import (
    DONE,
    ChoiceDelta,
    ChunkEncoder,
    EncodedPrompt,
    Job,
    Reply,
    answer,
    check_prompt,
    error_event,
    plan,
)
from raylm.openai.errors import HttpError, http_error
from raylm.openai.generation import Origin, Tally, gather, text_deltas
from raylm.openai.merge import merged
from raylm.openai.metrics import HttpMetrics
from raylm.openai.params import check_num_sequences, wanted
from raylm.openai.parser import parse, prompts_of
from raylm.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ModelCard,
    ModelList,
    ModelPermission,
)
from raylm.openai.quote import MAX_VALUE_CHARS
from raylm.openai.served_model import ModelCatalog, ServedModel

LONG_TEXT_CHARS = 20_000
"""Longer prompts are tokenised in a thread (the tokenizer drops the GIL), so that other streams' tokens go on."""
START_RETRY_S = 5.0

Events = AsyncGenerator[bytes, None]
Result = TypeVar("Result")


class OpenAIService:
    """Answers are JSON bytes, or SSE events for `stream=true`; errors are exceptions of raylm."""

    def __init__(self, models: ModelCatalog, config: HttpConfig, metrics: HttpMetrics) -> None:
        self._models = models
        self._config = config
        self._metrics = metrics

    def list_models(self) -> bytes:
        served = [self._models.get(name) for name in self._models.names()]
        return msgspec.json.encode(ModelList([_card(model) for model in served if model is not None]))

    def describe_model(self, name: str) -> bytes:
        return msgspec.json.encode(_card(self._model(name)))

    async def chat(self, body: bytes) -> bytes | Events:
        """POST /v1/chat/completions."""
        started = perf_counter()
        request = parse(ChatRequest, body, strict=self._config.strict)
        model = self._model(request.model)
        asked = wanted(request, model.sampling, default_max_tokens=None)
        check_num_sequences(1, asked, self._config.max_choices)
        prompt = await _chat_prompt(model, request)
        return await self._run(request, model, plan(model, [prompt], asked), started)

    async def complete(self, body: bytes) -> bytes | Events:
        """POST /v1/completions."""
        started = perf_counter()
        request = parse(CompletionRequest, body, strict=self._config.strict)
        model = self._model(request.model)
        asked = wanted(request, model.sampling, default_max_tokens=self._config.default_max_tokens)
        prompts = prompts_of(request.prompt)
        check_num_sequences(len(prompts), asked, self._config.max_choices)
        encoded = await _unblocked(sum(map(len, prompts)), partial(_encode, model, prompts, bool(request.echo)))
        return await self._run(request, model, plan(model, encoded, asked), started)

    def _model(self, name: str | None) -> ServedModel:
        """The model of this name; without one, the only model that there is."""
        names = self._models.names()
        if name is None:
            if len(names) != 1:
                raise RequestRejected(
                    f"model is required: one of {_listed(names)}", param="model", code="missing_field"
                )
            name = names[0]
        model = self._models.get(name)
        if model is not None:
            return model
        if name in names:
            raise Overloaded(f"The model {name!r} is starting", retry_after=START_RETRY_S)
        message = f"The model {name[:MAX_VALUE_CHARS]!r} does not exist; this server has {_listed(names)}"
        raise HttpError(404, message, param="model", code="model_not_found")

    async def _run(self, request: GenerationRequest, model: ServedModel, job: Job, started: float) -> bytes | Events:
        chat = isinstance(request, ChatRequest)
        reply_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
        reply = Reply(reply_id, int(time.time()), model.name, chat)
        metrics = self._metrics.model(model.name)
        origin = Origin(reply_id, chat, started)
        deltas = merged([text_deltas(model, prompt, metrics, origin) for prompt in job.prompts])
        tally = Tally(job.prompt_tokens)
        if not request.stream:
            chosen = await gather(job, deltas, tally)
            return answer(reply, [(one.text, one.finish_reason) for one in chosen], tally.usage())
        encoder = ChunkEncoder(reply, job.num_sequences, include_usage=request.includes_usage)
        return _events(encoder, deltas, tally, include_usage=request.includes_usage)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _card(model: ServedModel) -> ModelCard:
    permission = ModelPermission(f"modelperm-{model.name}", model.created)
    return ModelCard(model.name, model.created, model.max_model_len, root=model.name, permission=[permission])


async def _chat_prompt(model: ServedModel, request: ChatRequest) -> EncodedPrompt:
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    length = sum(len(str(message.get("content"))) for message in messages)
    generate = request.add_generation_prompt is not False
    ids = await _unblocked(length, partial(model.text.chat, messages, add_generation_prompt=generate))
    check_prompt(model, ids, "messages")
    return EncodedPrompt(ids, "messages")


def _encode(model: ServedModel, prompts: list[str | list[int]], echo: bool) -> list[EncodedPrompt]:
    encoded = []
    for prompt in prompts:
        ids = prompt if isinstance(prompt, list) else model.text.encode(prompt)
        check_prompt(model, ids, "prompt")
        text = prompt if isinstance(prompt, str) else model.text.decode(ids) if echo else ""
        encoded.append(EncodedPrompt(ids, "prompt", text if echo else ""))
    return encoded


async def _unblocked(length: int, tokenise: Callable[[], Result]) -> Result:
    """Tokenise here when it is quick, in a thread when `length`, in characters, is not."""
    return tokenise() if length <= LONG_TEXT_CHARS else await asyncio.to_thread(tokenise)


async def _events(
    encoder: ChunkEncoder, deltas: AsyncGenerator[ChoiceDelta, None], tally: Tally, *, include_usage: bool
) -> Events:
    """SSE events. An error before the first one is raised, a later one becomes an event."""
    begun = False
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                tally.add(delta)
                chunk = encoder.chunk(delta)
                if chunk:
                    begun = True
                    yield chunk
    except Exception as error:
        if not begun:
            raise
        yield error_event(http_error(error))
        return
    yield (encoder.usage(tally.usage()) if include_usage else b"") + DONE
