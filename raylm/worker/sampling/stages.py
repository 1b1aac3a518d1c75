"""What stands between a model's logits and the sampled token: the interface of every stage."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from raylm.core.step import Forced, RowSampling

ROWS_AT_A_TIME = 64
"""Rows of logits of which float32 copies, and what is made of them, are in memory at the same time: the memory that a
step is given at the start has no room for more."""


class LogitRows(NamedTuple):
    """Whose logits some logits [M, vocab] are: logits m give the token at positions[m] of the row rows[m]."""

    rows: np.ndarray
    """int64 [M], on the host."""
    table_rows: Tensor
    """The same on the device."""
    positions: Tensor
    """int64 [M], on the device: how many tokens of the row come before, drafts among them."""


class RowNotes:
    """What sampling finds out of rows beside their tokens, on the host: filled by stages, read once a step."""

    def __init__(self) -> None:
        self._forced: dict[int, tuple[int, list[int]]] = {}
        self._failed: dict[int, str] = {}

    def force(self, row: int, first: int, token_ids: list[int]) -> None:
        """The row will have these tokens, from this position on."""
        self._forced[row] = first, token_ids

    def fail(self, row: int, reason: str) -> None:
        """The row's tokens of this step mean nothing."""
        self._failed.setdefault(row, reason)

    def take(self, rows: np.ndarray) -> tuple[list[Forced], list[tuple[int, str]]]:
        """Both as Sampled has them, of a step whose logits are of these rows; and forget them."""
        if not self._forced and not self._failed:
            return [], []
        index = {row: i for i, row in enumerate(dict.fromkeys(rows.tolist()))}
        forced = [Forced(index[row], *told) for row, told in self._forced.items()]
        failed = [(index[row], reason) for row, reason in self._failed.items()]
        self._forced, self._failed = {}, {}
        return forced, failed


class LogitsStage(Protocol):
    """Changes logits before sampling. It keeps what it needs of each row, and costs nothing in steps without such a
    row."""

    def set_row(self, row: int, sampling: RowSampling) -> bool:
        """A request takes the row; what the last one asked for is void. Whether it needs this stage."""
        ...

    def apply(self, logits: Tensor, of: LogitRows) -> Tensor:
        """The changed logits [M, vocab]; `logits` may be overwritten."""
        ...
