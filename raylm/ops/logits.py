"""The operators `mask_logits` and `bias_logits` in terms of torch's own."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_logits(logits: Tensor, bitmask: Tensor, mask_rows: Tensor) -> None:
    if not bitmask.shape[0]:
        return
    words = bitmask[mask_rows.clamp(min=0)]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words[:, :, None] >> shifts & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(~allowed & (mask_rows >= 0)[:, None], float("-inf"))


def bias_logits(logits: Tensor, table_rows: Tensor, ids: Tensor, values: Tensor, counts: Tensor) -> None:
    if not ids.numel() or not logits.numel():
        return
    index = table_rows.clamp(min=0)
    tokens = ids[index].long()  # [M, N]
    valid = torch.arange(ids.shape[1], device=logits.device) < counts[index][:, None]
    valid &= (table_rows >= 0)[:, None] & (tokens >= 0) & (tokens < logits.shape[1])
    # What is no entry is another entry for token 0, with the bias that this token has: it does not matter which is
    # written last.
    tokens = torch.where(valid, tokens, 0)
    biases = torch.where(valid, values[index], 0)
    biases = torch.where(tokens == 0, torch.where(tokens == 0, biases, 0).sum(1, keepdim=True), biases)
    before = logits.gather(1, tokens)
    most = torch.finfo(logits.dtype).max
    after = (before.float() + biases).clamp_(-most, most).to(logits.dtype)
    logits.scatter_(1, tokens, torch.where((biases == 0) | before.isinf(), before, after))
