"""The models as an ingress sees them: a live copy of the Directory, with a connection to every engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import ray

from raylm.config.sampling import SamplingDefaults
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.engine.client import EngineClient
from raylm.engine.streams import Sequences
from raylm.errors import Overloaded
from raylm.log import get_logger
from raylm.openai.served_model import EngineStats, ServedModel, Text
from raylm.serving.directory import EngineEntry, Snapshot, find_directory

logger = get_logger(__name__)

_RETRY_AFTER_S = 5.0
_RECONNECT_S = 0.5


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

    @property
    def usable(self) -> list[_Engine]:
        return [engine for engine in self.engines.values() if engine.is_usable]

    def generate(
        self, request_ids: Sequence[str], prompt_ids: list[int], params: SamplingParams, options: RequestOptions
    ) -> Sequences:
        """Generate on the least busy engine. Raises Overloaded when no engine is up, else as EngineClient does."""
        engines = self.usable
        if not engines:
            raise Overloaded(f"no engine serves {self.name!r} at the moment", retry_after=_RETRY_AFTER_S)
        chosen = min(engines, key=lambda engine: engine.client.pressure)
        return chosen.client.generate(request_ids, prompt_ids, params, options)


class LiveCatalog:
    """Follows the Directory. A model is listed from the start, and served while an engine of it is ready."""

    def __init__(self, texts: dict[str, Text], sampling: dict[str, SamplingDefaults], directory: str) -> None:
        """`texts`: model name -> its text side; `sampling`: how its requests are sampled that leave it open."""
        self._texts = texts
        self._sampling = sampling
        self._directory = directory
        self._created = int(time.time())
        self._routers = {name: ModelRouter(name) for name in texts}
        self._models: dict[str, ServedModel] = {}
        self._version = -1
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def get(self, name: str) -> ServedModel | None:
        return self._models.get(name)

    def names(self) -> list[str]:
        return list(self._texts)

    def ready(self) -> bool:
        return all(router.usable for router in self._routers.values())

    def stats(self) -> list[EngineStats]:
        return [
            EngineStats(router.name, engine_id, engine.client.load)
            for router in self._routers.values()
            for engine_id, engine in router.engines.items()
        ]

    def check(self) -> None:
        """Raise what ended the watch of the Directory, if anything has: without it the copy only grows old."""
        if self._watcher.done():
            self._watcher.result()

    async def _watch(self) -> None:
        while True:
            try:
                snapshot = await find_directory(self._directory).watch.remote(self._version)
                await self._apply(snapshot)
            except (ray.exceptions.RayError, ValueError) as error:
                # ValueError: the actor was found by its name, and gone when it was asked.
                logger.warning("the directory is away, going on with the last copy: %s", error)
                await asyncio.sleep(_RECONNECT_S)

    async def _apply(self, snapshot: Snapshot) -> None:
        self._version = snapshot.version
        entries = {entry.engine_id: entry for entry in snapshot.entries if entry.model in self._routers}
        for entry in entries.values():
            self._update(entry, snapshot)
        for router in self._routers.values():
            for engine_id in [engine_id for engine_id in router.engines if engine_id not in entries]:
                await self._retire(router, engine_id)

    def _update(self, entry: EngineEntry, snapshot: Snapshot) -> None:
        router = self._routers[entry.model]
        engine = router.engines.get(entry.engine_id)
        if engine is not None:
            engine.entry = entry
            engine.client.note_load(entry.load)
            return
        client = EngineClient(entry.address, server_key=entry.public_key, keys=snapshot.client_keys)
        router.engines[entry.engine_id] = _Engine(entry, client)
        self._models[entry.model] = ServedModel(
            name=entry.model,
            created=self._created,
            max_model_len=entry.max_model_len,
            vocab_size=entry.vocab_size,
            text=self._texts[entry.model],
            generator=router,
            sampling=self._sampling[entry.model],
        )
        logger.info("engine %s of %s is at %s", entry.engine_id, entry.model, entry.address)

    async def _retire(self, router: ModelRouter, engine_id: str) -> None:
        """Close a connection that nothing uses. The Directory may be wrong or young: live requests go on. Those of a
        connection that was lost are about to fail with the reason, and the next look finds none."""
        engine = router.engines[engine_id]
        if engine.client.num_live:
            return
        del router.engines[engine_id]
        await engine.client.close()
        logger.info("engine %s of %s has gone", engine_id, router.name)
