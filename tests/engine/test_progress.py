"""An engine gets on with every step it finishes, and where it has nothing to do; else its time runs."""

from __future__ import annotations

import pytest

from raylm.core.sampling import SamplingParams
from raylm.core.structure import StructuredOutput
from raylm.engine.actor import check_progress
from raylm.errors import EngineDeadError
from tests.support.engines import make_engine
from tests.support.fakes import FakeExecutor

ENDLESS = SamplingParams(max_tokens=50, ignore_eos=True)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(FakeExecutor):
    """Every step takes nine seconds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def result(self):
        self._clock.now += 9.0
        return super().result()


@pytest.mark.parametrize("window", [1, 2])
def test_a_saturated_engine_gets_on_with_every_step(window: int) -> None:
    clock = Clock()
    engine = make_engine(Slow(clock), window=window, clock=clock)
    for name in range(30):
        engine.add([str(name)], [1, 2, 3], ENDLESS)
    for _ in range(40):
        engine.step()
        assert engine.has_work and engine.stalled_s == 0.0
    assert clock.now == 360.0


def test_an_idle_engine_gets_on() -> None:
    clock = Clock()
    engine = make_engine(FakeExecutor(), clock=clock)
    clock.now = 1000.0
    engine.step()
    assert engine.stalled_s == 0.0


def test_time_runs_from_the_last_step_for_an_engine_with_work() -> None:
    clock = Clock()
    engine = make_engine(FakeExecutor(), clock=clock)
    engine.add(["a"], [1, 2, 3], ENDLESS)
    engine.step()
    clock.now = 31.0
    assert engine.stalled_s == 31.0
    engine.step()
    assert engine.stalled_s == 0.0


def test_a_request_that_is_held_for_its_grammar_is_no_hang() -> None:
    class Never:
        def wait(self, seconds: float) -> bool:
            return False

    class Compiling(FakeExecutor):
        def prepare(self, structure: StructuredOutput) -> Never:
            return Never()

    clock = Clock()
    engine = make_engine(Compiling(), clock=clock)
    engine.add(["a"], [1, 2, 3], SamplingParams(structure=StructuredOutput("grammar", 'root ::= "a"')))
    for _ in range(3):
        clock.now += 500.0
        assert engine.step() == [] and engine.has_work
        assert engine.stalled_s == 0.0


def test_work_that_nothing_is_planned_for_counts_as_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that went astray must not spin for ever."""
    clock = Clock()
    engine = make_engine(FakeExecutor(), clock=clock)
    engine.add(["a"], [1, 2, 3], ENDLESS)
    monkeypatch.setattr(engine._scheduler, "schedule", lambda now: None)
    for _ in range(10):
        clock.now += 10.0
        engine.step()
    assert engine.stalled_s == 100.0


def test_who_has_not_got_on_for_longer_than_workers_may_take_is_dead() -> None:
    check_progress(29.0, 10.0)
    with pytest.raises(EngineDeadError, match=r"the engine hangs: it has had work for 31 s .* \(limit 30 s\)"):
        check_progress(31.0, 10.0)
    check_progress(31.0, 60.0)
