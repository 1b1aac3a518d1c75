"""Engines without a model, for everything around engines: real Serve, Directory, channel, scheduler and cache; a step
takes as long as a cost model says, or no time at all.

A Serve application beside the HTTP face: `import_path: tests.support.paced:build_paced`, and in `args`, next to what a
model takes, `cost` (see sim/cost.py; "0" costs nothing), `num_blocks` and `start_s`, the seconds that a start takes.
Every token says its position, so a text with a token twice or missing differs from another's.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.serve import Application

from raylm.config.application import ModelDeployment, load_model
from raylm.config.resolve import ResolvedEngine, resolve
from raylm.core.control import WorkerControl
from raylm.core.rows import RowCounts
from raylm.core.step import CacheLayout, ModelInfo, Sampled, StepPlan
from raylm.core.structure import StructuredOutput
from raylm.engine import actor
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.serving.app import channel_host, deployment_options
from raylm.serving.directory import NAMESPACE
from raylm.serving.peers import engine_name
from raylm.serving.replica import ModelReplica
from raylm.sim.cost import DeviceCost, parse_cost
from raylm.stacks import ProcessStacks
from tests.support.paced_config import position_token

_ONE_CPU = {"CPU": 1.0}


class Pace(NamedTuple):
    """What a paced engine takes."""

    cost: DeviceCost
    num_blocks: int
    start_s: float


class PacedExecutor:
    """Steps that take their time and compute nothing: the token at position p is position_token(p)."""

    def __init__(self, config: ResolvedEngine, pace: Pace) -> None:
        self.config = config
        self.workers: list[Any] = []
        self._pace = pace
        arch = ArchConfig.from_source(locate(config.model.reference))
        self._info = ModelInfo(
            num_blocks=pace.num_blocks,
            num_host_blocks=0,
            layout=CacheLayout(config.cache.block_size, [0]),
            block_bytes=0,
            prefill_tokens_per_s=0.0,
            swap_bytes_per_s=0.0,
            max_model_len=config.model.max_model_len or arch.max_position,
            vocab_size=arch.vocab_size,
            eos_token_ids=[],
            device="none",
            dtype="none",
            cache_dtype="none",
            phases={"start": pace.start_s},
        )
        self.patience_s = config.runtime.step_timeout_s
        self._rows = RowCounts()
        self._done: deque[tuple[float, Sampled]] = deque()
        self._free_at = 0.0

    def start(self) -> ModelInfo:
        time.sleep(self._pace.start_s)
        return self._info

    def prepare(self, structure: StructuredOutput) -> None:
        """Grammars mean nothing here."""

    def submit(self, plan: StepPlan) -> None:
        prefill = decode = context = 0
        tokens = []
        for step in self._rows.take(plan):
            context += step.end
            if step.num_tokens == 1:
                decode += 1
            else:
                prefill += step.num_tokens
            if step.samples:
                tokens.append(position_token(step.end))
        self._free_at = max(self._free_at, time.monotonic()) + self._pace.cost.seconds(prefill, decode, context)
        self._done.append((self._free_at, Sampled(plan.step, tokens)))

    @property
    def done(self) -> bool:
        return time.monotonic() >= self._done[0][0]

    def result(self) -> Sampled:
        at, result = self._done.popleft()
        if (wait := at - time.monotonic()) > 0:
            time.sleep(wait)
        return result

    def control(self, op: WorkerControl) -> list[str]:
        return []

    def stacks(self, limit_s: float) -> list[ProcessStacks]:
        return []

    def check(self) -> None:
        """There are no workers."""

    def shutdown(self) -> None:
        self._done.clear()


class PacedEngine(actor.EngineActor):
    """An EngineActor whose engine has no workers."""

    def __init__(self, pace: Pace) -> None:
        # In this process there is no other engine.
        actor.ray_executor = lambda config, **_: PacedExecutor(resolve(config, "cpu"), pace)


class PacedReplica(ModelReplica):
    """A ModelReplica with such an engine."""

    async def __init__(self, config: ModelDeployment, pace: Pace, host: str) -> None:  # type: ignore[misc]
        self._pace = pace
        await super().__init__(config, _ONE_CPU, host)

    def _make_engine(self, group: object) -> Any:
        options = {"name": engine_name(self._engine_id), "namespace": NAMESPACE, "num_cpus": 0, "max_concurrency": 8}
        return ray.remote(PacedEngine).options(**options).remote(self._pace)


def build_paced(args: dict[str, Any]) -> Application:
    """One paced model."""
    args = dict(args)
    cost = args.pop("cost", "0")
    pace = Pace(
        DeviceCost(0.0, 0.0, 0.0, 0.0) if cost == "0" else parse_cost(cost),
        args.pop("num_blocks", 4096),
        args.pop("start_s", 0.0),
    )
    config = load_model(args, source="args of a paced model")
    options = deployment_options(config) | {"ray_actor_options": {"num_cpus": 0}}
    return serve.deployment(PacedReplica).options(**options).bind(config, pace, channel_host(config.channel_host))
