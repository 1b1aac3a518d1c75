"""Real workers in processes of their own, without Ray: what ranks compute is tested with one start of the processes."""

from __future__ import annotations

import gc
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

from raylm.config.resolve import ResolvedEngine
from raylm.core.control import WorkerControl
from raylm.core.step import ModelInfo, Sampled, StepPlan
from raylm.core.structure import StructuredOutput
from raylm.errors import EngineDeadError
from raylm.executor.step_channel import PlanReceiver, PlanSender, StepAddress, serve
from raylm.parallel.groups import MeetingPoint, Seat
from tests.support.spawned import process_context

_TIMEOUT_S = 60


class _Job(NamedTuple):
    config: ResolvedEngine
    seat: Seat
    address: StepAddress
    answers: bool


def _work(control: Connection) -> None:
    """One rank: a model after the other, until told to stop."""
    import torch.distributed as dist

    from raylm.worker.worker import Worker

    warnings.simplefilter("error")
    while (job := control.recv()) is not None:
        channel = PlanReceiver(job.address, answers=job.answers)
        try:
            worker = Worker(job.config, seat=job.seat, progress=False)
            control.send(worker.start())
            serve(channel, worker.submit, worker.control)
        except Exception as error:
            control.send(error)
            channel.fail(error)
        finally:
            channel.close()
            # CUDA graphs that hold collectives must go before the groups of these.
            worker = None
            gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()
        control.send("ended")


class RankPool:
    """Processes that wait for models to run."""

    def __init__(self, size: int) -> None:
        context = process_context()
        self.controls: list[Connection] = []
        self._processes = []
        for _ in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            self.controls.append(mine)
            self._processes.append(process)

    def close(self) -> None:
        for control in self.controls:
            control.send(None)
        for process in self._processes:
            process.join(_TIMEOUT_S)
            assert process.exitcode == 0


class ProcessExecutor:
    """An Executor over the first ranks of a pool."""

    def __init__(self, pool: RankPool, config: ResolvedEngine) -> None:
        self._config = config
        self._controls = pool.controls[: config.parallel.num_workers]
        self._sender = PlanSender([None] * len(self._controls))
        self._meeting = MeetingPoint("127.0.0.1", timeout_s=_TIMEOUT_S)
        self.plans: deque[StepPlan] = deque()

    def start(self) -> ModelInfo:
        answering = len(self._controls) - self._config.parallel.tensor
        for rank, (control, address) in enumerate(zip(self._controls, self._sender.addresses, strict=True)):
            seat = Seat(rank, "127.0.0.1", self._meeting.address, gpu=rank)
            control.send(_Job(self._config, seat, address, rank == answering))
        infos = [_received(control) for control in self._controls]
        if failed := [info for info in infos if isinstance(info, Exception)]:
            self.shutdown()
            raise failed[0]
        assert all(info.layout == infos[0].layout and info.num_blocks == infos[0].num_blocks for info in infos)
        return infos[answering]

    def prepare(self, structure: StructuredOutput) -> None:
        """Rows with a grammar wait for it in their first step."""

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._sender.send(plan)

    @property
    def done(self) -> bool:
        return self._sender.has_result()

    def result(self) -> Sampled:
        result = self._sender.receive(_TIMEOUT_S * 1000)
        if result is None:
            raise EngineDeadError("no result")
        return result

    def control(self, op: WorkerControl) -> list[str]:
        return self._sender.tell(op, look=self.check, deadline=time.monotonic() + _TIMEOUT_S)

    def check(self) -> None:
        """Whoever asks looks at the results."""

    def shutdown(self) -> None:
        self._sender.close()
        for control in self._controls:
            while _received(control) != "ended":
                pass
        self._controls = []


@contextmanager
def rank_pool(size: int) -> Iterator[RankPool]:
    pool = RankPool(size)
    yield pool
    pool.close()


def _received(control: Connection) -> object:
    assert control.poll(_TIMEOUT_S), "a rank hangs"
    return control.recv()
