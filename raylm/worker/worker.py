"""One device, from its start to its end: steps, and what is done between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from raylm.config.resolve import ResolvedEngine
from raylm.core.control import StartProfile, WorkerControl
from raylm.core.step import ModelInfo, Sampled, StepPlan
from raylm.core.structure import StructuredOutput
from raylm.grammar.binding import Compiled
from raylm.grammar.compiled import CompiledGrammars
from raylm.layers.dtypes import dtype_name
from raylm.models.from_peer import Peer, WeightSender
from raylm.parallel.groups import Seat
from raylm.worker import memory, trial
from raylm.worker.building import SamplingParts, build, measure, sampling_grammars, size_cache
from raylm.worker.device import device_of_seat, prepare_device
from raylm.worker.loading import describe, join, load
from raylm.worker.model_runner import ModelRunner
from raylm.worker.pending import PendingStep
from raylm.worker.profiler import StepProfiler
from raylm.worker.sampling.processors import load_processors


class Worker:
    """Owns one device from start to end; every step goes through the one ModelRunner."""

    def __init__(
        self,
        config: ResolvedEngine,
        *,
        seat: Seat | None = None,
        peer: Peer | None = None,
        progress: bool = True,
    ) -> None:
        """`seat`: this worker's place among those that share the model; None for the only one. `peer`: the worker of
        the same place in a live engine, for load.from_peer. Raises ConfigError."""
        self._config = config
        self._seat = seat
        self._peer = peer
        self._progress = progress
        self._device = device_of_seat(config.runtime.device, seat)
        self._processors = load_processors(config.generation.logits_processors)
        self._profiler = StepProfiler(
            config.runtime.profile_folder, rank=0 if seat is None else seat.rank, device=self._device
        )
        self._grammars: CompiledGrammars | None = None
        self._runner: ModelRunner | None = None
        self.weights: WeightSender | None = None
        """What a new replica's worker of this place gets its weights from; with load.from_peer, once they are here."""

    @property
    def overlaps(self) -> bool:
        """Whether a step that was submitted runs while the host does something else."""
        return self._device.type == "cuda"

    def start(self) -> ModelInfo:
        """Load the model and make it ready for its first step. Raises ConfigError."""
        phases = Phases()
        with phases.timed("device"):
            prepare_device(self._config, self._device)
        if self._device.type != "cpu":
            return self._make_ready(phases)
        # OpenMP keeps threads for every thread that computes. With more of them than cores they sleep between two loops
        # instead of waiting awake, which costs a tenth of all tokens, and steps may run in another thread than this. A
        # thread that ends gives its own back.
        with ThreadPoolExecutor(1, "raylm-start") as thread:
            return thread.submit(self._make_ready, phases).result()

    def _make_ready(self, phases: Phases) -> ModelInfo:
        config, device = self._config, self._device
        with phases.timed("device"):
            described = describe(config, device)
            context = join(config, described, device, self._seat)
        with phases.timed("weights"):
            peer, self._peer = self._peer, None
            loaded = load(config, described, context, device, peer=peer, progress=self._progress)
            self.weights = loaded.weights
        with phases.timed("memory"):
            self._grammars = sampling_grammars(config, loaded)
            parts = SamplingParts(self._processors, self._grammars)
            cache = size_cache(config, loaded, parts)
            with memory.out_of_memory(
                device, f"a KV cache of {cache.num_blocks} blocks (cache.num_blocks) did not fit"
            ):
                built = build(config, loaded, parts, cache)
        with phases.timed("warm_up"):
            built.runner.execute(trial.trial_plan(1, 1, cache.groups.layout))
            prefill_speed, swap_speed = measure(config, built, cache, loaded)
        with phases.timed("graphs"):
            built.runner.warm_up_graphs()
        self._runner = built.runner
        return ModelInfo(
            num_blocks=cache.num_blocks,
            num_host_blocks=cache.num_host_blocks,
            layout=cache.groups.layout,
            block_bytes=built.store.block_bytes,
            prefill_tokens_per_s=prefill_speed,
            swap_bytes_per_s=swap_speed,
            max_model_len=cache.max_model_len,
            vocab_size=loaded.arch.vocab_size,
            eos_token_ids=list(loaded.arch.eos_token_ids),
            device=str(device),
            dtype=dtype_name(loaded.dtype),
            cache_dtype=dtype_name(loaded.cache_dtype),
            phases=phases.seconds,
        )

    def prepare(self, structure: StructuredOutput) -> Future[Compiled] | None:
        """Compile a grammar in a thread, ahead of the rows that need it. Called from any thread, after start()."""
        return None if self._grammars is None else self._grammars.get(structure)

    def close(self) -> None:
        """End what runs beside the steps. No step may follow."""
        if self._grammars is not None:
            self._grammars.close()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Run one step; on a GPU, start it."""
        if self._runner is None:
            raise RuntimeError("submit() before start()")
        step = self._runner.submit(plan)
        self._profiler.step_ended()
        return step

    def step(self, plan: StepPlan) -> Sampled:
        """Run one step to its end."""
        return self.submit(plan).result()

    def control(self, op: WorkerControl) -> str:
        """Do it, in the thread that runs the steps, with none of them under way. Returns what was done, for people."""
        if isinstance(op, StartProfile):
            return self._profiler.start(op.num_steps)
        return self._profiler.stop()


class Phases:
    """Seconds of each phase of a start, which may have several parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began
