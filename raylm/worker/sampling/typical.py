"""typical_p."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raylm.core.step import RowSampling
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling.stages import ROWS_AT_A_TIME, LogitRows


class Typical:
    """Locally typical sampling (Meister et al., 2023): keeps the tokens whose information is closest to the entropy of
    the distribution, as few as reach typical_p together. It looks at the distribution after the temperature and before
    top-k, top-p and min-p; greedy rows have no use for it."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._typical_p = np.ones(table.num_rows, dtype=np.float32)
        self._temperature = np.ones(table.num_rows, dtype=np.float32)

    def set_row(self, row: int, sampling: RowSampling) -> bool:
        params = sampling.params
        self._typical_p[row] = 1 if params.is_greedy else params.typical_p
        self._temperature[row] = params.temperature
        return bool(self._typical_p[row] < 1)

    def apply(self, logits: Tensor, of: LogitRows) -> Tensor:
        wanted = np.flatnonzero(self._typical_p[of.rows] < 1)
        rows = of.rows[wanted]
        arrays = self._table.upload(wanted, self._typical_p[rows], self._temperature[rows])
        for index, mass, temperature in zip(*(array.split(ROWS_AT_A_TIME) for array in arrays), strict=True):
            own = logits.index_select(0, index)
            logits.index_copy_(0, index, own.masked_fill(~_typical(own, mass, temperature), -torch.inf))
        return logits


def _typical(logits: Tensor, mass: Tensor, temperature: Tensor) -> Tensor:
    """bool [M, vocab]: the tokens that are kept."""
    values = logits.float()
    values = (values - values.amax(dim=-1, keepdim=True)) / temperature[:, None]
    information = -values.log_softmax(dim=-1)
    probs = (-information).exp()
    entropy = torch.where(probs > 0, probs * information, 0.0).sum(dim=-1, keepdim=True)
    order = (information - entropy).abs().nan_to_num(nan=torch.inf).argsort(dim=-1, stable=True)
    sorted_probs = probs.gather(1, order)
    keeps = sorted_probs.cumsum(dim=-1) - sorted_probs < mass[:, None]
    keeps[:, 0] = True  # whatever rounding makes of the mass
    return torch.zeros_like(keeps).scatter_(1, order, keeps)
