"""Ranks that are given different steps say so, with the step and their numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from raylm.core.sampling import SamplingParams
from raylm.core.step import NewBlocks, NewRow, RowSampling, StepPlan
from raylm.errors import RanksDivergedError
from raylm.parallel.context import ParallelContext
from raylm.worker.agreement import Agreement
from raylm.worker.request_table import RequestTable
from tests.support.spawned import Ranks

SAMPLING = RowSampling(SamplingParams(temperature=0.0), seed=1)
FIRST = StepPlan(1, [NewRow(2, [5, 6, 7, 8, 9], 0, SAMPLING)], [NewBlocks(2, 0, 0, [3, 4])], [2], [5])
SECOND = StepPlan(2, [], [], [2], [1])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    four = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield four
    four.close()


def two_steps(rank: int, fault: str | None, at: list[int]) -> str | None:
    """Rank of two stages of two tensor ranks; those of `at` have the fault in the second step. Returns the error."""
    cpu = torch.device("cpu")
    stage, tensor_rank = divmod(rank, 2)
    context = ParallelContext(rank, tensor_rank, 2, stage, 2, cpu)
    table = RequestTable(max_rows=4, max_model_len=32, block_size=4, num_groups=1, device=cpu)
    agreement = Agreement(context, dist.group.WORLD, table)
    plan = SECOND
    table.apply(FIRST)
    agreement.check(FIRST)
    table.num_computed[2], table.num_known[2] = 5, 6
    if rank in at:
        if fault == "plan":
            plan = SECOND._replace(num_tokens=[2])
        elif fault == "token":
            table.token_ids[2, 5] = 11
        elif fault == "block":
            table.block_table[0, 2, 1] = 7
        elif fault == "unread":
            table.token_ids[2, 6] = 11
            table.token_ids[1, 5] = 11
            table.block_table[0, 2, 2] = 7
    try:
        agreement.check(plan)
    except RanksDivergedError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("fault", "at", "message"),
    [
        (None, [], None),
        ("plan", [3], "different plans in step 2: ranks 0, 1, 2 and rank 3 differ"),
        ("token", [1], "different token ids or blocks in step 2: rank 0 and rank 1 differ"),
        ("block", [2], "different token ids or blocks in step 2: rank 2 and rank 3 differ"),
        ("token", [2, 3], None),  # Stages have tables of their own.
        ("unread", [1], None),
    ],
)
def test_a_difference_is_found_by_all(ranks, fault, at, message):
    found = ranks.run(two_steps, fault, at)
    assert len(set(found)) == 1
    assert found[0] is None if message is None else message in found[0]
