"""What stands between a model's logits and the sampled token: the interface of every stage."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from raylm.core.step import RowSampling


class LogitRows(NamedTuple):
    """Whose logits some logits [M, vocab] are: logits m give the token at positions[m] of the row rows[m]."""

    rows: np.ndarray
    """int64 [M], on the host."""
    table_rows: Tensor
    """The same on the device."""
    positions: Tensor
    """int64 [M], on the device: how many tokens of the row come before, drafts among them."""


class LogitsStage(Protocol):
    """Changes logits before sampling. It keeps what it needs of each row, and costs nothing in steps without such a
    row."""

    def set_row(self, row: int, sampling: RowSampling) -> bool:
        """A request takes the row; what the last one asked for is void. Whether it needs this stage."""
        ...

    def apply(self, logits: Tensor, of: LogitRows) -> Tensor:
        """The changed logits [M, vocab]; `logits` may be overwritten."""
        ...
