"""Log probabilities for the rows that ask for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raylm import ops
from raylm.core.sampling import ALL_TOKENS
from raylm.core.step import Logprobs, RowSampling
from raylm.worker.request_table import RequestTable

_NOT_ASKED = -1
_EVERY = 1 << 31


def as_count(asked: int | None) -> int:
    """How many likeliest tokens SamplingParams.logprobs or prompt_logprobs asks for; -1 where for nothing at all."""
    if asked is None:
        return _NOT_ASKED
    return asked if asked != ALL_TOKENS else _EVERY


class TokenLogprobs(NamedTuple):
    """Log probabilities of M tokens on their way to the host: Logprobs as tensors, [M] and [M, most]."""

    values: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_values: Tensor


class Likeliest(NamedTuple):
    """The likeliest tokens of some rows, likeliest first, and their log probabilities: both [num_rows, most]."""

    token_ids: Tensor
    logprobs: Tensor


class LogprobWishes:
    """Which rows want log probabilities, and of how many tokens beside the sampled one."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._num_top = np.full(table.num_rows, _NOT_ASKED, dtype=np.int64)
        self._given: dict[int, list[int]] = {}
        """logprob_token_ids of rows."""

    def set_row(self, row: int, sampling: RowSampling) -> bool:
        """A request takes the row. Whether it wants any."""
        params = sampling.params
        self._num_top[row] = as_count(params.logprobs)
        self._given.pop(row, None)
        if params.logprob_token_ids:
            self._given[row] = list(params.logprob_token_ids)
            self._num_top[row] = len(params.logprob_token_ids)
        return params.logprobs is not None or bool(params.logprob_token_ids)

    def num_top(self, rows: np.ndarray) -> np.ndarray:
        """How many tokens beside the sampled one each of the rows wants; -1 where it wants nothing at all."""
        return self._num_top[rows]

    def most(self, rows: np.ndarray) -> int:
        """The largest number of tokens that any of the rows wants; -1 where none wants anything at all."""
        return int(self._num_top[rows].max(initial=_NOT_ASKED))

    def of_sampled(self, logits: Tensor, token_ids: Tensor, rows: np.ndarray, most: int) -> TokenLogprobs:
        """Log probabilities of the sampled tokens [M] of rows in logits [M, vocab], each with the `most` likeliest
        tokens."""
        found = TokenLogprobs(*ops.token_logprobs(logits, token_ids, min(most, logits.shape[1])))
        given = [index for index, row in enumerate(rows.tolist()) if row in self._given]
        if given:
            self._put_given(found, logits, given, rows)
        return found

    def _put_given(self, found: TokenLogprobs, logits: Tensor, indices: list[int], rows: np.ndarray) -> None:
        """Put the tokens that rows name in the place of the likeliest ones."""
        width = found.top_ids.shape[1]
        ids = np.zeros(len(indices) * width, dtype=np.int64)
        for place, index in enumerate(indices):
            own = self._given[int(rows[index])]
            ids[place * width : place * width + len(own)] = own
        where, flat = self._table.upload(np.array(indices), ids)
        wanted = flat.view(len(indices), width)
        found.top_ids.index_copy_(0, where, wanted)
        found.top_values.index_copy_(0, where, ops.gather_logprobs(logits.index_select(0, where), wanted))


def likeliest(logits: Tensor, num_top: int) -> Likeliest:
    """The `num_top` likeliest tokens of each row, or all there are. logits: [num_rows, vocab]."""
    values, token_ids = logits.float().topk(min(num_top, logits.shape[1]), dim=-1)
    return Likeliest(token_ids, values - logits.float().logsumexp(dim=-1, keepdim=True))


class HostLogprobs:
    """TokenLogprobs that have arrived, to be cut into rows."""

    def __init__(self, arrived: list[Tensor]) -> None:
        self._values, self._ranks, self._top_ids, self._top_values = (tensor.tolist() for tensor in arrived)
        self._width = arrived[2].shape[1]

    def cut(self, start: int, end: int, num_top: int) -> Logprobs:
        """Those of the tokens start to end, with `num_top` likeliest each."""
        values, ranks = self._values[start:end], self._ranks[start:end]
        ids, tops = self._top_ids[start:end], self._top_values[start:end]
        if num_top < self._width:
            ids, tops = [row[:num_top] for row in ids], [row[:num_top] for row in tops]
        return Logprobs(values, ranks, ids, tops)


def join(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """Those of all parts, one after the other."""
    return parts[0] if len(parts) == 1 else TokenLogprobs(*(torch.cat(found) for found in zip(*parts, strict=True)))
