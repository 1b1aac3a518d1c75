"""An FP8 KV cache on a GPU, with CUDA graphs and without: its kernels give what torch's operators give on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.answering import WISHES, Answers, differences, places
from tests.gpu.test_llm_on_cuda import ROOMY, TIGHT, load
from tests.support import checkpoints
from tests.support.greedy import random_prompts


def answers(folder: Path, prompts: list[list[int]], *, device: str = "cuda", dtype: str, graphs: bool) -> Answers:
    sections = {**TIGHT, "cache": {**TIGHT["cache"], "dtype": "fp8", "swap_gib": 0.01}, "runtime": {"device": device}}
    llm = load(folder, graphs=graphs, dtype=dtype, **sections)
    for _ in range(3):  # Graphs are there from the second time on.
        completions = llm.generate(prompts, WISHES, progress=False)
    assert llm._engine.stats().num_preemptions > 0, "the test is meant to preempt"
    llm.close()
    return places(completions)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_answers_are_those_of_torchs_operators(family: str, dtype: str, graphs: bool, tmp_path: Path) -> None:
    """A number that rounds another way may get another code, an eighth away."""
    folder = checkpoints.FAMILIES[family](tmp_path)
    prompts = random_prompts(8, checkpoints.VOCAB_SIZE)
    ours = answers(folder, prompts, dtype=dtype, graphs=graphs)
    found = differences(ours, answers(folder, prompts, device="cpu", dtype=dtype, graphs=graphs))
    assert len(found) > 30
    assert max(found) < 1.0 and sum(found) < 0.1 * len(found)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_that_have_kernels(head_dim: int, tmp_path: Path) -> None:
    """Prompts of several hundred tokens, in chunks, and decode behind them: graphs or not, one request or many."""
    folder = checkpoints.llama(tmp_path, head_dim=head_dim, max_position_embeddings=1024)
    prompts = [[(7 * i + 3 * n) % checkpoints.VOCAB_SIZE for n in range(200 + 60 * i)] for i in range(6)]
    found = []
    for graphs in (False, True):
        sections = {**ROOMY, "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 256}}
        sections["cache"] = {**ROOMY["cache"], "dtype": "fp8"}
        llm = load(folder, graphs=graphs, dtype="bfloat16", model={"max_model_len": 640}, **sections)
        for _ in range(2):
            completions = llm.generate(prompts, WISHES, progress=False)
        llm.close()
        found.append(
            [
                [{token: entry.logprob for token, entry in place.items()} for place in completion.outputs[0].logprobs]
                for completion in completions
            ]
        )
    assert max(differences(*found)) < 0.2


def test_twice_as_many_tokens_fit(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path)
    blocks = {}
    for dtype in ("auto", "fp8"):
        torch.cuda.empty_cache()
        cache = {"block_size": 16, "dtype": dtype, "gpu_memory_utilization": 0.2}
        llm = load(folder, dtype="bfloat16", cache=cache)
        blocks[dtype] = llm.info.num_blocks
        llm.close()
    assert blocks["fp8"] == pytest.approx(2 * blocks["auto"], rel=0.03)
