"""How long a plan waits for requests that are still to come."""

from __future__ import annotations

import pytest

from raylm.core.sampling import SamplingParams
from raylm.core.step import Sampled, StepPlan
from tests.support.channel_fakes import OPTIONS, Served, until
from tests.support.engines import make_engine
from tests.support.fakes import FakeExecutor

STEP_S = 0.010
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


class Timed(FakeExecutor):
    """Every step takes 10 ms of a clock that goes on when a result is asked for."""

    def __init__(self, *, num_blocks: int = 400, max_model_len: int = 400) -> None:
        super().__init__(num_blocks=num_blocks, max_model_len=max_model_len)
        self.now = 0.0
        self.is_done = False
        self.num_looks = 0
        """Since the last plan: how often somebody asked whether the step is done."""
        self.num_rows: list[int] = []
        """Of each plan."""

    @property
    def done(self) -> bool:
        self.num_looks += 1
        return self.is_done

    def submit(self, plan: StepPlan) -> None:
        self.num_rows.append(len(plan.rows))
        self.num_looks = 0
        super().submit(plan)

    def result(self) -> Sampled:
        self.now += STEP_S
        return super().result()


def decoding(executor: Timed, *, window: int = 2, **options):
    """An engine with a request that decodes, at the moment in which a step of it has begun."""
    engine = make_engine(executor, window=window, clock=lambda: executor.now, **options)
    engine.add(["a"], [1, 2, 3], ENDLESS)
    for _ in range(4):
        engine.step()
    return engine


def test_a_plan_waits_for_most_of_a_step() -> None:
    executor = Timed()
    engine = decoding(executor)
    assert engine.delay_s == pytest.approx(0.9 * STEP_S - 0.002)
    executor.now += 0.006
    assert engine.delay_s == pytest.approx(0.001)
    executor.is_done = True
    assert engine.delay_s == 0.0, "the device has nothing to do"


def test_a_plan_waits_for_more_requests_while_there_is_room() -> None:
    engine = decoding(Timed())
    engine.add(["b"], [4, 5], ENDLESS)
    assert engine.delay_s > 0


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({"max_num_seqs": 2}, [4, 5]),
        ({"budget": 16}, list(range(1, 17))),
        ({"window": 1}, [4, 5]),
        ({"num_stages": 2}, [4, 5]),
    ],
    ids=["rows", "tokens", "window", "stages"],
)
def test_no_plan_waits_where_none_could_join(options: dict[str, int], prompt: list[int]) -> None:
    engine = decoding(Timed(), **options)
    engine.add(["b"], prompt, ENDLESS)
    assert engine.delay_s <= 0


def test_no_plan_waits_while_preempted_requests_do() -> None:
    executor = Timed(num_blocks=7, max_model_len=20)
    engine = make_engine(executor, window=2, clock=lambda: executor.now)
    for name in "abc":
        engine.add([name], [1, 2, 3, 4], ENDLESS)
    while not engine.stats().num_preemptions:
        engine.step()
    assert engine.stats().waiting and engine.delay_s <= 0


async def test_a_request_that_comes_while_a_plan_waits_is_in_it() -> None:
    executor = Timed()
    executor.is_done = True
    served = Served(executor, clock=lambda: executor.now)
    client = served.client()
    first = client.generate(["a"], [1, 2, 3], ENDLESS, OPTIONS)
    await anext(first)
    executor.is_done = False
    # From here on the clock stands still in a step, and the server looks again and again whether it is done.
    await until(lambda: executor.num_looks > 3)
    num_plans = len(executor.num_rows)
    second = client.generate(["b"], [4, 5], SamplingParams(temperature=0, max_tokens=1), OPTIONS)
    await until(lambda: served.engine.stats().waiting == 1)
    assert len(executor.num_rows) == num_plans
    executor.is_done = True
    assert len((await anext(second)).token_ids) == 1
    assert executor.num_rows[num_plans] == 2
    await first.aclose()
    await client.close()
    served.stop()
