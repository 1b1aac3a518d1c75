"""Which heads of attention a tensor rank has."""

from __future__ import annotations

from typing import NamedTuple

from raylm.errors import ConfigError
from raylm.parallel.context import ParallelContext


class HeadShare(NamedTuple):
    """`count` of `total` heads, from `first` on. Where there are fewer heads than ranks, neighbouring ranks have the
    same one."""

    total: int
    count: int
    first: int

    @classmethod
    def of(cls, num_heads: int, context: ParallelContext) -> HeadShare:
        """This rank's. Raises ConfigError as kv_heads_of_rank does."""
        first = context.tensor_rank * num_heads // context.tensor_size
        return cls(num_heads, kv_heads_of_rank(num_heads, context), first)


def kv_heads_of_rank(num_kv_heads: int, context: ParallelContext) -> int:
    """Key/value heads that one tensor rank holds. Raises ConfigError when they cannot be shared or copied evenly."""
    ranks = context.tensor_size
    if num_kv_heads % ranks and ranks % num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads is {num_kv_heads}, which tensor parallelism over {ranks} ranks can neither "
            "divide nor copy evenly"
        )
    return max(1, num_kv_heads // ranks)
