"""The slopes of linear biases, and attention with them: each rank has those of its heads."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from raylm.errors import ConfigError
from raylm.layers.alibi import alibi_slopes, alibi_slopes_of_rank
from raylm.layers.attention import Attention, AttentionMetadata
from raylm.layers.attention_backends import RAYLM, AttentionBackend, Setting, choose_backend
from raylm.parallel.context import ParallelContext

CPU = torch.device("cpu")


def torch_backend() -> AttentionBackend:
    return choose_backend("torch", Setting(CPU, torch.float32, head_dim=16, block_size=4))[0]


def test_the_papers_own_numbers() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]


@pytest.mark.parametrize("num_heads", [1, 2, 3, 12, 16, 20, 32, 71, 112])
def test_any_number_of_heads_has_blooms_slopes(num_heads: int) -> None:
    at_one = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    found = alibi_slopes(num_heads)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, at_one)


def test_slopes_that_ranks_cannot_share() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads is 4, which parallel.tensor 3 cannot divide"):
        alibi_slopes_of_rank(4, ParallelContext(0, 0, 3, 0, 1, CPU))


@pytest.mark.parametrize("backend", [RAYLM, torch_backend()], ids=["raylm", "torch"])
def test_ranks_attend_as_one_does(backend: AttentionBackend) -> None:
    """Of six heads over three key/value heads, three ranks have two and one each."""
    torch.manual_seed(0)
    q, cache = torch.randn(9, 6, 16), (torch.randn(8, 4, 3, 16), torch.randn(8, 4, 3, 16))
    meta = AttentionMetadata(
        query_start=torch.tensor([0, 1, 9], dtype=torch.int32),
        seq_lens=torch.tensor([13, 11], dtype=torch.int32),
        block_table=torch.tensor([[5, 0, 7, 2], [1, 3, 6, 6]], dtype=torch.int32),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_len=8,
        max_seq_len=13,
    )

    planned = backend.plan(meta)

    def attend(context: ParallelContext, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        slopes = alibi_slopes_of_rank(6, context)
        return Attention(backend, scale=0.25, window=0, soft_cap=0.0, alibi_slopes=slopes)(q, cache, planned)

    whole = attend(ParallelContext.single(CPU), q, cache)
    plain = Attention(backend, scale=0.25, window=0, soft_cap=0.0)(q, cache, planned)
    assert (whole - plain).abs().max() > 0.1
    for rank in range(3):
        k, v = (part[:, :, rank : rank + 1] for part in cache)
        heads = slice(2 * rank, 2 * rank + 2)
        found = attend(ParallelContext(rank, rank, 3, 0, 1, CPU), q[:, heads], (k, v))
        torch.testing.assert_close(found, whole[:, heads], atol=1e-5, rtol=1e-5)
