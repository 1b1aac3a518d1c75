"""OpenAIService: OpenAI's operations on the models of a catalog; knows text and tokens, but no HTTP connection."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import perf_counter
from uuid import uuid4

import msgspec

from raylm.config.serving import HttpConfig
from raylm.openai.adapter import DONE, Reply, answer, error_event
from raylm.openai.chunks import ChunkEncoder, Interval
from raylm.openai.errors import http_error
from raylm.openai.generation import Generation, Origin, Tally, gather
from raylm.openai.metrics import HttpMetrics
from raylm.openai.params import AnswerForm
from raylm.openai.preparation import Preparation, Prepared
from raylm.openai.protocol import ModelCard, ModelList, ModelPermission
from raylm.openai.served_model import ModelCatalog, ServedModel

Events = AsyncGenerator[bytes, None]


class OpenAIService:
    """Answers are JSON bytes, or SSE events for `stream=true`; errors are exceptions of raylm."""

    def __init__(self, models: ModelCatalog, config: HttpConfig, metrics: HttpMetrics) -> None:
        self._models = models
        self._preparation = Preparation(models, config)
        self._metrics = metrics

    def list_models(self) -> bytes:
        served = [self._models.get(name) for name in self._models.names()]
        return msgspec.json.encode(ModelList([_card(model) for model in served if model is not None]))

    def describe_model(self, name: str) -> bytes:
        return msgspec.json.encode(_card(self._preparation.model(name)))

    async def chat(self, body: bytes | bytearray) -> bytes | Events:
        """POST /v1/chat/completions. A bytearray is emptied as soon as it has been read."""
        started = perf_counter()
        return await self._run(await self._preparation.chat(body), started)

    async def complete(self, body: bytes | bytearray) -> bytes | Events:
        """POST /v1/completions."""
        started = perf_counter()
        return await self._run(await self._preparation.completion(body), started)

    async def _run(self, prepared: Prepared, started: float) -> bytes | Events:
        model, job, chat = prepared.model, prepared.job, prepared.chat
        reply_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
        reply = Reply(reply_id, int(time.time()), model.name, chat)
        metrics = self._metrics.model(model.name)
        form = prepared.form
        # All choices share one table of stop strings.
        origin = Origin(reply_id, chat, started, model.text.stop_table(job.prompts[0].params), form.logprobs)
        generation = Generation(model, job, metrics, origin)
        tally = Tally(job.prompt_tokens)
        if not form.stream:
            async with aclosing(generation):
                chosen = await gather(job, generation.deltas(), tally, token_ids=form.token_ids)
            return answer(reply, chosen, tally.usage())
        return _events(ChunkEncoder(reply, job, form), generation, tally, form)


def _card(model: ServedModel) -> ModelCard:
    permission = ModelPermission(f"modelperm-{model.name}", model.created)
    return ModelCard(model.name, model.created, model.max_model_len, root=model.name, permission=[permission])


async def _events(encoder: ChunkEncoder, generation: Generation, tally: Tally, form: AnswerForm) -> Events:
    """SSE events, the first as soon as the engine has taken the request, though it may wait for its turn there.

    An error before that is raised, a later one becomes an event.
    """
    interval = Interval(form.interval)
    async with aclosing(generation):
        await generation.admitted()
        yield encoder.opening()
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    tally.add(delta)
                    due = interval.push(delta)
                    chunk = b"" if due is None else encoder.chunk(due, tally.usage() if form.continuous_usage else None)
                    if chunk:
                        yield chunk
        except Exception as error:
            # The engine is free before a slow client has read.
            await generation.aclose()
            yield b"".join(map(encoder.chunk, interval.rest())) + error_event(http_error(error))
            return
    yield (encoder.usage(tally.usage()) if form.include_usage else b"") + DONE
