"""No search for garbage goes through more than the young while an engine steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from raylm import garbage
from raylm.core.sampling import SamplingParams
from tests.support.engines import make_engine, run_to_end
from tests.support.fakes import FakeExecutor

PYTHONS = (700, 10, 10)


@pytest.fixture
def nothing_apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process without a model."""
    before = gc.get_threshold()
    monkeypatch.setattr(garbage.SetApart, "_held", [])
    gc.set_threshold(*PYTHONS)
    gc.collect()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("nothing_apart")
def test_steps_of_many_rows_bring_no_search_of_more_than_the_young() -> None:
    engine = make_engine(FakeExecutor(num_blocks=4000, max_model_len=100), budget=1024, max_num_seqs=256)
    first, second = garbage.SetApart(), garbage.SetApart()
    first.take_back()
    first.take_back()
    assert set(_searches(engine)) <= {0}, "of two models one is still there"
    second.take_back()
    assert gc.get_threshold() == PYTHONS
    assert 1 in _searches(engine), "by Python's own numbers there are"


def _searches(engine) -> list[int]:
    """The generations that were searched while 256 requests got 50 tokens each."""
    found = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    for index in range(256):
        engine.add([str(index)], [index % 50 + 1] * 8, params)
    gc.callbacks.append(note)
    try:
        run_to_end(engine)
    finally:
        gc.callbacks.remove(note)
    return found
