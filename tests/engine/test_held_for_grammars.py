"""A request whose grammar is being compiled waits outside of the queue, and others get their tokens meanwhile."""

from __future__ import annotations

import pytest

from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.step import TokenDelta
from raylm.core.structure import StructuredOutput
from raylm.engine.engine import Engine
from raylm.errors import Overloaded, RequestRejected
from tests.support.engines import make_engine
from tests.support.fakes import FakeExecutor

FREE = SamplingParams(max_tokens=5, ignore_eos=True)
FORM = StructuredOutput("grammar", 'root ::= "a"')
HELD = SamplingParams(max_tokens=5, structure=FORM)


class Preparation:
    """Done when the test says so."""

    def __init__(self) -> None:
        self.done = False
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return self.done


class Compiling(FakeExecutor):
    """Workers that take their time to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.preparations: list[Preparation] = []

    def prepare(self, structure: StructuredOutput) -> Preparation:
        assert structure == FORM
        self.preparations.append(Preparation())
        return self.preparations[-1]


@pytest.fixture
def executor() -> Compiling:
    return Compiling()


@pytest.fixture
def engine(executor: Compiling) -> Engine:
    return make_engine(executor, queue=3)


def run(engine: Engine, steps: int) -> list[TokenDelta]:
    return [delta for _ in range(steps) for delta in engine.step()]


def finish(engine: Engine) -> dict[str, int]:
    """Tokens of each request, until nothing is left to do."""
    found: dict[str, int] = {}
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id] = found.get(delta.request_id, 0) + len(delta.token_ids)
    return found


def test_others_go_on_while_a_grammar_is_compiled(engine: Engine, executor: Compiling) -> None:
    engine.add(["form", "twin"], [5, 6], HELD)
    engine.add(["free"], [5], FREE)
    assert {delta.request_id for delta in run(engine, 12)} == {"free"}
    assert engine.has_work and engine.stats().waiting == 2
    assert run(engine, 1) == [] and executor.preparations[0].waits[-1] > 0, "nothing to do: it waits, and does not spin"
    executor.preparations[0].done = True
    assert set(finish(engine)) == {"form", "twin"}


def test_requests_that_wait_for_equal_grammars_ask_once(engine: Engine, executor: Compiling) -> None:
    for name in "abc":
        engine.add([name], [5], HELD)
    assert len(executor.preparations) == 1
    assert run(engine, 3) == []
    executor.preparations[0].done = True
    assert set(finish(engine)) == set("abc")


def test_the_workers_are_asked_again_for_a_grammar_that_they_may_have_dropped(
    engine: Engine, executor: Compiling
) -> None:
    engine.add(["first"], [5], HELD)
    executor.preparations[0].done = True
    finish(engine)
    engine.add(["second"], [5], HELD)
    assert run(engine, 3) == [] and engine.has_work, "its first step would wait for a grammar"
    executor.preparations[1].done = True
    assert set(finish(engine)) == {"second"}


def test_a_grammar_that_the_workers_keep_is_not_waited_for() -> None:
    class Kept(FakeExecutor):
        def prepare(self, structure: StructuredOutput) -> Preparation:
            preparation = Preparation()
            preparation.done = True
            return preparation

    engine = make_engine(Kept())
    engine.add(["a"], [5], HELD)
    assert {delta.request_id for delta in run(engine, 1)} == {"a"}


def test_a_held_request_can_be_aborted(engine: Engine, executor: Compiling) -> None:
    engine.add(["gone"], [5], HELD)
    assert engine.abort("gone") is not None
    assert not engine.has_work
    executor.preparations[0].done = True
    engine.add(["next"], [5], FREE)
    assert set(finish(engine)) == {"next"}


def test_a_held_request_counts_in_the_queue(engine: Engine, executor: Compiling) -> None:
    for name in "abc":
        engine.add([name], [5], HELD)
    with pytest.raises(Overloaded):
        engine.add(["d"], [5], FREE)
    for preparation in executor.preparations:
        preparation.done = True
    assert set(finish(engine)) == set("abc")
    engine.add(["d"], [5], FREE)


def test_the_time_of_a_held_request_runs(executor: Compiling) -> None:
    now = [0.0]
    engine = make_engine(executor, clock=lambda: now[0])
    engine.add(["late"], [5], HELD, RequestOptions(queue_timeout_s=2.0))
    now[0] = 3.0
    (delta,) = engine.step()
    assert (delta.request_id, delta.finish_reason) == ("late", "deadline")
    executor.preparations[0].done = True
    assert engine.step() == [] and not engine.has_work


def test_a_structure_that_is_no_grammar_yet_is_refused(engine: Engine) -> None:
    schema = SamplingParams(structure=StructuredOutput("json_schema", "{}"))
    with pytest.raises(RequestRejected, match="grammar first"):
        engine.add(["a"], [5], schema)
