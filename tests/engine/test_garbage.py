"""No search for garbage goes through more than the young while an engine steps."""

from __future__ import annotations

import gc

from raylm import garbage
from raylm.core.sampling import SamplingParams
from tests.support.engines import make_engine, run_to_end
from tests.support.fakes import FakeExecutor


def test_steps_of_many_rows_bring_no_search_of_more_than_the_young():
    before = gc.get_threshold()
    engine = make_engine(FakeExecutor(num_blocks=4000, max_model_len=100), budget=1024, max_num_seqs=256)
    garbage.set_apart()
    try:
        searches = _searches(engine)
    finally:
        garbage.take_back()
    assert gc.get_threshold() == before
    assert set(searches) <= {0}
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
