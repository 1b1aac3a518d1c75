"""Plans out, results back, small and in order."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from raylm.core.control import StartProfile, StopProfile
from raylm.core.sampling import SamplingParams
from raylm.core.step import (
    Candidates,
    Copies,
    Drafts,
    Logprobs,
    NewBlocks,
    NewRow,
    RowSampling,
    Sampled,
    StepPlan,
)
from raylm.errors import EngineDeadError
from raylm.executor import step_channel
from raylm.executor.step_channel import PlanReceiver, PlanSender, StepAddress, serve

LOGPROBS = Logprobs([-0.5], [2], [[7, 1]], [[-0.25, -0.5]])
SAMPLING = RowSampling(SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05), 2**62, 3)


def worker(address: StepAddress, step, control=lambda op: "") -> threading.Thread:
    def loop() -> None:
        channel = PlanReceiver(address)
        try:
            serve(channel, step, control)
        except Exception as error:
            channel.fail(error)
        finally:
            channel.close()

    thread = threading.Thread(target=loop)
    thread.start()
    return thread


class Step:
    """A step that is done when it is let."""

    def __init__(self, result: Sampled, *, done: bool = True) -> None:
        self.done = done
        self._result = result

    def result(self) -> Sampled:
        return self._result


def result_of(plan: StepPlan) -> Sampled:
    """A token for each row, and candidates for each chosen one."""
    candidates = [Candidates([token, 3], [-0.25, -1.5]) for _, token in plan.chosen]
    return Sampled(plan.step, [plan.step] * len(plan.rows), [], [(0, LOGPROBS)], candidates)


def test_plans_and_results_survive_the_trip():
    sender = PlanSender()
    seen = []

    def step(plan: StepPlan) -> Step:
        seen.append(plan)
        return Step(result_of(plan))

    thread = worker(sender.addresses[0], step)
    paying = SAMPLING._replace(params=SamplingParams(repetition_penalty=1.1, logit_bias=((3, 1.5),), stop=("a",)))
    new_rows = [NewRow(0, [1, 2, 3], 0, SAMPLING), NewRow(5, [4, 5, 6], 0, paying)]
    plans = [
        StepPlan(1, new_rows, [NewBlocks(0, 0, 0, [1, 2])], [0], [3]),
        StepPlan(2, [], [NewBlocks(5, 1, 7, [9])], [0, 5], [3, 1], Copies([(1, 0)], [(4, 5), (6, 7)], []), [(5, 17)]),
        StepPlan(3, [], [], [0], [3], None, [], [Drafts(0, 4, [7, 8])], [(0, 4)]),
    ]
    for plan in plans:
        sender.send(plan)
    results = [result_of(plan) for plan in plans]
    assert [sender.receive(60_000) for _ in plans] == results and results[1].candidates
    assert sender.receive(0) is None
    sender.close()
    thread.join(60)
    assert not thread.is_alive()
    assert seen == plans


def test_a_connected_channel_has_nothing_in_the_file_system():
    """So an engine that is killed leaves nothing."""
    sender = PlanSender([None, None])
    folder = Path(sender.addresses[0].address.removeprefix("ipc://")).parent
    assert folder.is_dir()
    threads = [worker(address, lambda plan: Step(result_of(plan))) for address in sender.addresses]
    sender.wait_for_workers(look=lambda: None, deadline=time.monotonic() + 60)
    assert not folder.exists()
    sender.send(StepPlan(1, [], [], [0], [1]))
    assert sender.receive(60_000) == sender.receive(60_000) == Sampled(1, [1], [], [(0, LOGPROBS)])
    sender.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_worker_that_never_connects_is_named():
    sender = PlanSender([None, None])
    thread = worker(sender.addresses[0], lambda plan: Step(result_of(plan)))
    assert sender._sockets[0].poll(60_000, zmq.POLLOUT)
    looked = []
    with pytest.raises(EngineDeadError, match="worker 1 has loaded the model, but cannot reach the engine"):
        sender.wait_for_workers(look=lambda: looked.append(1), deadline=time.monotonic())
    assert looked
    sender.close()
    thread.join(60)


def test_a_failure_names_its_worker():
    def fail(plan: StepPlan) -> Step:
        raise MemoryError("no room")

    sender = PlanSender([None, None])
    threads = [
        worker(address, step)
        for address, step in zip(sender.addresses, (lambda plan: Step(result_of(plan)), fail), strict=True)
    ]
    sender.send(StepPlan(1, [], [], [0], [1]))
    with pytest.raises(EngineDeadError, match="worker 1 of 2 failed in a step: MemoryError: no room"):
        for _ in range(2):
            sender.receive(60_000)
    sender.close()
    for thread in threads:
        thread.join(60)


def test_the_next_plan_is_taken_while_a_step_computes():
    sender = PlanSender()
    steps: list[Step] = []
    arrived = threading.Semaphore(0)

    def step(plan: StepPlan) -> Step:
        steps.append(Step(result_of(plan), done=False))
        arrived.release()
        return steps[-1]

    thread = worker(sender.addresses[0], step)
    plans = [StepPlan(number, [], [], [0], [1]) for number in (1, 2)]
    for plan in plans:
        sender.send(plan)
        assert arrived.acquire(timeout=60), "it waited for the first step's result"
    assert sender.receive(20) is None
    steps[1].done = True
    assert sender.receive(20) is None, "results come in the order of plans"
    steps[0].done = True
    assert [sender.receive(60_000) for _ in plans] == [result_of(plan) for plan in plans]
    sender.close()
    thread.join(60)
    assert not thread.is_alive()


def test_what_workers_are_told_is_done_between_the_plans_before_and_after():
    """By every worker, which has ended all steps that it was given before; the results are not lost."""
    sender = PlanSender([None, None])
    done: list[list[object]] = [[], []]

    def worker_of(rank: int) -> threading.Thread:
        def step(plan: StepPlan) -> Step:
            done[rank].append(plan.step)
            return Step(result_of(plan), done=False)

        def control(op: object) -> str:
            done[rank].append(op)
            return f"rank {rank} has done it"

        return worker(sender.addresses[rank], step, control)

    threads = [worker_of(0), worker_of(1)]
    for number in (1, 2):
        sender.send(StepPlan(number, [], [], [0], [1]))
    order = StartProfile(num_steps=7)
    answers = sender.tell(order, look=lambda: None, deadline=time.monotonic() + 60)
    assert answers == ["rank 0 has done it", "rank 1 has done it"]
    assert done == [[1, 2, order], [1, 2, order]]
    # Both answer here. What came before the order is not lost.
    results = [sender.receive(0) for _ in range(4)]
    assert sorted(result.step for result in results if result is not None) == [1, 1, 2, 2]
    sender.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_worker_that_does_not_do_it_is_named(monkeypatch):
    sender = PlanSender([None, None])
    gate = threading.Event()

    def hang(op: object) -> str:
        gate.wait(60)
        return ""

    answers = lambda plan: Step(result_of(plan))  # noqa: E731
    threads = [worker(sender.addresses[0], answers), worker(sender.addresses[1], answers, hang)]
    # Time is up once the other worker has answered, however long that takes.
    clock = SimpleNamespace(monotonic=lambda: 2.0 if sender._answers else 0.0, sleep=time.sleep)
    monkeypatch.setattr(step_channel, "time", clock)
    with pytest.raises(EngineDeadError, match=r"the workers \[1\] hang: StopProfile was not done in time"):
        sender.tell(StopProfile(), look=lambda: None, deadline=1.0)
    gate.set()
    sender.close()
    for thread in threads:
        thread.join(60)


def test_a_failure_arrives_as_the_engines_death():
    sender = PlanSender()

    def step(plan: StepPlan) -> Step:
        raise ValueError("no memory for 7 blocks")

    thread = worker(sender.addresses[0], step)
    sender.send(StepPlan(1, [], [], [0], [1]))
    with pytest.raises(EngineDeadError, match="ValueError: no memory for 7 blocks"):
        sender.receive(60_000)
    thread.join(60)
    sender.close()
    sender.close()


def test_a_decode_step_of_512_requests_is_small():
    rows = list(range(512))
    plan = StepPlan(10**6, [], [NewBlocks(row, 0, 99, [row]) for row in rows[::16]], rows, [1] * 512)
    assert len(msgspec.msgpack.encode(plan)) < 8 * 1024
    new = [NewRow(row, [50_000] * 16, 0, SAMPLING) for row in rows]
    # A new row brings all of its request's sampling by name, once: some 500 bytes.
    assert len(msgspec.msgpack.encode(plan._replace(new_rows=new))) < 300 * 1024
