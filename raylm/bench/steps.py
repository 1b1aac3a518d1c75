"""What the step channel costs: plans to workers that compute nothing, or for a given time, and their results back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from statistics import median
from time import perf_counter

from raylm.bench.report import StepsResult
from raylm.core.rows import decode_plan, prompt_plan
from raylm.core.sampling import SamplingParams
from raylm.core.step import CacheLayout, NewBlocks, RowSampling, Sampled, StepPlan
from raylm.errors import ConfigError, RaylmError
from raylm.executor.step_channel import PlanReceiver, PlanSender, StepAddress, serve

_MAX_WORKERS = 64
_PREFILL_ROWS, _PREFILL_LEN = 8, 1024
_BLOCK_SIZE = 16
_WARM_UP = 20
_TIMEOUT_S = 30.0
_STEP = 1_000_000
"""Number of a plan in an engine that has run for a while: it takes as many bytes."""


def decodes(rows: int) -> StepPlan:
    """A plan in which `rows` requests decode and one in sixteen of them begins a block."""
    blocks = [NewBlocks(row, 0, 30, [1000 + row]) for row in range(0, rows, _BLOCK_SIZE)]
    return decode_plan(_STEP, range(rows), blocks)


def prefill() -> StepPlan:
    """A plan with eight new prompts of 1,024 tokens."""
    sampling = RowSampling(SamplingParams(temperature=0.7, top_p=0.9, top_k=40), seed=2**61)
    prompt = [50_000 + i for i in range(_PREFILL_LEN)]
    return prompt_plan(_STEP, [prompt] * _PREFILL_ROWS, sampling, CacheLayout(_BLOCK_SIZE, [0]))


def measure_steps_channel(workers: int, *, device_us: float, steps: int) -> list[StepsResult]:
    """One result a kind of plan, through PlanSender to `workers` processes of this machine.

    A round trip is a plan to workers that answer at once; a step is one of many with two plans in flight to workers
    whose device takes `device_us` microseconds a plan. The trip is a median over `steps`, what is added to a step their
    mean. Raises ConfigError, RaylmError.
    """
    if not 1 <= workers <= _MAX_WORKERS:
        raise ConfigError(f"--workers must be from 1 to {_MAX_WORKERS}, got {workers}")
    plans = {"decode 64": decodes(64), "decode 256": decodes(256), "prefill 8 x 1024": prefill()}
    with_device = _Workers(workers, device_us)
    try:
        steps_us = {name: with_device.us_per_step(plan, steps) for name, plan in plans.items()}
    finally:
        with_device.close()
    at_once = _Workers(workers, 0.0)
    try:
        trips_us = {name: at_once.us_per_trip(plan, steps) for name, plan in plans.items()}
    finally:
        at_once.close()
    return [
        StepsResult("steps", workers, name, trips_us[name], device_us, steps_us[name] - device_us) for name in plans
    ]


class _Workers:
    """Processes at the other ends of one PlanSender; the first of them answers."""

    def __init__(self, count: int, device_us: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._sender = PlanSender([None] * count)
        self._processes = [
            context.Process(target=_work, args=(address, rank == 0, device_us), daemon=True)
            for rank, address in enumerate(self._sender.addresses)
        ]
        for process in self._processes:
            process.start()

    def us_per_trip(self, plan: StepPlan, steps: int) -> float:
        times = [_seconds(lambda: self._trip(plan)) for _ in range(_WARM_UP + steps)]
        return median(times[_WARM_UP:]) * 1e6

    def us_per_step(self, plan: StepPlan, steps: int) -> float:
        self._sender.send(plan)
        for _ in range(_WARM_UP):
            self._trip(plan)
        seconds = _seconds(lambda: [self._trip(plan) for _ in range(steps)])
        self._receive()
        return seconds / steps * 1e6

    def close(self) -> None:
        self._sender.close()
        for process in self._processes:
            process.join(_TIMEOUT_S)
            if process.is_alive():
                process.kill()

    def _trip(self, plan: StepPlan) -> None:
        """Send a plan, take a result: its own, or with two in flight that of the one before."""
        self._sender.send(plan, look=self._look)
        self._receive()

    def _receive(self) -> Sampled:
        deadline = perf_counter() + _TIMEOUT_S
        while (result := self._sender.receive(100)) is None:
            self._look()
            if perf_counter() > deadline:
                raise RaylmError(f"a worker of the benchmark did not answer within {_TIMEOUT_S:g} s")
        return result

    def _look(self) -> None:
        if any(process.exitcode is not None for process in self._processes):
            raise RaylmError("a worker of the benchmark ended; its traceback is above")


class _Step:
    """A plan on a device that runs one after another."""

    def __init__(self, plan: StepPlan, ready: float) -> None:
        self._plan = plan
        self.ready = ready

    @property
    def done(self) -> bool:
        return perf_counter() >= self.ready

    def result(self) -> Sampled:
        return Sampled(self._plan.step, [1] * len(self._plan.rows))


def _work(address: StepAddress, answers: bool, device_us: float) -> None:
    channel = PlanReceiver(address, answers=answers)
    free = 0.0

    def submit(plan: StepPlan) -> _Step:
        nonlocal free
        free = max(free, perf_counter()) + device_us * 1e-6
        return _Step(plan, free)

    try:
        serve(channel, submit, lambda op: "")
    finally:
        channel.close()


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
