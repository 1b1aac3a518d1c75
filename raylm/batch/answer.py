"""Answerer: one engine of this process with OpenAI's operations on top, line in, result out."""

from __future__ import annotations

import time
from collections.abc import Collection

from raylm.api.call import Call
from raylm.api.errors import HttpError, http_error
from raylm.api.metrics import HttpMetrics
from raylm.api.operations import Operation, operations
from raylm.batch.requests import (
    BadLine,
    BatchRequest,
    Result,
    answered,
    failure,
)
from raylm.config.engine import EngineConfig
from raylm.config.serving import HttpConfig
from raylm.engine.engine import Engine
from raylm.engine.local_client import LocalClient
from raylm.errors import EngineDeadError
from raylm.generation.ability import ability_of
from raylm.generation.served_model import EngineHandle, EngineStats, ServedModel, Text
from raylm.grammar.compiler import GrammarCompiler, GrammarLimits
from raylm.model_files.advice import sampling_defaults
from raylm.model_files.source import locate
from raylm.stacks import ProcessStacks
from raylm.text.chat_settings import ChatSettings
from raylm.text.processor import TextProcessor

_GRAMMARS = GrammarLimits(waiting=None, queue_s=None)
"""Nobody sends a line again that was refused for want of room, so its structure waits."""


class OneModel:
    """A catalog of one model, which is always there."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def get(self, name: str) -> ServedModel | None:
        return self._model if name == self._model.name else None

    def names(self) -> list[str]:
        return [self._model.name]

    def aliases(self) -> dict[str, str]:
        return dict.fromkeys(self._model.aliases, self._model.name)

    def ready(self) -> bool:
        return True

    def unready(self) -> dict[str, str]:
        return {}

    def alive(self) -> bool:
        return True

    def stats(self) -> list[EngineStats]:
        return []

    def engines(self, name: str) -> list[EngineHandle]:
        return []

    async def stacks(self, names: Collection[str]) -> list[ProcessStacks]:
        return []


class Answerer:
    """Answers batch requests as the server would, many at a time. Belongs to one event loop, once it has answered."""

    def __init__(self, config: EngineConfig, engine: Engine, *, max_tokens: int, text: Text | None = None) -> None:
        """`max_tokens` is for plain prompts that say nothing; `text` is the model's own where it is None; with another
        there is no structured output."""
        self.name = config.model.served_name
        self._client = LocalClient(engine)
        self._grammars: GrammarCompiler | None = None
        if text is None:
            source = locate(config.model.reference)
            text = TextProcessor.load(source, ChatSettings.of(config))
            self._grammars = GrammarCompiler(source, limits=_GRAMMARS)
        model = ServedModel(
            name=self.name,
            created=int(time.time()),
            max_model_len=engine.info.max_model_len,
            vocab_size=engine.info.vocab_size,
            text=text,
            generator=self._client,
            sampling=sampling_defaults(config),
            grammars=self._grammars,
            ability=ability_of(text.chat_template, config.chat),
            aliases=tuple(config.model.aliases),
        )
        catalog = OneModel(model)
        metrics = HttpMetrics(catalog)
        self._asked = _by_url(operations(catalog, HttpConfig(), metrics))
        self._plain = _by_url(operations(catalog, HttpConfig(default_max_tokens=max_tokens), metrics))

    async def answer(self, request: BatchRequest | BadLine) -> Result:
        """The result of one line, an error too. Raises EngineDeadError when nothing can be answered any more."""
        if isinstance(request, BadLine):
            return failure(request)
        try:
            return answered(request.custom_id, 200, await self._ask(request))
        except EngineDeadError:
            raise
        except Exception as error:
            problem = http_error(error)
            return answered(request.custom_id, problem.status, problem.body())

    def close(self) -> None:
        """Give back the engine's memory."""
        self._client.close()
        if self._grammars is not None:
            self._grammars.close()

    async def _ask(self, request: BatchRequest) -> bytes:
        table = self._plain if request.is_plain else self._asked
        reply = await table[request.url].run(Call(request.body))
        if isinstance(reply, bytes):
            return reply
        await reply.aclose()
        raise HttpError(400, "stream must be false in a batch", param="stream", code="unsupported_parameter")


def _by_url(table: list[Operation]) -> dict[str, Operation]:
    """The operations that lines may ask for."""
    return {operation.path: operation for operation in table if operation.in_batches}
