"""EngineActor: Ray's face of the engine. Ray carries control only; requests and tokens go through the channel."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from raylm import garbage, log
from raylm.config.engine import EngineConfig
from raylm.config.resolve import followed
from raylm.core.block_hash import PrefixForm
from raylm.core.load import Load
from raylm.core.measures import EngineMeasures
from raylm.core.step import ModelInfo
from raylm.engine.factory import engine_over, ray_executor
from raylm.engine.kv_publisher import KVPublisher
from raylm.engine.server import EngineServer
from raylm.errors import EngineDeadError
from raylm.stacks import ProcessStacks, stacks_here

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from raylm.executor.placement import Bundle

logger = log.get_logger(__name__)

_LAST_STEP_S = 5.0
"""How long the step in hand may take when the engine is stopped."""


_TURN_S = 20.0
"""What a turn of the engine's loop may take besides its step, on a machine with too much to do."""


def check_progress(stalled_s: float, patience_s: float) -> None:
    """Raise EngineDeadError where an engine has not got on for longer than its workers may take. An engine whose
    workers hang finds that itself, at the end of their time."""
    limit_s = patience_s + _TURN_S
    if stalled_s > limit_s:
        raise EngineDeadError(
            f"the engine hangs: it has had work for {stalled_s:.0f} s and finished no step (limit {limit_s:.0f} s)"
        )


def _publisher(config: EngineConfig, info: ModelInfo) -> KVPublisher | None:
    if config.kv_events.endpoint is None:
        return None
    return KVPublisher(
        config.kv_events,
        medium="GPU" if info.device == "cuda" else "CPU",
        block_size=info.layout.block_size,
        num_groups=len(info.layout.windows),
    )


class EngineAddress(NamedTuple):
    """Where a started engine listens, and what it serves."""

    address: str
    public_key: bytes
    info: ModelInfo
    prefixes: PrefixForm | None


class EngineActor:
    """Owns the engine, its workers and the thread that drives them. Imports no torch."""

    def answer(self) -> None:
        """Show that this process gets on, whatever it starts meanwhile in another thread."""

    def start(
        self, config: EngineConfig, group: PlacementGroup, resources: Bundle, host: str, peers: Sequence[Any] = ()
    ) -> EngineAddress:
        """Load the model in worker actors and start serving on `host`; first of all, and once. `peers`: the workers of
        another engine, to get the weights from. Raises ConfigError, EngineDeadError."""
        log.configure(form=config.runtime.log_format)
        begin = time.monotonic()
        self._executor = ray_executor(followed(config), group=group, resources=resources, peers=peers)
        self._engine = engine_over(self._executor)
        self._server = EngineServer(self._engine, host=host, publisher=_publisher(config, self._engine.info))
        garbage.set_apart()
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="raylm-engine", daemon=True)
        self._thread.start()
        logger.info("engine started in %s", log.parts(time.monotonic() - begin, self._engine.info.phases))
        return EngineAddress(self._server.address, self._server.public_key, self._engine.info, self._engine.prefix_form)

    def workers(self) -> list[Any]:
        """Handles of the workers, by rank: for another engine, which may get its weights from them."""
        return self._executor.workers

    def allow(self, public_key: bytes) -> None:
        """Let clients with this CURVE key connect."""
        self._server.clients.allow(public_key)

    def load(self) -> Load:
        """How busy the engine is. Raises EngineDeadError when it has stopped, and when its thread hangs: it has work
        and finishes no step, however long its workers may take."""
        if not self._thread.is_alive():
            raise EngineDeadError(self._error or "the engine has stopped")
        check_progress(self._engine.stalled_s, self._executor.patience_s)
        return self._server.load()

    def stacks(self, process: str, limit_s: float) -> list[ProcessStacks]:
        """What this process, as `process`, and the workers do now; each worker has `limit_s` to answer."""
        of_workers = [each._replace(process=f"{each.process}, {process}") for each in self._executor.stacks(limit_s)]
        return [stacks_here(process), *of_workers]

    def measures(self) -> EngineMeasures:
        """What the engine has measured since its start."""
        return self._server.measures()

    def num_live(self) -> int:
        """Requests taken and not ended: 0 means that a drain is over."""
        return self._server.num_live if self._thread.is_alive() else 0

    def stop(self, reason: str) -> None:
        """Stop after the step in hand and give back the workers; requests that live get an error with the reason.

        A step that hangs is not waited for: the actor is killed next, and its workers end with it.
        """
        self._server.stop(reason)
        self._thread.join(_LAST_STEP_S)

    def _run(self) -> None:
        try:
            self._server.run()
        except Exception as error:
            self._error = str(error)
