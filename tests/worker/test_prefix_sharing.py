"""When steps look for prefixes that their rows share, by what plans have told the host."""

from __future__ import annotations

import numpy as np
import pytest

from raylm import ops
from raylm.core.step import NewBlocks, NewRow, StepPlan
from raylm.worker import prefix_sharing
from raylm.worker.prefix_sharing import PrefixSharing
from tests.worker.rows import GREEDY

BLOCK = 64
COLUMN = ops.LEAST_SHARED // BLOCK - 1
"""Of the block that a prefix must have, at least."""


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_sharing, "LEAST_SAVED", 10_000)


def begun(found: dict[int, int], blocks: list[NewBlocks]) -> PrefixSharing:
    """Rows that begin with so many tokens in the cache."""
    sharing = PrefixSharing(num_rows=64, block_size=BLOCK, group=0, key_bytes=10)
    plan(sharing, found, blocks)
    return sharing


def plan(sharing: PrefixSharing, found: dict[int, int], blocks: list[NewBlocks]) -> None:
    rows = [NewRow(row, [1] * (count + 5), count, GREEDY) for row, count in found.items()]
    sharing.apply(StepPlan(1, rows, blocks, [], []))


def root(row: int, block: int, group: int = 0) -> NewBlocks:
    """The row's first blocks, the last of which is `block`."""
    return NewBlocks(row, group, 0, [*range(1, COLUMN + 1), block])


def test_rows_that_began_with_the_same_blocks_share() -> None:
    sharing = begun({0: 0, 1: 512, 2: 512, 3: 512, 4: 512}, [root(row, 77) for row in range(5)])
    # The first one brought the others' 512 keys.
    assert sharing.pays(np.array([0, 1, 2, 3, 4])) and sharing.pays(np.array([4, 2, 1, 0]))
    assert not sharing.pays(np.array([0, 1])) and not sharing.pays(np.array([1]))


def test_other_blocks_are_other_prefixes() -> None:
    sharing = begun({row: 600 for row in range(6)}, [root(row, 70 + row) for row in range(6)])
    assert not sharing.pays(np.arange(6))
    plan(sharing, {}, [root(row, 99) for row in (1, 3, 5)])
    assert sharing.pays(np.arange(6)) and not sharing.pays(np.array([0, 2, 4]))


def test_many_members_read_a_prefix_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    most = ops.MOST_SHARERS
    # One of 16 rows and two of 17 read for all of them.
    for rows in (most, most + 1):
        for least in (5000 * (most - 1) - 1, 5000 * (most - 1) + 1):
            monkeypatch.setattr(prefix_sharing, "LEAST_SAVED", least)
            sharing = begun({row: 500 for row in range(rows)}, [root(row, 7) for row in range(rows)])
            assert sharing.pays(np.arange(rows)) == (least < 5000 * (most - 1))


def test_short_prefixes_and_other_groups_do_not_count() -> None:
    short = begun({row: ops.LEAST_SHARED - 1 for row in range(20)}, [root(row, 7) for row in range(20)])
    assert not short.pays(np.arange(20))
    other = begun({row: 600 for row in range(6)}, [root(row, 70 + row) for row in range(6)])
    plan(other, {}, [root(row, 7, group=1) for row in range(6)])
    assert not other.pays(np.arange(6))


def test_a_row_that_begins_anew_shares_nothing_of_before() -> None:
    sharing = begun({row: 600 for row in range(4)}, [root(row, 7) for row in range(4)])
    assert sharing.pays(np.arange(4))
    plan(sharing, {1: 0, 2: 0, 3: 0}, [root(1, 8), root(2, 9), root(3, 10)])
    assert not sharing.pays(np.arange(4))


def test_blocks_that_come_later_count() -> None:
    sharing = begun({row: 600 for row in range(4)}, [NewBlocks(row, 0, 0, [1]) for row in range(4)])
    plan(sharing, {}, [NewBlocks(row, 0, 1, [2, 3, 90 + row]) for row in range(4)])
    assert not sharing.pays(np.arange(4))
    plan(sharing, {}, [NewBlocks(row, 0, COLUMN, [4]) for row in range(4)])
    assert sharing.pays(np.arange(4))
