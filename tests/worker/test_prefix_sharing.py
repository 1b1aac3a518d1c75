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
DEPTHS = [depth // BLOCK for depth in ops.SHARED_DEPTHS]
"""In blocks: 4, 8, 16 ..."""


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_sharing, "LEAST_SAVED", 10_000)


def begun(tables: dict[int, list[int]], group: int = 0) -> PrefixSharing:
    """Rows with these blocks. 1,000 keys are enough."""
    sharing = PrefixSharing(num_rows=64, block_size=BLOCK, group=0, key_bytes=10)
    plan(sharing, list(tables), [NewBlocks(row, group, 0, blocks) for row, blocks in tables.items()])
    return sharing


def plan(sharing: PrefixSharing, rows: list[int], blocks: list[NewBlocks]) -> None:
    sharing.apply(StepPlan(1, [NewRow(row, [1] * 5, 0, GREEDY) for row in rows], blocks, [], []))


def table(row: int, common: int, *, root: int = 0, own: int = 20) -> list[int]:
    """Blocks of which the first are the root's."""
    return [*range(root, root + common), *range(10_000 + 100 * row, 10_000 + 100 * row + own)]


def test_rows_that_began_with_the_same_blocks_share() -> None:
    sharing = begun({row: table(row, DEPTHS[1]) for row in range(5)})
    # Of 512 keys, which three rows have, two need not read them: 1,024.
    assert sharing.pays(np.array([4, 2, 0])) and sharing.pays(np.arange(5))
    assert not sharing.pays(np.array([0, 1])) and not sharing.pays(np.array([1]))


def test_other_blocks_are_other_prefixes() -> None:
    sharing = begun({row: table(row, 20, root=100 * row) for row in range(6)})
    assert not sharing.pays(np.arange(6))
    plan(sharing, [1, 3, 5], [NewBlocks(row, 0, 0, table(row, 20)) for row in (1, 3, 5)])
    assert sharing.pays(np.arange(6)) and not sharing.pays(np.array([0, 2, 4]))


def test_what_rows_have_alone_does_not_count() -> None:
    """However long their own conversations are."""
    sharing = begun({row: table(row, DEPTHS[0], own=300) for row in range(4)})
    assert not sharing.pays(np.arange(4))


def test_each_row_counts_where_it_shares_most() -> None:
    """The same 256 keys in all, and 2,048 in two pairs."""
    instructions = list(range(DEPTHS[0]))
    tables = {row: [*instructions, *range(100 * (row % 2), 100 * (row % 2) + DEPTHS[3])] for row in range(4)}
    sharing = begun(tables)
    assert sharing.pays(np.arange(4)) and sharing.pays(np.array([0, 2])) and not sharing.pays(np.array([0, 1]))


def test_many_members_read_a_prefix_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    most, keys = ops.MOST_SHARERS, ops.SHARED_DEPTHS[0]
    # One of 16 rows and two of 17 read for all of them.
    for rows in (most, most + 1):
        for more, pays in ((-1, True), (1, False)):
            monkeypatch.setattr(prefix_sharing, "LEAST_SAVED", 10 * keys * (most - 1) + more)
            assert begun({row: table(row, DEPTHS[0]) for row in range(rows)}).pays(np.arange(rows)) == pays


def test_other_groups_do_not_count() -> None:
    assert not begun({row: table(row, 40) for row in range(6)}, group=1).pays(np.arange(6))


def test_a_row_that_begins_anew_shares_nothing_of_before() -> None:
    sharing = begun({row: table(row, DEPTHS[2]) for row in range(4)})
    assert sharing.pays(np.arange(4))
    plan(sharing, [1, 2, 3], [])
    assert not sharing.pays(np.arange(4))


def test_blocks_that_come_later_count() -> None:
    sharing = begun({row: [1] for row in range(4)})
    plan(sharing, [], [NewBlocks(row, 0, 1, list(range(2, DEPTHS[2]))) for row in range(4)])
    assert sharing.pays(np.arange(4)), "three of 512 keys, and more"
    plan(sharing, [], [NewBlocks(row, 0, column - 1, [row + 50]) for row in range(4) for column in DEPTHS])
    assert not sharing.pays(np.arange(4))


def test_more_rows_than_the_device_compares_do_not_share() -> None:
    most = ops.MOST_PREFIX_SEQS
    sharing = PrefixSharing(num_rows=most + 1, block_size=BLOCK, group=0, key_bytes=10)
    plan(sharing, [], [NewBlocks(row, 0, 0, table(0, 20)) for row in range(most + 1)])
    assert sharing.pays(np.arange(most)) and not sharing.pays(np.arange(most + 1))
