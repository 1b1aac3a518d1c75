"""While an engine steps, the garbage collector looks at the youngest generation alone."""

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
    monkeypatch.setattr(garbage, "_HELD", {})
    gc.set_threshold(*PYTHONS)
    gc.collect()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("nothing_apart")
def test_steps_of_many_rows_collect_the_youngest_generation_alone() -> None:
    engine = make_engine(FakeExecutor(num_blocks=4000, max_model_len=100), budget=1024, max_num_seqs=256)
    first, second = garbage.set_apart(), garbage.set_apart()
    first.take_back()
    first.take_back()
    assert set(_collections(engine)) <= {0}, "one of two models is still there"
    second.take_back()
    assert gc.get_threshold() == PYTHONS
    assert 1 in _collections(engine), "Python's own thresholds collect others"


def _collections(engine) -> list[int]:
    """The generations that were collected while 256 requests got 50 tokens each."""
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
