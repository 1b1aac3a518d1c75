"""Outcomes: a verdict stays until there is no room; what may pass is forgotten after a minute."""

from __future__ import annotations

from raylm.core.structure import StructuredOutput
from raylm.grammar.frames import Done, Failed
from raylm.grammar.outcomes import Outcomes


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_only_what_may_pass_is_forgotten_with_time() -> None:
    clock = Clock()
    outcomes = Outcomes(1 << 20, clock=clock)
    done, wrong = Done(StructuredOutput("grammar", 'root ::= "a"')), Failed("minItems 3 is over maxItems 2")
    slow = Failed("it takes more than 10 s", is_passing=True)
    for key, answer in ((b"done", done), (b"wrong", wrong), (b"slow", slow)):
        outcomes.put(key, answer)
    clock.now += 59
    assert outcomes.get(b"slow") is slow
    clock.now += 1
    assert outcomes.get(b"slow") is None
    clock.now += 1e6
    assert (outcomes.get(b"done"), outcomes.get(b"wrong")) == (done, wrong)


def test_the_least_recently_used_go_first() -> None:
    outcomes = Outcomes(3 * 300)
    for key in (b"a", b"b", b"c"):
        outcomes.put(key, Failed("x" * 100))
    assert outcomes.get(b"a")
    outcomes.put(b"d", Failed("x" * 100))
    assert [key for key in (b"a", b"b", b"c", b"d") if outcomes.get(key)] == [b"a", b"c", b"d"]


def test_an_outcome_that_comes_again_counts_once() -> None:
    outcomes = Outcomes(3 * 300)
    outcomes.put(b"a", Failed("x" * 100))
    for _ in range(10):
        outcomes.put(b"b", Failed("x" * 100, is_passing=True))
    assert outcomes.get(b"a") and outcomes.get(b"b")
