"""The models as an ingress sees them: a live copy of the Directory, with a connection to every engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import Any

import ray
import zmq

from raylm.config.routing import RoutingConfig
from raylm.engine.client import EngineClient
from raylm.errors import RaylmError, ServerStopped
from raylm.generation.ability import Ability, ability_of
from raylm.generation.served_model import EngineStats, ServedModel, Text
from raylm.grammar.compiler import GrammarCompiler
from raylm.log import get_logger
from raylm.serving.directory import DirectoryClient, EngineEntry, ModelEntry, Snapshot
from raylm.serving.routing.engines import RoutedEngine
from raylm.serving.routing.router import ModelRouter
from raylm.serving.stacks import find_stacks
from raylm.serving.waking import Waker
from raylm.stacks import ProcessStacks

logger = get_logger(__name__)

_RECONNECT_S = 0.5
_LOAD_AGAIN_S = 5.0
_CATCH_UP_POLL_S = 0.02

_Version = tuple[str, str, str]
"""Name, path and chat settings of a model. In an upgrade engines of two versions have one name, and neither text side
fits the others."""


def _version(model: ModelEntry) -> _Version:
    return model.name, model.path, model.chat.key


def _know(entry: ModelEntry, directory: Any) -> Awaitable[None]:
    told: Awaitable[None] = directory.know.remote(entry)
    return told


class LiveCatalog:
    """Follows the Directory. A model is listed from the moment that the Directory knows it, and served while its
    tokenizer is loaded and an engine of it is ready. In an upgrade to another path both paths' engines serve, each with
    its own tokenizer."""

    def __init__(
        self,
        directory: DirectoryClient,
        load_text: Callable[[ModelEntry], Text],
        load_grammars: Callable[[str], GrammarCompiler] | None = None,
        routing: RoutingConfig | None = None,
        waker: Waker | None = None,
    ) -> None:
        """`load_text` makes a model's text side; `load_grammars`, from model.path, its compiler of structured output.
        Both run in a thread and raise ConfigError."""
        self._directory = directory
        self._load_text = load_text
        self._load_grammars = load_grammars
        self._routing = routing
        self._waker = waker or Waker()
        self._entries: dict[_Version, ModelEntry] = {}
        """What was last heard of each version."""
        self._created = int(time.time())
        self._routers: dict[_Version, ModelRouter] = {}
        self._texts: dict[_Version, _TextSide] = {}
        self._models: dict[_Version, tuple[ModelRouter, ServedModel]] = {}
        self._closed: str | None = None
        self._version = -1
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def get(self, name: str) -> ServedModel | None:
        # Large bodies are read in other threads, which call this.
        found = [served for (known, *_), served in list(self._models.items()) if known == name]
        return max(found, key=lambda served: served[0].fitness)[1] if found else None

    def names(self) -> list[str]:
        return sorted({name for name, *_ in list(self._texts)})

    def aliases(self) -> dict[str, str]:
        # Files are checked for clashes; of two applications that were deployed apart the older one keeps an alias.
        youngest_first = sorted(self._entries.values(), key=lambda entry: entry.since, reverse=True)
        found = {alias: entry.name for entry in youngest_first for alias in entry.aliases}
        return {alias: name for alias, name in found.items() if alias not in self.names()}

    def ready(self) -> bool:
        return self._closed is None and bool(self._texts) and not self.unready()

    def unready(self) -> dict[str, str]:
        if self._closed is not None:
            return dict.fromkeys(self.names(), self._closed)
        usable = {version[0] for version in self._models if self._routers[version].usable or self._sleeps(version)}
        return {name: self._lack(name) for name in self.names() if name not in usable}

    def _sleeps(self, version: _Version) -> bool:
        """Whether it has no engine because nobody asks: a request wakes it."""
        entry = self._entries.get(version)
        return entry is not None and entry.may_sleep and not self._routers[version].has_engine

    def _lack(self, name: str) -> str:
        """What a model needs before it can take requests."""
        versions = [version for version in self._texts if version[0] == name]
        engines = [engine for version in versions for engine in self._routers[version].engines.values()]
        if not engines:
            failures = [each.failure for version in versions if (each := self._routers[version]).failure is not None]
            last = max(failures, key=lambda failure: failure.at, default=None)
            return "no engine is up" if last is None else f"its last start failed: {last.reason}"
        if all(engine.entry.state == "draining" for engine in engines):
            return "its engines end: none takes new requests"
        if not any(engine.client.is_connected for engine in engines):
            return "no engine can be reached"
        if not any(version in self._models for version in versions):
            return "its tokenizer is not loaded"
        return "no engine that can be reached takes new requests"

    def alive(self) -> bool:
        return self._closed is None and not self._watcher.done()

    @property
    def num_open(self) -> int:
        """Sequences of this ingress that run or wait in engines, and requests that wait for an engine."""
        routers = self._routers.values()
        live = sum(engine.client.num_live for router in routers for engine in router.engines.values())
        return live + sum(router.num_held for router in routers)

    def stats(self) -> list[EngineStats]:
        return [
            EngineStats(router.name, engine_id, engine.client.load)
            for router in self._routers.values()
            for engine_id, engine in router.engines.items()
        ]

    def engines(self, name: str) -> list[RoutedEngine]:
        return [
            engine
            for version, router in list(self._routers.items())
            if version[0] == name
            for engine in router.engines.values()
        ]

    async def stacks(self, names: Collection[str]) -> list[ProcessStacks]:
        return await find_stacks([engine.entry for name in names for engine in self.engines(name)])

    def routers(self) -> list[ModelRouter]:
        return list(self._routers.values())

    async def caught_up(self, limit_s: float) -> None:
        """Return when every model with an engine can be asked here, after `limit_s` seconds at most. An ingress that is
        added would otherwise refuse what others serve."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not self._has_caught_up():
            await asyncio.sleep(_CATCH_UP_POLL_S)

    def _has_caught_up(self) -> bool:
        served = [
            version
            for version, router in self._routers.items()
            if any(engine.entry.state == "ready" for engine in router.engines.values())
        ]
        return self._version >= 0 and all(each in self._models and self._routers[each].usable for each in served)

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
        models = [*snapshot.models, *(entry.model for entry in snapshot.entries)]
        for model in models:
            self._know(model)
        for entry in snapshot.entries:
            self._update(entry, snapshot)
        entries = {entry.engine_id for entry in snapshot.entries}
        for router in self._routers.values():
            for engine_id in [engine_id for engine_id in router.engines if engine_id not in entries]:
                await self._retire(router, engine_id)
            router.follow()
        if not snapshot.settled:
            await self._tell(snapshot)
        else:
            self._forget(self._texts.keys() - {_version(model) for model in models})
        for version in self._texts:
            self._offer(version)

    async def _tell(self, snapshot: Snapshot) -> None:
        """A Directory that has just begun hears of models that sleep from nobody else."""
        told = {model.name for model in snapshot.models}
        for version, entry in self._entries.items():
            if entry.name not in told and self._sleeps(version):
                await self._directory.ask(partial(_know, entry))

    def _know(self, model: ModelEntry) -> None:
        version = _version(model)
        self._entries[version] = max(model, self._entries.get(version, model), key=lambda each: each.since)
        if version not in self._routers:
            wake = partial(self._waker.wake, model.application)
            self._routers[version] = ModelRouter(model.name, self._routing, wake)
        router = self._routers[version]
        router.note(self._entries[version])
        router.closed = self._closed
        if version not in self._texts:
            self._texts[version] = _TextSide(
                model, self._load_text, self._load_grammars, on_loaded=lambda: self._offer(version)
            )

    def _forget(self, versions: Iterable[_Version]) -> None:
        """Of a model that is no more; its engines are retired by themselves."""
        for version in versions:
            self._texts.pop(version).cancel()
            self._models.pop(version, None)
            logger.info("model %s (%s) is no more", *version[:2])
        for version in [each for each in self._routers if each not in self._texts and not self._routers[each].engines]:
            del self._routers[version]
            self._entries.pop(version, None)

    def _update(self, entry: EngineEntry, snapshot: Snapshot) -> None:
        router = self._routers[_version(entry.model)]
        engine = router.engines.get(entry.engine_id)
        if engine is not None:
            engine.entry = entry
            engine.client.note_load(entry.load)
            return
        try:
            client = EngineClient(entry.address, server_key=entry.public_key, keys=snapshot.client_keys)
        except zmq.ZMQError as error:
            # This process has no file left for a connection: other engines go on, and the next look tries again.
            logger.warning("engine %s of %s is not connected to yet: %s", entry.engine_id, entry.model.name, error)
            return
        router.engines[entry.engine_id] = RoutedEngine(entry, client, self._routing)
        logger.info("engine %s of %s is at %s", entry.engine_id, entry.model.name, entry.address)

    def _offer(self, version: _Version) -> None:
        """Serve a model once its tokenizer is loaded and an engine has said its limits; it may sleep since then."""
        side, router = self._texts[version], self._routers[version]
        model = self._entries[version]
        if side.text is None or model.limits is None:
            return
        served = ServedModel(
            name=router.name,
            created=self._created,
            max_model_len=model.limits.max_model_len,
            vocab_size=model.limits.vocab_size,
            text=side.text,
            generator=router,
            sampling=model.sampling,
            grammars=side.grammars,
            ability=side.ability,
            aliases=model.aliases,
        )
        self._models[version] = router, served

    async def _retire(self, router: ModelRouter, engine_id: str) -> None:
        """Close a connection that nothing uses. The Directory may be wrong or young: live requests go on. Those of a
        connection that was lost are about to fail with the reason, and the next look finds none."""
        engine = router.engines[engine_id]
        if engine.client.num_live:
            return
        del router.engines[engine_id]
        await engine.close()
        logger.info("engine %s of %s has gone", engine_id, router.name)


