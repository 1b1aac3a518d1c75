"""The models as an ingress sees them: a live copy of the Directory, with a connection to every engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import ray

from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.engine.client import EngineClient
from raylm.engine.streams import Sequences
from raylm.errors import Overloaded, RaylmError, ServerStopped
from raylm.log import get_logger
from raylm.openai.served_model import EngineStats, ServedModel, Text
from raylm.serving.directory import DirectoryClient, EngineEntry, ModelEntry, Snapshot

logger = get_logger(__name__)

_RETRY_AFTER_S = 5.0
_RECONNECT_S = 0.5
_LOAD_AGAIN_S = 5.0
_CATCH_UP_POLL_S = 0.02


class _Engine:
    """One engine: what the Directory says of it, and the connection to it."""

    def __init__(self, entry: EngineEntry, client: EngineClient) -> None:
        self.entry = entry
        self.client = client

    @property
    def is_usable(self) -> bool:
        return self.entry.state == "ready" and self.client.is_connected


class ModelRouter:
    """Chooses an engine for each request of one model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engines: dict[str, _Engine] = {}
        self.limits: tuple[int, int] | None = None
        """max_model_len and vocab_size of the engine that came last; None before the first."""
        self.closed: str | None = None
        """Why no more requests are taken."""

    @property
    def usable(self) -> list[_Engine]:
        return [engine for engine in self.engines.values() if engine.is_usable]

    def generate(
        self, request_ids: Sequence[str], prompt_ids: list[int], params: SamplingParams, options: RequestOptions
    ) -> Sequences:
        """Generate on the least busy engine. Raises Overloaded when no engine is up or the router is closed, else as
        EngineClient does."""
        if self.closed is not None:
            raise Overloaded(self.closed, retry_after=_RETRY_AFTER_S)
        engines = self.usable
        if not engines:
            raise Overloaded(f"no engine serves {self.name!r} at the moment", retry_after=_RETRY_AFTER_S)
        chosen = min(engines, key=lambda engine: engine.client.pressure)
        return chosen.client.generate(request_ids, prompt_ids, params, options)


