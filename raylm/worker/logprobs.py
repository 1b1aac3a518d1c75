"""Log probabilities for the rows that ask for them: of the model's own distribution, at temperature 1."""

from __future__ import annotations

import torch

from raylm.core.step import Candidates


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The log probability [num_rows] of one token a row. logits: [num_rows, vocab] float32."""
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    return chosen - logits.logsumexp(dim=-1)


def likeliest(logits: torch.Tensor, counts: list[int]) -> list[Candidates]:
    """The counts[i] likeliest tokens of row i, or all there are. logits: [num_rows, vocab] float32."""
    values, token_ids = logits.topk(min(max(counts), logits.shape[1]), dim=-1)
    values -= logits.logsumexp(dim=-1, keepdim=True)
    return [
        Candidates(tokens[:count], logprobs[:count])
        for tokens, logprobs, count in zip(token_ids.tolist(), values.tolist(), counts, strict=True)
    ]