class _TextSide:
    """The tokenizer of one model and its compiler of structured output, loaded in a thread: that takes seconds, while
    streams of other models go on."""

    def __init__(
        self,
        model: ModelEntry,
        load: Callable[[ModelEntry], Text],
        load_grammars: Callable[[str], GrammarCompiler] | None,
        *,
        on_loaded: Callable[[], None],
    ) -> None:
        self.text: Text | None = None
        self.grammars: GrammarCompiler | None = None
        self.ability = Ability()
        self._load_grammars = load_grammars
        self._model = model
        self._load = load
        self._on_loaded = on_loaded
        self._task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        self._task.cancel()
        if self.grammars is not None:
            # It waits for its processes to end.
            threading.Thread(target=self.grammars.close, daemon=True).start()

    async def _run(self) -> None:
        while self.text is None:
            try:
                text = await asyncio.to_thread(self._load, self._model)
                self.ability = ability_of(text.chat_template, self._model.chat.config)
                if self._load_grammars is not None:
                    self.grammars = await asyncio.to_thread(self._load_grammars, self._model.path)
                self.text = text
            except Exception as error:
                unforeseen = error if not isinstance(error, RaylmError) else None
                logger.error(
                    "model %s has no tokenizer, trying again: %s", self._model.name, error, exc_info=unforeseen
                )
                await asyncio.sleep(_LOAD_AGAIN_S)
        self._on_loaded()