class LiveCatalog:
    """Follows the Directory. A model is listed from the moment that the Directory knows it, and served while its
    tokenizer is loaded and an engine of it is ready."""

    def __init__(self, directory: DirectoryClient, load_text: Callable[[str], Text]) -> None:
        """`load_text`: from model.path to the model's text side; it runs in a thread. Raises ConfigError."""
        self._directory = directory
        self._load_text = load_text
        self._created = int(time.time())
        self._routers: dict[str, ModelRouter] = {}
        self._texts: dict[str, _TextSide] = {}
        self._models: dict[str, ServedModel] = {}
        self._closed: str | None = None
        self._version = -1
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def get(self, name: str) -> ServedModel | None:
        return self._models.get(name)

    def names(self) -> list[str]:
        return sorted(self._texts)

    def ready(self) -> bool:
        if self._closed is not None or not self._texts:
            return False
        return all(name in self._models and self._routers[name].usable for name in self._texts)

    def stats(self) -> list[EngineStats]:
        return [
            EngineStats(router.name, engine_id, engine.client.load)
            for router in self._routers.values()
            for engine_id, engine in router.engines.items()
        ]

    async def caught_up(self, limit_s: float) -> None:
        """Return when every model with an engine can be asked here, after `limit_s` seconds at most. An ingress that is
        added would otherwise refuse what others serve."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not self._has_caught_up():
            await asyncio.sleep(_CATCH_UP_POLL_S)

    def _has_caught_up(self) -> bool:
        served = [
            router
            for router in self._routers.values()
            if any(engine.entry.state == "ready" for engine in router.engines.values())
        ]
        return self._version >= 0 and all(router.name in self._models and router.usable for router in served)

    def close(self, reason: str) -> None:
        """End the live requests with the reason, and refuse others with it."""
        self._closed = reason
        for router in self._routers.values():
            router.closed = reason
            for engine in router.engines.values():
                engine.client.end_all(ServerStopped(reason))

    def check(self) -> None:
        """Raise what ended the watch of the Directory, if anything has: without it the copy only grows old."""
        if self._watcher.done():
            self._watcher.result()

    async def _watch(self) -> None:
        while True:
            try:
                snapshot = await self._directory.ask(lambda directory: directory.watch.remote(self._version))
                await self._apply(snapshot)
            except (ray.exceptions.RayError, ValueError) as error:
                # ValueError: the actor was found by its name, and gone when it was asked.
                logger.warning("the directory is away, going on with the last copy: %s", error)
                await asyncio.sleep(_RECONNECT_S)
            except Exception:
                logger.exception("the directory cannot be followed any more")
                raise  # For `check`.

    async def _apply(self, snapshot: Snapshot) -> None:
        self._version = snapshot.version
        if snapshot.closing is not None and self._closed is None:
            self.close(snapshot.closing)
        for model in snapshot.models:
            self._know(model)
        for entry in snapshot.entries:
            self._update(entry, snapshot)
        entries = {entry.engine_id for entry in snapshot.entries}
        for router in self._routers.values():
            for engine_id in [engine_id for engine_id in router.engines if engine_id not in entries]:
                await self._retire(router, engine_id)
        if snapshot.settled:
            self._forget(self._texts.keys() - {model.name for model in snapshot.models})

    def _know(self, model: ModelEntry) -> None:
        known = self._texts.get(model.name)
        if known is not None and known.model.path == model.path:
            if known.model != model:
                known.model = model
                self._offer(model.name)
            return
        if known is not None:
            known.cancel()
        router = self._routers.setdefault(model.name, ModelRouter(model.name))
        router.closed = self._closed
        self._texts[model.name] = _TextSide(model, self._load_text, on_loaded=self._offer)

    def _forget(self, names: Iterable[str]) -> None:
        """Of a model that is no more; its engines are retired by themselves."""
        for name in names:
            self._texts.pop(name).cancel()
            self._models.pop(name, None)
            logger.info("model %s is no more", name)
        for name in [name for name in self._routers if name not in self._texts and not self._routers[name].engines]:
            del self._routers[name]

    def _update(self, entry: EngineEntry, snapshot: Snapshot) -> None:
        router = self._routers[entry.model]
        engine = router.engines.get(entry.engine_id)
        if engine is not None:
            engine.entry = entry
            engine.client.note_load(entry.load)
            return
        client = EngineClient(entry.address, server_key=entry.public_key, keys=snapshot.client_keys)
        router.engines[entry.engine_id] = _Engine(entry, client)
        router.limits = (entry.max_model_len, entry.vocab_size)
        self._offer(entry.model)
        logger.info("engine %s of %s is at %s", entry.engine_id, entry.model, entry.address)

    def _offer(self, name: str) -> None:
        """Serve a model, once its tokenizer is loaded and its limits are known from an engine."""
        side, router = self._texts[name], self._routers[name]
        if side.text is None or router.limits is None:
            return
        max_model_len, vocab_size = router.limits
        self._models[name] = ServedModel(
            name=name,
            created=self._created,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            text=side.text,
            generator=router,
            sampling=side.model.sampling,
        )

    async def _retire(self, router: ModelRouter, engine_id: str) -> None:
        """Close a connection that nothing uses. The Directory may be wrong or young: live requests go on. Those of a
        connection that was lost are about to fail with the reason, and the next look finds none."""
        engine = router.engines[engine_id]
        if engine.client.num_live:
            return
        del router.engines[engine_id]
        await engine.client.close()
        logger.info("engine %s of %s has gone", engine_id, router.name)


class _TextSide:
    """The tokenizer of one model, loaded in a thread: it takes seconds, in which streams of other models go on."""

    def __init__(self, model: ModelEntry, load: Callable[[str], Text], *, on_loaded: Callable[[str], None]) -> None:
        self.model = model
        self.text: Text | None = None
        self._load = load
        self._on_loaded = on_loaded
        self._task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while self.text is None:
            try:
                self.text = await asyncio.to_thread(self._load, self.model.path)
            except Exception as error:
                unforeseen = error if not isinstance(error, RaylmError) else None
                logger.error("model %s has no tokenizer, trying again: %s", self.model.name, error, exc_info=unforeseen)
                await asyncio.sleep(_LOAD_AGAIN_S)
        self._on_loaded(self.model.name)
