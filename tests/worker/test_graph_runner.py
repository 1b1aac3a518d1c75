"""What a graph replays is what a step computes: with a capture that only notes the function, on a CPU."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raylm import ops
from raylm.core.step import NewBlocks, NewRow, RowSampling
from raylm.worker import graph_runner
from raylm.worker.graph_runner import Capture, GraphRunner, Run, graph_sizes
from raylm.worker.input_batch import StepRows
from raylm.worker.prefix_sharing import PrefixSharing
from raylm.worker.request_table import RequestTable
from tests.support import checkpoints
from tests.worker.rows import CPU, GREEDY, Rig, sampling, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.gemma3(tmp_path_factory.mktemp("gemma3"))


class Noted:
    """A capture that launches the same function again, and counts."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def __call__(self, run: Run) -> Run:
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay


def blocks(rig: Rig, row: int) -> list[NewBlocks]:
    """Room for 16 tokens."""
    groups = range(len(rig.groups.layout.windows))
    return [NewBlocks(row, group, 0, [1 + 12 * row + 4 * group + column for column in range(4)]) for group in groups]


def prompts(rig: Rig, rows: list[int], wanted: RowSampling = GREEDY) -> list[int]:
    result = rig.step(
        {row: 3 + row for row in rows},
        new_rows=[NewRow(row, tokens(3 + row, seed=row + 1), 0, wanted) for row in rows],
        new_blocks=[block for row in rows for block in blocks(rig, row)],
    )
    return result.token_ids


PENALTIES = {"repetition_penalty": 1.6, "frequency_penalty": 0.9, "presence_penalty": 0.4}


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 1.5, "seed": 3}, {"logprobs": 2}, {"num_prompt": 3, **PENALTIES}],
    ids=["greedy", "drawn", "logprobs", "penalties"],
)
def test_a_replay_gives_what_an_eager_step_gives(folder: Path, fields: dict[str, Any]) -> None:
    capture = Noted()
    eager, replayed = Rig(folder, num_blocks=64), Rig(folder, num_blocks=64, capture=capture)
    rows = [2, 0, 3]
    wanted = sampling(**fields)
    assert prompts(eager, rows, wanted) == prompts(replayed, rows, wanted)
    for _ in range(4):
        mine, theirs = (rig.step({row: 1 for row in rows}) for rig in (replayed, eager))
        assert mine.token_ids == theirs.token_ids
        assert len(mine.logprobs) == len(theirs.logprobs) == (3 if "logprobs" in fields else 0)
        for (index, found), (other, expected) in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert (index, found.ranks, found.top_ids) == (other, expected.ranks, expected.top_ids)
            assert found.values == pytest.approx(expected.values, abs=1e-4)
    # Three rows run at the size of four: once eagerly, then through the graph.
    assert (capture.num_captured, capture.num_replayed) == (1, 3)


def test_sizes_take_turns_and_padding_leaves_no_trace(folder: Path) -> None:
    eager, replayed = Rig(folder, num_blocks=64), Rig(folder, num_blocks=64, capture=Noted())
    assert prompts(eager, [0, 1, 2, 3]) == prompts(replayed, [0, 1, 2, 3])
    for rows in ([0, 1, 2], [3], [1, 0], [3, 2, 1], [0], [2, 3], [0, 1, 2]):
        assert replayed.step({row: 1 for row in rows}) == eager.step({row: 1 for row in rows})


def make_runner(table: RequestTable, capture: Capture, *, max_tokens: int, num_drafts: int = 0) -> GraphRunner:
    """Of a model that gives the same whatever it is given, for up to 16 tokens."""
    hidden, logits = torch.ones(16, 8), torch.arange(80.0).view(16, 5)
    return GraphRunner(
        lambda batch, _: hidden[: len(batch.token_ids)],
        lambda given, settings, positions: ops.sample(logits[: len(given)], *settings, positions),
        table,
        lambda rows: [np.zeros(len(rows), dtype) for dtype in (np.float32, np.int64, np.float32, np.float32, np.int64)],
        hidden_size=8,
        dtype=torch.float32,
        begins=True,
        samples=True,
        capture=capture,
        max_tokens=max_tokens,
        num_drafts=num_drafts,
    )


