"""Proposers on the device draft what naive references draft, whatever chunks, rows, blocks and rejections there are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from raylm.layers.attention import AttentionMetadata, KVCache, LayerInput
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.arch_eagle3 import read_eagle3_arch
from raylm.models.cache_spec import cache_specs
from raylm.models.check import with_mtp
from raylm.models.decoder import DecoderModel
from raylm.models.eagle3 import load_eagle3
from raylm.models.load import load_model
from raylm.models.taps import HiddenTaps
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext
from raylm.worker.draft_runner import DraftRunner
from raylm.worker.graph_runner import Run
from raylm.worker.input_batch import DeviceArrays
from raylm.worker.proposers import (
    DeviceProposer,
    DraftModelProposer,
    Eagle3Proposer,
    MtpProposer,
)
from raylm.worker.transfer import Uploader
from tests.support import checkpoints, draft_references
from tests.support.threaded_ranks import ThreadedRanks

CPU = torch.device("cpu")
ALONE = ParallelContext.single(CPU)
BLOCK, COLUMNS, NUM_ROWS, MAX_TOKENS = 4, 16, 5, 64
STALE = 311
"""What cells have where nobody wrote: of a request before, say."""


def load(folder: Path, context: ParallelContext, *, mtp: bool = False) -> DecoderModel:
    source = locate(str(folder))
    arch = ArchConfig.from_source(source)
    arch = with_mtp(arch) if mtp else arch
    return load_model(source, arch, context, torch.float32, "auto", progress=False)


def cache(arch: ArchConfig, context: ParallelContext) -> list[KVCache]:
    """Of each layer; block 0 is for padding, and what no step has written is NaN."""
    specs = cache_specs(arch, context, block_size=BLOCK, dtype=torch.float32)
    pairs = [
        tuple(torch.full((1 + NUM_ROWS * COLUMNS, *part.shape), math.nan) for part in spec.parts) for spec in specs
    ]
    for pair in pairs:
        for part in pair:
            part[0] = 0
    return pairs


class Rig:
    """A target over a paged cache, the rows of its requests, and a proposer beside it."""

    def __init__(self, model: DecoderModel) -> None:
        arch = model.arch
        self.model = model
        self.rows = SimpleNamespace(
            token_ids=torch.zeros(NUM_ROWS, MAX_TOKENS, dtype=torch.int32),
            block_table=torch.zeros(1, NUM_ROWS, COLUMNS, dtype=torch.int32),
            num_known=torch.ones(NUM_ROWS, dtype=torch.int64),
            num_computed=torch.zeros(NUM_ROWS, dtype=torch.int64),
            arrivals=torch.zeros(0, dtype=torch.int32),
            block_size=BLOCK,
            max_rows=NUM_ROWS - 1,
            padding_row=NUM_ROWS - 1,
            max_model_len=MAX_TOKENS,
            device=CPU,
            upload=Uploader(CPU),
        )
        self.num_captured = self.num_postponed = 0
        self.given: dict[int, list[int]] = {}
        """Rows of the next step whose drafts are made by somebody else."""
        self._caches = cache(arch, model.context)
        self._free = list(range(1, 1 + NUM_ROWS * COLUMNS))
        random.Random(1).shuffle(self._free)

    def use(self, proposer: DeviceProposer, *, graphs: bool = False, max_tokens: int = 16) -> Rig:
        """Draft by a proposer; with `graphs` through something that behaves like CUDA graphs."""

        def capture(run: Run) -> Run:
            self.num_captured += 1
            return run

        self.runner = DraftRunner(
            proposer, self.rows, group=0, max_tokens=max_tokens, capture=capture if graphs else None
        )
        return self

    def add(self, row: int, prompt: list[int]) -> None:
        self.rows.token_ids[row] = STALE
        self.rows.token_ids[row, : len(prompt)] = torch.tensor(prompt)
        self.rows.num_known[row] = len(prompt)
        self.rows.num_computed[row] = 0
        self.runner.begin([row], [0])

    def known(self, row: int) -> list[int]:
        return self.rows.token_ids[row, : int(self.rows.num_known[row])].tolist()

    def _computed(self, row: int) -> int:
        return int(self.rows.num_computed[row])

    def drafted(self, row: int, count: int) -> list[int]:
        known = int(self.rows.num_known[row])
        return self.rows.token_ids[row, known : known + count].tolist()

    @torch.inference_mode()
    def step(self, num_tokens: dict[int, int], gives: dict[int, list[int]]) -> None:
        """Rows compute so many tokens; then they know those that they are given as well, the others are rejected."""
        order = list(num_tokens)
        left = {row: int(self.rows.num_known[row]) - self._computed(row) for row in order}
        num_drafts = np.array([max(num_tokens[row] - left[row], 0) for row in order])
        lens = [num_tokens[row] for row in order]
        chunks = np.array([left[row] != 1 for row in order])
        drafts, given = np.array([len(self.given.get(row, [])) for row in order]), list(self.given)
        self.runner.prepare(np.array(order), drafts, chunks, given=given, max_seq_len=MAX_TOKENS)
        self.given.clear()
        for row in order:
            self._grow(row, self._computed(row) + num_tokens[row])
        where = [(row, self._computed(row) + i) for row in order for i in range(num_tokens[row])]
        token_rows, positions = (torch.tensor(part) for part in zip(*where, strict=True))
        token_ids = self.rows.token_ids[token_rows, positions].long()
        blocks = self.rows.block_table[0]
        meta = AttentionMetadata(
            query_start=torch.tensor([0, *lens]).cumsum(0).int(),
            seq_lens=torch.tensor([self._computed(row) + num_tokens[row] for row in order], dtype=torch.int32),
            block_table=blocks[order],
            slot_mapping=blocks[token_rows, positions // BLOCK].long() * BLOCK + positions % BLOCK,
            max_query_len=max(lens),
            max_seq_len=MAX_TOKENS,
        )
        self.model(token_ids, [LayerInput(positions, pair, meta) for pair in self._caches])
        for row in order:
            known = int(self.rows.num_known[row])
            tokens = gives.get(row, [])
            self.rows.token_ids[row, known : known + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            self.rows.num_known[row] += len(tokens)
            self.rows.num_computed[row] = min(self._computed(row) + num_tokens[row], int(self.rows.num_known[row]) - 1)
        if self.runner.postpones(np.array(order), np.array(lens), num_drafts):
            self.num_postponed += 1
            return
        offsets = torch.tensor([i for count in lens for i in range(count)])
        arrays = DeviceArrays(token_rows, offsets, torch.tensor(order), meta.query_start)
        self.runner.absorb(arrays, positions, max_query_len=max(lens), max_seq_len=MAX_TOKENS)

    @torch.inference_mode()
    def draft(self, counts: dict[int, int]) -> None:
        for row, count in counts.items():
            self._grow(row, int(self.rows.num_known[row]) + count)
        rows, numbers = (np.array(list(part)) for part in (counts, counts.values()))
        self.runner.prepare(rows, numbers, np.zeros(len(rows), dtype=np.bool_), max_seq_len=MAX_TOKENS)

    def _grow(self, row: int, num_tokens: int) -> None:
        table = self.rows.block_table[0, row]
        for column in range(-(-min(num_tokens, MAX_TOKENS) // BLOCK)):
            if not table[column]:
                table[column] = self._free.pop()


class Made(NamedTuple):
    """Checkpoints, how a rank makes a rig of them, and the drafts that are right."""

    rig: Callable[..., Rig]
    expected: Callable[[list[int], int], list[int]]


def draft_model(folder: Path) -> Made:
    target = checkpoints.llama(folder / "target")
    small = checkpoints.qwen3(folder / "draft", num_hidden_layers=2, vocab_size=300)
    reference = checkpoints.reference(small)

    def rig_of(context: ParallelContext, **how: Any) -> Rig:
        rig, model = Rig(load(target, context)), load(small, context)
        caches = cache(model.arch, context)
        return rig.use(
            DraftModelProposer(model, rig.rows, caches, group=0, target_vocab_size=checkpoints.VOCAB_SIZE), **how
        )

    def expected(known: list[int], count: int) -> list[int]:
        tokens = [min(token, 299) for token in known]
        for _ in range(count):
            with torch.inference_mode():
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(known) :]

    return Made(rig_of, expected)


def eagle3(folder: Path, **changes: object) -> Made:
    target = checkpoints.llama(folder / "target")
    path = checkpoints.eagle3(folder / "head", target, **changes)

    def rig_of(context: ParallelContext, **how: Any) -> Rig:
        rig = Rig(load(target, context))
        spec = read_eagle3_arch(locate(str(path)), rig.model.arch)
        head = load_eagle3(locate(str(path)), spec, rig.model, progress=False)
        taps = HiddenTaps(rig.model, spec.target_layers, max_tokens=2 * MAX_TOKENS)
        caches = cache(spec.arch, context)
        return rig.use(Eagle3Proposer(head, rig.rows, caches, taps, group=0, dtype=torch.float32), **how)

    return Made(rig_of, draft_references.Eagle3(path, target).drafts)


def eagle3_of_another_make(folder: Path) -> Made:
    """Other heads than the target's, every token drafted by the target's own head, the residual begun after a norm."""
    changes = {"num_key_value_heads": 1, "draft_vocab_size": 320, "norm_before_residual": True}
    return eagle3(folder, **changes, leave_out=("lm_head.weight", "d2t", "t2d"))


def mtp(folder: Path) -> Made:
    path = checkpoints.mimo(folder)

    def rig_of(context: ParallelContext, **how: Any) -> Rig:
        rig = Rig(load(path, context, mtp=True))
        model = rig.model
        taps = HiddenTaps(model, [model.arch.num_layers], max_tokens=2 * MAX_TOKENS)
        return rig.use(MtpProposer(model, rig.rows, cache(model.arch, context)[-1:], taps, group=0), **how)

    return Made(rig_of, draft_references.Mtp(path).drafts)


MADE = {maker.__name__: maker for maker in (draft_model, eagle3, eagle3_of_another_make, mtp)}


@pytest.fixture(params=MADE)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    return MADE[request.param](tmp_path)


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * i * i + 13 * i + 5 * seed) % 299 for i in range(length)]


def test_drafts_are_those_of_the_naive_reference(made: Made) -> None:
    rig, expected = made.rig(ALONE), made.expected
    rig.add(0, prompt(11, 3))
    rig.add(2, prompt(2, 5))
    rig.step({0: 6}, {})
    rig.step({2: 2, 0: 5}, {0: [7], 2: [9]})
    rig.draft({2: 3, 0: 4})
    assert rig.drafted(0, 4) == expected(rig.known(0), 4)
    assert rig.drafted(2, 3) == expected(rig.known(2), 3)
    # The fourth draft of a row that wanted three is not written.
    assert rig.rows.token_ids[2, int(rig.rows.num_known[2]) + 3] == STALE


def test_drafts_after_some_were_accepted(made: Made) -> None:
    rig, expected = made.rig(ALONE), made.expected
    for row, length in enumerate((9, 4, 14)):
        rig.add(row, prompt(length, row + 1))
    rig.step({row: length for row, length in enumerate((9, 4, 14))}, {row: [100 + row] for row in range(3)})
    for accepted in (0, 1, 2, 3, 0, 3):
        rig.draft({row: 3 for row in range(3)})
        proposed = {row: rig.drafted(row, 3) for row in range(3)}
        for row, tokens in proposed.items():
            assert tokens == expected(rig.known(row), 3)
        # Each row keeps another number of its drafts, and a token of its own.
        kept = {row: (accepted + row) % 4 for row in range(3)}
        rig.step(
            {row: 4 for row in range(3)}, {row: proposed[row][: kept[row]] + [11 * row + accepted] for row in kept}
        )


def test_a_row_may_decode_without_drafts_meanwhile(made: Made) -> None:
    rig, expected = made.rig(ALONE), made.expected
    rig.add(1, prompt(5, 2))
    rig.step({1: 5}, {1: [3]})
    rig.add(2, prompt(6, 9))
    for token in (8, 250, 31):
        rig.step({1: 1}, {1: [token]})
    # Another one's prompt comes between.
    rig.step({1: 1, 2: 6}, {1: [77], 2: [41]})
    rig.step({2: 1, 1: 1}, {1: [78], 2: [42]})
    assert rig.num_postponed == (4 if rig.runner.is_lazy else 0)
    rig.draft({1: 3})
    assert rig.drafted(1, 3) == expected(rig.known(1), 3)
    rig.step({2: 1, 1: 4}, {1: [*rig.drafted(1, 3), 60], 2: [43]})
    rig.draft({2: 2, 1: 2})
    assert rig.drafted(1, 2) == expected(rig.known(1), 2)
    assert rig.drafted(2, 2) == expected(rig.known(2), 2)


def test_drafts_that_came_with_the_plan_are_left_as_they_are(made: Made) -> None:
    rig = made.rig(ALONE)
    for row, length in ((0, 5), (1, 8)):
        rig.add(row, prompt(length, row + 3))
        rig.step({row: length}, {row: [9 + row]})
    rig.step({0: 1, 1: 1}, {0: [70], 1: [80]})
    for accepted in range(3):
        rig.given = {0: [100, 101, 102]}
        known = len(rig.known(0))
        rig.rows.token_ids[0, known : known + 3] = torch.tensor(rig.given[0])
        rig.step({0: 4, 1: 1}, {0: [*rig.given[0][:accepted], 50 + accepted], 1: [60]})
        assert rig.known(0)[known:] == [*range(100, 100 + accepted), 50 + accepted]
    rig.draft({0: 2, 1: 2})
    for row in (0, 1):
        assert rig.drafted(row, 2) == made.expected(rig.known(row), 2)


def test_much_that_was_postponed_is_absorbed_in_pieces(made: Made) -> None:
    rig = made.rig(ALONE, max_tokens=3)
    for row, length in ((0, 4), (1, 7)):
        rig.add(row, prompt(length, row + 1))
        rig.step({row: length}, {row: [9]})
    for step in range(11):
        rig.step(
            {row: 1 for row in range(1 + (step < 4))}, {0: [20 + step], 1: [40 + step]} if step < 4 else {0: [step]}
        )
    rig.draft({0: 2, 1: 2})
    for row in (0, 1):
        assert rig.drafted(row, 2) == made.expected(rig.known(row), 2)


def test_a_row_can_be_given_to_another_request(made: Made) -> None:
    rig, expected = made.rig(ALONE), made.expected
    rig.add(1, prompt(9, 2))
    rig.step({1: 9}, {1: [3]})
    rig.draft({1: 4})
    rig.add(1, prompt(3, 7))
    rig.step({1: 3}, {1: [44]})
    rig.draft({1: 4})
    assert rig.drafted(1, 4) == expected(rig.known(1), 4)


def test_a_row_that_was_away_makes_up_for_what_was_postponed(made: Made) -> None:
    rig = made.rig(ALONE)
    rig.add(1, prompt(5, 2))
    rig.step({1: 5}, {1: [3]})
    for token in (8, 250, 31):
        rig.step({1: 1}, {1: [token]})
    # As a request that was swapped out and comes back, and as one that finds these tokens and computes two more.
    for more in ([], [17, 130]):
        known = rig.known(1) + more
        rig.rows.token_ids[1, : len(known)] = torch.tensor(known)
        rig.rows.num_known[1] = len(known)
        rig.runner.begin([1], [rig._computed(1)])
        rig.step({1: 1 + len(more)}, {1: [60]})
        rig.draft({1: 3})
        assert rig.drafted(1, 3) == made.expected(rig.known(1), 3)


def test_rows_are_not_drafted_past_their_end_nor_blocks_that_others_have(made: Made) -> None:
    rig, expected = made.rig(ALONE), made.expected
    length = MAX_TOKENS - 3
    rig.add(0, prompt(length, 2))
    rig.add(1, prompt(6, 4))
    rig.step({0: length, 1: 6}, {0: [3], 1: [5]})
    before = rig.rows.token_ids.clone()
    padding = NUM_ROWS - 1
    with torch.inference_mode():
        rig._grow(1, 12)
        # Row 0 has cells for two more, row 1 wants none, the padding row is there twice.
        rows, counts = torch.tensor([0, padding, 1, padding]), torch.tensor([4, 0, 0, 0])
        rig.runner._proposer.draft(rows, counts, 4, max_seq_len=MAX_TOKENS)
    after = rig.rows.token_ids
    assert after[0, length + 1 :].tolist() == expected(rig.known(0), 2)
    after[0, length + 1 :] = before[0, length + 1 :]
    assert torch.equal(after, before)


def test_drafts_through_graphs(made: Made) -> None:
    rig = made.rig(ALONE, graphs=True)
    for row, length in ((0, 9), (1, 5), (3, 2)):
        rig.add(row, prompt(length, row + 2))
    rig.step({0: 9, 1: 5, 3: 2}, {0: [3], 1: [4], 3: [5]})
    for step in range(4):
        # Three rows take the graph of four.
        rig.draft({3: 2, 0: 3, 1: 1})
        proposed = {row: rig.drafted(row, count) for row, count in ((0, 3), (1, 1), (3, 2))}
        for row, tokens in proposed.items():
            assert tokens == made.expected(rig.known(row), len(tokens))
        rig.step({0: 4, 1: 2, 3: 3}, {row: [*tokens[:step], 7] for row, tokens in proposed.items()})
    assert rig.num_captured == 1
    before = rig.rows.token_ids.clone()
    with torch.inference_mode():
        rig.runner.warm_up()
    assert rig.num_captured == 2 and torch.equal(rig.rows.token_ids, before)


def test_two_ranks_draft_what_one_does(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(context: ParallelContext) -> list[list[int]]:
        rig = made.rig(context)
        rig.add(0, prompt(9, 3))
        rig.add(3, prompt(4, 5))
        rig.step({0: 9, 3: 4}, {0: [7], 3: [9]})
        rig.draft({3: 2, 0: 4})
        return [rig.drafted(0, 4), rig.drafted(3, 2)]

    expected = run(ALONE)
    ranks = ThreadedRanks(2)
    monkeypatch.setattr(collectives, "all_reduce", ranks.all_reduce)
    monkeypatch.setattr(collectives, "all_gather", ranks.all_gather)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, [ParallelContext(rank, rank, 2, 0, 1, CPU) for rank in range(2)]))
    assert found == [expected, expected]
