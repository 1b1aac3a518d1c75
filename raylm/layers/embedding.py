"""The token embedding and the head over the vocabulary, both split between tensor ranks by tokens, and learned
positions.

Each rank holds ceil(vocab_size / tensor_size) rows; what the last rank has too many is zero and never seen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylm.layers.slots import Slot, SlotName, empty_parameter
from raylm.layers.weight import PLAIN, Columns, Forms, Part, make_weight
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext


class PositionEmbedding(nn.Module):
    """Learned positions: positions [T] int64 -> [T, hidden_size]. Every rank has the whole table."""

    def __init__(
        self, num_rows: int, hidden_size: int, *, offset: int, context: ParallelContext, dtype: torch.dtype
    ) -> None:
        """`offset`: the row of position 0."""
        super().__init__()
        self._offset = offset
        self.weight = empty_parameter(num_rows, hidden_size, dtype=dtype, device=context.device)

    def forward(self, positions: Tensor) -> Tensor:
        # A draft model's rows may be longer than what it was made for; its drafts are bad there.
        return F.embedding((positions + self._offset).clamp_(max=len(self.weight) - 1), self.weight)

    def slots(self) -> dict[SlotName, Slot]:
        return {("weight", None): Slot(self.weight, tuple(self.weight.shape))}


class VocabParallelEmbedding(nn.Module):
    """token_ids [T] int64 -> [T, hidden_size]."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        context: ParallelContext,
        dtype: torch.dtype,
        bias: bool = False,
        forms: Forms = PLAIN,
    ) -> None:
        """`bias`: of the logits."""
        super().__init__()
        self._context = context
        self._vocab_size = vocab_size
        rows = -(-vocab_size // context.tensor_size)
        self._start = min(context.tensor_rank * rows, vocab_size)
        self._num_real = min(rows, vocab_size - self._start)
        part = Part(None, vocab_size, self._num_real, self._start, padding=rows - self._num_real)
        self.weight = make_weight(
            [part],
            Columns.whole(hidden_size),
            forms,
            dtype=dtype,
            device=context.device,
            deterministic=context.deterministic,
        )
        self.bias = empty_parameter(rows, dtype=dtype, device=context.device) if bias else None
        if self.bias is not None:
            self.bias[self._num_real :] = 0

    def forward(self, token_ids: Tensor) -> Tensor:
        if self._context.tensor_size == 1:
            return self.weight.rows(token_ids)
        local = token_ids - self._start
        elsewhere = (local < 0) | (local >= self._num_real)
        out = self.weight.rows(local.masked_fill(elsewhere, 0)).masked_fill_(elsewhere.unsqueeze(-1), 0)
        return collectives.all_reduce(out, self._context)

    def logits(self, hidden: Tensor, *, split: bool = False) -> Tensor:
        """hidden [S, hidden_size] times this table's transpose, plus the bias: [S, vocab_size] in hidden's type, on
        every rank. With `split`, each rank gets only its share of the rows (collectives.share_of)."""
        logits = collectives.all_gather(self.weight.matmul(hidden, self.bias), self._context, split=split)
        return logits if logits.shape[-1] == self._vocab_size else logits[:, : self._vocab_size]

    def slots(self) -> dict[SlotName, Slot]:
        slots = self.weight.named_slots("weight")
        if self.bias is not None:
            slots["bias", None] = Slot(self.bias[: self._num_real], (self._vocab_size,), start=self._start)
        return slots