@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 2, "num_prompt": 13}], ids=["plain", "prompt_logprobs"])
def test_prompts_and_chunks_beside_decodes_go_through_graphs(folder: Path, fields: dict[str, Any]) -> None:
    capture = Noted()
    eager, replayed = Rig(folder, num_blocks=64), Rig(folder, num_blocks=64, capture=capture)
    assert prompts(eager, [0]) == prompts(replayed, [0])
    for number in range(3):
        new = NewRow(1, tokens(13, seed=number), 0, sampling(**fields))
        found, expected = [], []
        for rig, results in ((replayed, found), (eager, expected)):
            # A token of the prompt, which samples nothing, two chunks beside a decode, and the rest alone.
            results.append(rig.step({1: 1, 0: 1}, new_rows=[new], new_blocks=blocks(rig, 1)))
            results += [rig.step({0: 1, 1: 5}), rig.step({1: 3, 0: 1}), rig.step({1: 4})]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.token_ids == theirs.token_ids
            for one, two in zip(mine.prompt_logprobs, theirs.prompt_logprobs, strict=True):
                assert (one.ranks, one.top_ids) == (two.ranks, two.top_ids)
                assert one.values == pytest.approx(two.values, abs=1e-4)
        assert len(found[1].prompt_logprobs) == bool(fields)
    # Each shape runs once eagerly.
    assert (capture.num_captured, capture.num_replayed) == (4, 8)


def test_a_step_over_the_largest_size_stays_out(folder: Path) -> None:
    capture = Noted()
    rig, eager = Rig(folder, num_blocks=64, capture=capture, max_tokens=8), Rig(folder, num_blocks=64)
    for _ in range(3):
        assert prompts(rig, [0, 1, 2]) == prompts(eager, [0, 1, 2])
    assert capture.num_captured == 0


def test_of_wide_graphs_those_used_last_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runner, "MOST_WIDE_GRAPHS", 2)
    capture = Noted()
    rig, eager = Rig(folder, num_blocks=64, capture=capture), Rig(folder, num_blocks=64)
    counts = []
    for rows in ([0], [0], [0, 1], [0, 1], [0], [0, 1, 2], [0, 1, 2], [0], [3], [0, 1], [0]):
        assert prompts(rig, rows) == prompts(eager, rows)
        counts.append(capture.num_captured)
    # Two rows have gone for three, which came after one row had come once more. What comes once takes no place.
    assert counts == [0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]


@pytest.mark.parametrize(("rows", "drafts", "tokens"), [(1, 4, 5), (8, 4, 40), (32, 7, 256), (64, 3, 256), (4, 0, 4)])
def test_the_graph_of_the_most_drafts_samples(rows: int, drafts: int, tokens: int) -> None:
    """Though so many tokens are none of the padded sizes."""
    table = RequestTable(max_rows=rows, max_model_len=64, block_size=4, num_groups=1, device=CPU)
    runner = make_runner(table, Noted(), max_tokens=2048, num_drafts=drafts)
    count = min(rows, tokens // (1 + drafts))
    lens = np.full(count, 1 + drafts)
    step = StepRows(np.arange(count), lens, lens, np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.int64))
    assert runner.takes(step) and runner.samples(step)


def test_no_step_is_padded_to_more_than_1024_tokens() -> None:
    table = RequestTable(max_rows=4096, max_model_len=2048, block_size=4, num_groups=1, device=CPU)
    runner = make_runner(table, Noted(), max_tokens=8192)
    for length, taken in [(1023, True), (1024, False)]:  # of 11 rows, which are padded to 12
        rows, lens = np.arange(11), np.array([length - 10, *[1] * 10])
        none = np.zeros(11, dtype=np.int64)
        assert runner.takes(StepRows(rows, lens, none, np.zeros(11, dtype=np.bool_), none)) is taken


def test_the_largest_size_can_be_captured_before_any_request(folder: Path) -> None:
    capture = Noted()
    rig = Rig(folder, num_blocks=64, capture=capture)
    rig.runner.warm_up_graphs()
    assert (capture.num_captured, capture.num_replayed) == (2, 2), "of decodes, and of rows with several tokens"
    eager = Rig(folder, num_blocks=64)
    rows = [0, 1, 2, 3]
    assert prompts(rig, rows) == prompts(eager, rows)
    for _ in range(2):
        assert rig.step({row: 1 for row in rows}) == eager.step({row: 1 for row in rows})
    assert capture.num_replayed == 4


