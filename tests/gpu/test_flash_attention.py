"""FlashAttention of vLLM's packages against our reference, and through the whole engine; skipped without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raylm import LLM, EngineConfig, SamplingParams
from raylm.errors import ConfigError
from raylm.layers.alibi import alibi_slopes
from raylm.layers.attention import AttentionMetadata, Scores
from raylm.layers.attention_backends import AttentionBackend, Setting, choose_backend
from raylm.ops import fallback
from tests.support import checkpoints
from tests.support.greedy import assert_greedy, random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def flash_or_skip(*, alibi: bool = False) -> AttentionBackend:
    try:
        setting = Setting(torch.device("cuda"), torch.bfloat16, head_dim=64, block_size=16, alibi=alibi)
        return choose_backend("flash_attn", setting)[0]
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (24, 0.0), (0, 20.0), (24, 20.0)])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("lengths", [[(5, 5), (1, 40), (70, 90)], [(1, 1), (1, 90), (1, 33)]], ids=["mixed", "decode"])
def test_it_computes_what_the_reference_does(
    lengths: list[tuple[int, int]], alibi: bool, window: int, soft_cap: float, dtype: torch.dtype
) -> None:
    flash = flash_or_skip(alibi=alibi)
    torch.manual_seed(0)
    query_lens, seq_lens = (torch.tensor(column, dtype=torch.int32) for column in zip(*lengths, strict=True))
    options = {"dtype": dtype, "device": "cuda"}
    q = torch.randn(int(query_lens.sum()), 8, 64, **options)[:, :4]
    cache = torch.randn(20, 16, 2, 64, **options), torch.randn(20, 16, 2, 64, **options)
    step = AttentionMetadata(
        query_start=torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0, dtype=torch.int32)]).cuda(),
        seq_lens=seq_lens.cuda(),
        block_table=torch.randperm(20, dtype=torch.int32)[:18].view(3, 6).cuda(),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
    )
    slopes = alibi_slopes(4).cuda() if alibi else None
    scores = Scores(scale=0.2, window=window, soft_cap=soft_cap, alibi_slopes=slopes)
    found = flash.attend(q, cache, flash.plan(step), scores)
    assert found.is_contiguous()
    lengths_of_step = step.query_start, step.seq_lens, step.max_query_len, step.max_seq_len
    expected = fallback.paged_attention(q, *cache, step.block_table, *lengths_of_step, 0.2, window, soft_cap, slopes)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom"])
def test_a_family_equals_transformers(family: str, tmp_path: Path) -> None:
    flash = flash_or_skip(alibi=family == "bloom")
    changes = {"num_attention_heads": 2} if family == "bloom" else {"head_dim": 32}
    folder = checkpoints.FAMILIES[family](tmp_path, **changes)
    reference = checkpoints.reference(folder)
    for parameter in reference.parameters():
        parameter.data = parameter.data.bfloat16().float()
    data = {
        "model": {"path": str(folder), "max_model_len": 64, "dtype": "bfloat16"},
        "cache": {"block_size": 16, "num_blocks": 60},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
        "runtime": {"device": "cuda", "attention": flash.name},
    }
    llm = LLM(EngineConfig.model_validate(data), progress=False)
    prompts = random_prompts(8, llm.info.vocab_size)
    for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY, progress=False), strict=True):
        assert_greedy(reference, prompt, completion.outputs[0].token_ids)
    llm.close()
