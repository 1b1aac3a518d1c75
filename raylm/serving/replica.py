"""ModelReplica: Serve's face of one copy of a model. Requests do not pass through it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray import serve
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.requests import Request
from starlette.responses import Response

from raylm import log
from raylm.api.engine_metrics import engine_metrics
from raylm.api.errors import HttpError
from raylm.api.exposition import families_of
from raylm.config.application import ModelDeployment
from raylm.config.resolve import resolve
from raylm.core.load import Load
from raylm.engine.actor import EngineActor, EngineAddress
from raylm.errors import EngineDeadError
from raylm.executor.placement import ENGINE_CPUS, Bundle, worker_device
from raylm.generation.served_model import EngineStats
from raylm.model_files.advice import sampling_defaults
from raylm.serving.autoscaling import Demand
from raylm.serving.causes import cause
from raylm.serving.directory import (
    NAMESPACE,
    REPORT_EVERY_S,
    DirectoryClient,
    EngineEntry,
    ModelEntry,
    ModelLimits,
    StartFailure,
)
from raylm.serving.metrics.ray_metrics import RayMetrics
from raylm.serving.peers import engine_name, find_peers
from raylm.serving.replica_state import may_sleep
from raylm.serving.stat_loggers import StatLoggers
from raylm.text.chat_settings import ChatSettings

logger = log.get_logger(__name__)
_T = TypeVar("_T")

_STALE_AFTER_S = 15.0
"""An engine actor that has not answered for this long counts as dead."""
_STOP_S = 10.0
"""What an engine gets to stop when its drain is over, before it is killed."""


class ModelReplica:
    """Owns the placement group (it is in bundle 0), starts the engine in it, reports it to the Directory, drains it."""

    async def __init__(self, config: ModelDeployment, resources: Bundle, host: str) -> None:  # type: ignore[misc]  # Serve awaits it
        log.configure(form=config.engine.runtime.log_format)
        self._config = config
        model = config.engine.model
        context = serve.get_replica_context()
        self._model = ModelEntry(
            model.served_name,
            context.app_name,
            model.reference,
            sampling=sampling_defaults(config.engine),
            since=time.time(),
            chat=ChatSettings.of(config.engine),
            may_sleep=may_sleep(context),
            aliases=tuple(model.aliases),
        )
        self._capacity = resolve(config.engine, worker_device(resources)).scheduler.max_num_seqs
        self._engine_id = uuid.uuid4().hex
        self._stat_loggers = StatLoggers(config.engine.model.served_name, self._engine_id)
        self._directory = DirectoryClient(config.endpoint)
        self._reporter: asyncio.Task[None] | None = None
        self._ray_metrics = RayMetrics()
        self._allowed: set[bytes] = set()
        starting = asyncio.get_running_loop().create_task(self._keep_known())
        try:
            group = ray.util.get_current_placement_group()
            self._engine = self._make_engine(group)
            self._address = await self._started(
                self._engine.start.remote(config.engine, group, resources, _listen_address(host), await self._peers())
            )
        except Exception as error:
            starting.cancel()
            await self._tell_failure(error)
            raise
        starting.cancel()
        info = self._address.info
        self._model = self._model._replace(limits=ModelLimits(info.max_model_len, info.vocab_size))
        self._load = self._said = Load(0, 0, 0.0)
        self._dead: str | None = None
        self._draining = False
        await self._report()
        self._reporter = asyncio.get_running_loop().create_task(self._keep_reporting())
        logger.info("%s is ready: engine %s, %s", self._model.name, self._engine_id, self._address.info)

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What QueuePolicy scales by."""
        before, self._said = self._said, self._load
        return Demand.of(self._load, self._capacity, since=before).stats()

    async def awake(self) -> None:
        """Nothing is done: Serve's autoscaler has counted the call while it waited for this replica (waking.py)."""

    async def __call__(self, request: Request) -> Response:
        """Behind HAProxy Serve opens a port here too. Nobody is led to it."""
        error = HttpError(404, "Models are asked through the HTTP face of their endpoint", code="not_found")
        return Response(error.body(), error.status, media_type="application/json")

    async def __del__(self) -> None:
        """Take no new requests, let the live ones end, then stop the engine and its workers."""
        self._draining = True
        if self._reporter is None:
            return  # The engine never became ready; what there is of it ends with this process.
        self._reporter.cancel()
        try:
            async with asyncio.timeout(self._config.drain_timeout_s + _STOP_S):
                if self._dead is None:
                    await self._report()
                    await self._drained()
                await self._directory.ask(lambda directory: directory.remove.remote(self._engine_id))
                if self._dead is None:
                    await self._engine.stop.remote("the replica's drain is over")
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("engine %s ended before its drain did: %s", self._engine_id, error)
        finally:
            ray.kill(self._engine)

    def _make_engine(self, group: PlacementGroup) -> Any:
        """The engine's actor, in the replica's own bundle."""
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        return (
            ray.remote(EngineActor)
            .options(
                num_cpus=ENGINE_CPUS,
                scheduling_strategy=strategy,
                max_concurrency=8,
                max_restarts=0,
                name=engine_name(self._engine_id),
                namespace=NAMESPACE,
            )
            .remote()
        )

    async def _started(self, starting: ray.ObjectRef[EngineAddress]) -> EngineAddress:
        """The engine's address once it is ready, which may take minutes: its executor has a limit for its workers.
        Raises what the start has raised, and EngineDeadError where the engine's process hangs meanwhile."""
        await self._engine.answer.remote()  # The process is there.
        address: asyncio.Future[EngineAddress] = asyncio.wrap_future(starting.future())
        while not address.done():
            await self._answered(self._engine.answer.remote())
            await asyncio.wait([address], timeout=REPORT_EVERY_S)
        return address.result()

    async def _answered(self, asked: Awaitable[_T]) -> _T:
        """What the engine says. Raises EngineDeadError where its process hangs, and what it raises itself."""
        try:
            async with asyncio.timeout(_STALE_AFTER_S):
                return await asked
        except TimeoutError:
            limit = f"{_STALE_AFTER_S:g} s"
            raise EngineDeadError(f"the engine hangs: its process has not answered for {limit}") from None

    async def _peers(self) -> list[Any]:
        """The workers of a replica that serves the model already, where the weights may come from one."""
        load = self._config.engine.load
        if not load.from_peer:
            return []
        return await find_peers(self._directory, self._model.name, limit_s=load.peer_timeout_s)

    async def _drained(self) -> None:
        deadline = time.monotonic() + self._config.drain_timeout_s
        # Ingresses learn of the drain within one report; a request already on its way must not meet a closed door.
        await asyncio.sleep(REPORT_EVERY_S / 2)
        while time.monotonic() < deadline and await self._engine.num_live.remote():
            await asyncio.sleep(0.1)

    async def _keep_known(self) -> None:
        """Tell the Directory of the model from the start, so that requests are asked to come back."""
        while True:
            try:
                await self._directory.ask(lambda directory: directory.know.remote(self._model))
            except (ray.exceptions.RayError, ValueError) as error:
                logger.warning("model %s could not be reported: %s", self._model.name, error)
            await asyncio.sleep(REPORT_EVERY_S)

    async def _tell_failure(self, error: Exception) -> None:
        """Tell those who ask for the model why it did not start. Serve tries again."""
        entry = self._model._replace(failure=StartFailure(cause([str(error)]), time.time()))
        try:
            await self._directory.ask(lambda directory: directory.know.remote(entry))
        except (ray.exceptions.RayError, ValueError) as lost:
            logger.warning("why model %s did not start could not be reported: %s", entry.name, lost)

    async def _keep_reporting(self) -> None:
        while self._dead is None:
            await asyncio.sleep(REPORT_EVERY_S)
            try:
                self._load = await self._answered(self._engine.load.remote())
                await self._report()
            except EngineDeadError as error:
                self._dead = str(error)
            except ray.exceptions.RayActorError as error:
                await self._engine_may_be_dead(error)
            except (ray.exceptions.RayError, ValueError) as error:
                logger.warning("engine %s could not be reported: %s", self._engine_id, error)
        logger.error("engine %s is dead: %s", self._engine_id, self._dead)
        # One that hangs still has its connections: its clients learn of its end by theirs.
        ray.kill(self._engine)
        await self._directory.ask(lambda directory: directory.remove.remote(self._engine_id))

    async def _engine_may_be_dead(self, error: ray.exceptions.RayActorError) -> None:
        """Tell the engine's death from the Directory's, which is only made again."""
        try:
            await self._engine.num_live.remote()
        except ray.exceptions.RayActorError:
            self._dead = f"the engine actor has died: {error}"

    async def _report(self) -> None:
        entry = EngineEntry(
            engine_id=self._engine_id,
            model=self._model,
            node_id=ray.get_runtime_context().get_node_id(),
            address=self._address.address,
            public_key=self._address.public_key,
            state="draining" if self._draining else "ready",
            load=self._load,
            prefixes=self._address.prefixes,
        )
        client_key = await self._directory.ask(lambda directory: directory.client_key.remote())
        if client_key not in self._allowed:
            await self._engine.allow.remote(client_key)
            self._allowed.add(client_key)
        stats = await self._stats()
        self._stat_loggers.record(stats)
        self._ray_metrics.show(families_of(engine_metrics([stats])))
        await self._directory.ask(lambda directory: directory.report.remote(entry, stats))

    async def _stats(self) -> EngineStats:
        """For /metrics."""
        return EngineStats(
            self._model.name,
            self._engine_id,
            self._load,
            info=self._address.info,
            prefix_caching=self._config.engine.cache.prefix_caching,
            measures=await self._engine.measures.remote(),
        )


def _listen_address(host: str) -> str:
    """The address of `channel_host`: "loopback", or "node" for the node's own."""
    return "127.0.0.1" if host == "loopback" else ray.util.get_node_ip_address()
