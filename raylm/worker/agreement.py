"""Do all ranks of a model compute the same step? A check for debugging: parallel.check_ranks."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed import ProcessGroup

from raylm.core.step import StepPlan
from raylm.errors import RanksDivergedError
from raylm.parallel.context import ParallelContext
from raylm.worker.request_table import RequestTable


class Agreement:
    """Compares hashes of what the ranks were given for a step: the plan, over all of them, and within each tensor group
    the token ids and blocks that the step reads. (Stages have different tables: only the first one's has all tokens.)

    It waits for the device and for the other ranks.
    """

    def __init__(self, context: ParallelContext, world: ProcessGroup, table: RequestTable) -> None:
        """`world`: all ranks, with a backend for tensors on the host."""
        self._world = world
        self._tensor_size = context.tensor_size
        self._num_ranks = context.tensor_size * context.pipeline_size
        self._table = table
        self._encoder = msgspec.msgpack.Encoder()

    def check(self, plan: StepPlan) -> None:
        """Call it on every rank once the table has taken the plan in, and before the step counts its tokens.

        Raises RanksDivergedError on all ranks, with the step and what each of them has.
        """
        plans, inputs = self._gather(_hash([self._encoder.encode(plan)]), _hash(self._inputs(plan)))
        if len(set(plans)) > 1:
            raise _diverged(plan.step, "different plans", range(self._num_ranks), plans)
        for first in range(0, self._num_ranks, self._tensor_size):
            group = range(first, first + self._tensor_size)
            if len({inputs[rank] for rank in group}) > 1:
                raise _diverged(plan.step, "different token ids or blocks", group, inputs)

    def _gather(self, *values: int) -> list[list[int]]:
        """For each of the values, every rank's."""
        own = torch.tensor(values, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self._num_ranks)]
        dist.all_gather(found, own, group=self._world)
        return torch.stack(found, dim=1).tolist()

    def _inputs(self, plan: StepPlan) -> Iterable[bytes]:
        """The tokens that each row computes, and the blocks of all that it has then."""
        table = self._table
        if not plan.rows:
            return
        rows = torch.tensor(plan.rows, device=table.device)
        token_ids = table.token_ids.index_select(0, rows).cpu().numpy()
        blocks = table.block_table.index_select(1, rows).cpu().numpy()
        computed = table.num_computed.index_select(0, rows).tolist()
        for index, (first, num_tokens) in enumerate(zip(computed, plan.num_tokens, strict=True)):
            end = first + num_tokens
            yield np.array([first, end]).tobytes()
            yield token_ids[index, first:end].tobytes()
            yield blocks[:, index, : -(-end // table.block_size)].tobytes()


def _hash(parts: Iterable[bytes]) -> int:
    """A signed 64-bit hash."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "big", signed=True)


def _diverged(step: int, what: str, ranks: Iterable[int], hashes: list[int]) -> RanksDivergedError:
    """Ranks with the same hash are named together."""
    parties: dict[int, list[int]] = {}
    for rank in ranks:
        parties.setdefault(hashes[rank], []).append(rank)
    sides = " and ".join(_named(party) for party in parties.values())
    return RanksDivergedError(f"the workers were given {what} in step {step}: {sides} differ (parallel.check_ranks)")


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