@pytest.mark.parametrize(("most", "number"), [(1, 1), (3, 3), (64, 11), (256, 35), (1000, 67)])
def test_sizes_go_up_to_the_most_rows(most: int, number: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    assert len(sizes) == number
    assert all(size - before <= max(before / 8, 8) for before, size in zip(sizes[3:], sizes[4:], strict=False))


def test_a_runner_that_nobody_holds_is_gone(folder: Path) -> None:
    rig = Rig(folder, num_blocks=64, capture=Noted())
    rig.runner.warm_up_graphs()
    runner = weakref.ref(rig.runner)
    gc.disable()
    try:
        del rig
        assert runner() is None, "its caches would stay until Python looks for cycles"
    finally:
        gc.enable()


def test_the_runner_needs_no_gradients(folder: Path) -> None:
    rig = Rig(folder, num_blocks=64, capture=Noted())
    with torch.enable_grad():
        assert len(prompts(rig, [0])) == 1


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_steps_whose_rows_share_look_for_prefixes(folder: Path, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in each cache group of full attention, and only where it pays; graphs for the one serve no others."""
    capture = Noted() if graphs else None
    eager, rig = Rig(folder, num_blocks=64), Rig(folder, num_blocks=64, capture=capture, shares=True)
    rows, pays, looked = [0, 2, 3], [False], []
    monkeypatch.setattr(PrefixSharing, "pays", lambda self, rows: pays[0])
    found = ops.shared_prefixes
    monkeypatch.setattr(ops, "shared_prefixes", lambda *given: looked.append(len(given[0])) or found(*given))
    assert prompts(eager, rows) == prompts(rig, rows)
    for pays[0] in (True, True, False, False, True, False):
        before = len(looked)
        assert rig.step({row: 1 for row in rows}) == eager.step({row: 1 for row in rows})
        assert len(looked) - before == pays[0] * len(rig.groups.full_groups)
    # Three rows run at the size of four.
    assert set(looked) == {4 if graphs else 3}
    if capture is not None:
        assert (capture.num_captured, capture.num_replayed) == (2, 4)


def test_of_graphs_that_share_only_some_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runner, "MOST_SHARING_GRAPHS", 1)
    monkeypatch.setattr(PrefixSharing, "pays", lambda self, rows: True)
    capture = Noted()
    rig, eager = Rig(folder, num_blocks=64, capture=capture, shares=True), Rig(folder, num_blocks=64)
    assert prompts(rig, [0, 1, 2, 3]) == prompts(eager, [0, 1, 2, 3])
    for rows in ([0], [0], [1, 0], [0, 1], [0], [0]):
        assert rig.step({row: 1 for row in rows}) == eager.step({row: 1 for row in rows})
    # A shape that has run before is captured when it comes again.
    assert (capture.num_captured, capture.num_replayed) == (3, 4)


class Launches(TorchDispatchMode):
    """Notes the operators that do something; a view does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("samples", [True, False])
def test_beside_the_model_a_graph_is_three_launches(samples: bool, drafts: int) -> None:
    """Inputs, tokens, counts; where others sample, inputs and a copy of hidden states. Also of two cache groups."""
    launches = Launches()

    class Counted(Noted):
        def __call__(self, run: Run) -> Run:
            def counted() -> None:
                with launches:
                    run()

            return super().__call__(counted)

    table = RequestTable(max_rows=4, max_model_len=64, block_size=4, num_groups=2, device=CPU)
    runner = make_runner(table, Counted(), max_tokens=12, num_drafts=drafts)
    rows, lens = np.array([2, 0]), np.array([1 + drafts, 1])
    for _ in range(3):
        step = StepRows(rows, lens, lens, np.zeros(2, dtype=np.bool_), np.zeros(2, dtype=np.int64))
        runner.run(step, samples=samples)
    wanted = ["raylm::place", "raylm::sample", "raylm::accept"] if samples else ["raylm::place", "aten::copy_"]
    assert launches.names == 2 * wanted
