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
_PROMPT = -2
"""In place of tokens that are not of the completion: no word has it."""
_NO_SLOT = -1
_MAX_COMPARED = 1 << 22
"""Tokens of words that are compared at the same time, which bounds the memory that it takes."""


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
    """bad_words of several tokens: the last token of one is not sampled where the completion ends with its others.

    The words stay on the device, [slots, words, tokens], with a slot for every row that has any. Each is written from
    its last token back, and filled up with _NO_TOKEN.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._words = torch.full((0, 0, 0), _NO_TOKEN, dtype=torch.int32, device=table.device)
        self._slots = np.full(table.num_rows, _NO_SLOT)
        self._num_prompt = np.zeros(table.num_rows, dtype=np.int64)

    def set_row(self, row: int, sampling: RowSampling) -> bool:
        self._slots[row] = _NO_SLOT
        words = [word for word in sampling.params.bad_token_ids if len(word) > 1]
        if not words:
            return False
        self._num_prompt[row] = sampling.num_prompt
        slot = int(np.setdiff1d(np.arange(len(self._slots)), self._slots)[0])
        self._make_room(slot + 1, len(words), max(map(len, words)))
        flat = _flat(words, *self._words.shape[1:])
        self._words[slot].view(-1).copy_(self._table.upload(flat)[0], non_blocking=True)
        self._slots[row] = slot
        return True

    def apply(self, logits: Tensor, of: LogitRows) -> Tensor:
        wanted = np.flatnonzero(self._slots[of.rows] != _NO_SLOT)
        rows = of.rows[wanted]
        indices = self._table.upload(wanted, self._slots[rows], self._num_prompt[rows])
        at_a_time = max(1, _MAX_COMPARED // self._words[0].numel())
        for index, slots, first in zip(*(tensor.split(at_a_time) for tensor in indices), strict=True):
            self._forbid(logits, of, index, slots, first)
        return logits

    def _forbid(self, logits: Tensor, of: LogitRows, index: Tensor, slots: Tensor, first: Tensor) -> None:
        """For logits `index`, whose completions begin at the positions `first`."""
        words = self._words.index_select(0, slots)  # [count, words, tokens]
        last, before = words[:, :, 0].long(), words[:, :, 1:]
        # The tokens before each of the positions, the nearest first: [count, tokens - 1].
        back = torch.arange(1, words.shape[2], device=logits.device)
        positions = of.positions.index_select(0, index)[:, None] - back
        rows = of.table_rows.index_select(0, index)[:, None]
        tokens = self._table.token_ids[rows, positions.clamp(min=0)]
        tokens = torch.where(positions >= first[:, None], tokens, _PROMPT)
        found = ((before == tokens[:, None, :]) | (before == _NO_TOKEN)).all(dim=2) & (last != _NO_TOKEN)
        # Added, not written: a token may end one word that is there and one that is not.
        added = torch.where(found, -torch.inf, 0.0).to(logits.dtype)
        logits.index_put_((index[:, None].expand_as(last), last.clamp_min(0)), added, accumulate=True)

    def _make_room(self, *needed: int) -> None:
        """For so many slots, words and tokens."""
        if all(need <= size for need, size in zip(needed, self._words.shape, strict=True)):
            return
        sizes = [max(1 << (need - 1).bit_length(), size) for need, size in zip(needed, self._words.shape, strict=True)]
        old = self._words
        self._words = old.new_full(sizes, _NO_TOKEN)
        self._words[: old.shape[0], : old.shape[1], : old.shape[2]] = old


def _flat(words: Sequence[tuple[int, ...]], num_words: int, num_tokens: int) -> np.ndarray:
    """The words' tokens from the last one back, filled up to so many words of so many tokens, in one dimension."""
    flat = np.full((num_words, num_tokens), _NO_TOKEN, dtype=np.int32)
    for line, word in zip(flat, words, strict=False):
        line[: len(word)] = word[::-1]
    return flat.reshape(-1)
