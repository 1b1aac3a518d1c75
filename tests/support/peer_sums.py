"""What tests of operators over peer memory have in common: starting ranks, shares of rows, and sums as references."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raylm.ops import peer_memory
from tests.support.spawned import Ranks


def skip_without_operators() -> None:
    if (problem := peer_memory.missing(0)) is not None:
        pytest.skip(problem)


def started(count: int, folder: Path) -> Iterator[Ranks]:
    """`count` ranks with a GPU each, closed at the end."""
    if torch.cuda.device_count() < max(count, 2):
        pytest.skip(f"torch sees {torch.cuda.device_count()} GPUs, this needs {max(count, 2)}")
    ranks = Ranks(count, folder)
    yield ranks
    ranks.close()


def share(rows: int, rank: int, ranks: int) -> slice:
    """The rows that a rank norms where norms are split. Written out here, so that tests do not expect what the code
    under test (rows_of_rank) says."""
    return slice(rows * rank // ranks, rows * (rank + 1) // ranks)


def in_order(parts: list[Tensor]) -> Tensor:
    """What the kernels compute: a float32 sum in the order of ranks, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
