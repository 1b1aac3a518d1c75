"""Log probabilities for the rows that ask for them: of the model's own distribution, at temperature 1."""

from __future__ import annotations

from torch import Tensor

from raylm.worker.pending import Likeliest


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The log probability [num_rows] of one token a row. logits: [num_rows, vocab] float32."""
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    return chosen - logits.logsumexp(dim=-1)


def likeliest(logits: Tensor, counts: list[int]) -> Likeliest:
    """The counts[i] likeliest tokens of row i, or all there are. logits: [num_rows, vocab] float32."""
    values, token_ids = logits.topk(min(max(counts), logits.shape[1]), dim=-1)
    return Likeliest(token_ids, values - logits.logsumexp(dim=-1, keepdim=True), counts)
