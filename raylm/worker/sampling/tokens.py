"""Stages for tokens that a request names: logit_bias, allowed_token_ids, bad_words, min_tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raylm import ops
from raylm.core.step import RowSampling
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling.stages import LogitRows

_WORD_BITS = 32
_NO_TOKEN = -1


class RowArrays:
    """Arrays [num_rows, width] on the device, a row for every row of the table. They take no memory until a request
    needs them, and get wider as requests do."""

    def __init__(self, table: RequestTable, *, fill: float, dtype: torch.dtype, width: int = 0) -> None:
        self._table = table
        self._fill = fill
        self._width = width
        self.values = torch.full((0, 0), fill, dtype=dtype, device=table.device)

    def put(self, row: int, values: np.ndarray) -> None:
        """Write a row's values; what it has beyond them is void."""
        if not self.values.numel() or len(values) > self.values.shape[1]:
            width = self._width or 1 << max(len(values) - 1, 0).bit_length()
            wider = self.values.new_full((self._table.num_rows, width), self._fill)
            wider[: len(self.values), : self.values.shape[1]] = self.values
            self.values = wider
        if len(values):
            self.values[row, : len(values)].copy_(self._table.upload(values)[0], non_blocking=True)


class LogitBias:
    """logit_bias: adds to the logits of tokens."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._ids = RowArrays(table, fill=0, dtype=torch.int32)
        self._biases = RowArrays(table, fill=0, dtype=torch.float32)
        self._counts = torch.zeros(table.num_rows, dtype=torch.int32, device=table.device)
        self._is_set = np.zeros(table.num_rows, dtype=np.bool_)

    def set_row(self, row: int, sampling: RowSampling) -> bool:
        pairs = sampling.params.logit_bias
        if not pairs and not self._is_set[row]:
            return False
        self._is_set[row] = bool(pairs)
        self._counts[row].fill_(len(pairs))
        if pairs:
            self._ids.put(row, np.array([token for token, _ in pairs], dtype=np.int32))
            self._biases.put(row, np.array([bias for _, bias in pairs], dtype=np.float32))
        return bool(pairs)

    def apply(self, logits: Tensor, of: LogitRows) -> Tensor:
        ops.bias_logits(logits, of.table_rows, self._ids.values, self._biases.values, self._counts)
        return logits


class AllowedTokens:
    """allowed_token_ids, and the bad words that are a single token: a bit mask of the vocabulary for each row."""

    def __init__(self, table: RequestTable, vocab_size: int) -> None:
        self._table = table
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._masks = RowArrays(table, fill=-1, dtype=torch.int32, width=self._num_words)
        self._needs = np.zeros(table.num_rows, dtype=np.bool_)

    def set_row(self, row: int, sampling: RowSampling) -> bool:
        allowed = sampling.params.allowed_token_ids
        bad = [word[0] for word in sampling.params.bad_token_ids if len(word) == 1]
        self._needs[row] = bool(allowed or bad)
        if self._needs[row]:
            bits = np.zeros(self._num_words * _WORD_BITS, dtype=np.uint8)
            bits[list(allowed) if allowed else slice(None)] = 1
            bits[bad] = 0
            self._masks.put(row, np.packbits(bits, bitorder="little").view(np.int32))
        return bool(self._needs[row])

    def apply(self, logits: Tensor, of: LogitRows) -> Tensor:
        (masks,) = self._table.upload(np.where(self._needs[of.rows], of.rows, -1))
        ops.mask_logits(logits, self._masks.values, masks)
        return logits


class MinTokens:
    """min_tokens: no token that would end the request is sampled before it has generated so many."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._ids = RowArrays(table, fill=_NO_TOKEN, dtype=torch.int64)
        self._first_end = np.zeros(table.num_rows, dtype=np.int64)

    def set_row(self, row: int, sampling: RowSampling) -> bool:
        min_tokens, stop_ids = sampling.params.min_tokens, sampling.stop_ids
        if not min_tokens or not stop_ids:
            self._first_end[row] = 0
            return False
        self._first_end[row] = sampling.num_prompt + min_tokens
        width = max(self._ids.values.shape[1], len(stop_ids))
        self._ids.put(row, np.array(stop_ids + [_NO_TOKEN] * (width - len(stop_ids)), dtype=np.int64))
        return True

    def apply(self, logits: Tensor, of: LogitRows) -> Tensor:
        (first_end,) = self._table.upload(self._first_end[of.rows])
        ids = self._ids.values.index_select(0, of.table_rows)  # [M, width]
        # Filled up with the first one: to change it twice is to change it once. (Rows without any change nothing.)
        ids = torch.where(ids == _NO_TOKEN, ids[:, :1], ids).clamp_min(0)
        forbids = (of.positions < first_end)[:, None]
        return logits.scatter_(1, ids, torch.where(forbids, -torch.inf, logits.gather(1, ids)))


class BadWords:
    """bad_words of several tokens: the last token of one is not sampled where the completion ends with its others."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._words: dict[int, list[tuple[int, ...]]] = {}
        self._num_prompt = np.zeros(table.num_rows, dtype=np.int64)

    def set_row(self, row: int, sampling: RowSampling) -> bool:
        self._num_prompt[row] = sampling.num_prompt
        self._words.pop(row, None)
        words = [word for word in sampling.params.bad_token_ids if len(word) > 1]
        if words:
            self._words[row] = words
        return bool(words)

    def apply(self, logits: Tensor, of: LogitRows) -> Tensor:
        pairs = [(index, word) for index, row in enumerate(of.rows.tolist()) for word in self._words.get(row, ())]
        lens = np.array([len(word) - 1 for _, word in pairs])
        most = int(lens.max())
        index, last, num_before, before, first = self._table.upload(
            np.array([index for index, _ in pairs]),
            np.array([word[-1] for _, word in pairs]),
            lens,
            _flat([word[:-1] for _, word in pairs], most),
            self._num_prompt[of.rows],
        )
        # The tokens before each of the positions, the nearest first, and what they are compared with: [pairs, most].
        back = torch.arange(1, most + 1, device=logits.device)
        positions = of.positions.index_select(0, index)[:, None] - back
        rows = of.table_rows.index_select(0, index)[:, None]
        tokens = self._table.token_ids[rows, positions.clamp(min=0)]
        same = (tokens == before.view(-1, most)) & (positions >= first.index_select(0, index)[:, None])
        found = (same | (back > num_before[:, None])).all(dim=1)
        # Added, not written: a token may end one word that is there and one that is not.
        added = torch.where(found, -torch.inf, 0.0).to(logits.dtype)
        return logits.index_put_((index, last), added, accumulate=True)


def _flat(words: Sequence[tuple[int, ...]], width: int) -> np.ndarray:
    """The words' tokens from the last one back, each word filled up to a width: [words * width]."""
    flat = np.full((len(words), width), -1, dtype=np.int64)
    for line, word in zip(flat, words, strict=True):
        line[: len(word)] = word[::-1]
    return flat.reshape(-1)
