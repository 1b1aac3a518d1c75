"""The whole engine on a GPU where requests share prefixes that attention reads once: against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from raylm import ops
from raylm.worker import prefix_sharing
from tests.gpu.test_llm_on_cuda import GREEDY, assert_most_greedy, load, run
from tests.support import checkpoints

SIZES = {"max_position_embeddings": 1024}
CACHE = {"block_size": 16, "num_blocks": 400}


def prompts_of(vocab: int) -> list[list[int]]:
    """Ten that begin with the same 600 tokens, six with other 400, in turns, and one by itself."""

    def tokens(seed: int, count: int) -> list[int]:
        return [(seed * i * i + 13 * i + seed) % (vocab - 20) + 10 for i in range(count)]

    roots = tokens(5, 400), tokens(3, 600), tokens(3, 600)
    return [roots[n % 3] + tokens(n, 3 + 4 * n) for n in range(16)] + [tokens(17, 70)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_shared_prefixes_change_no_token(
    family: str, graphs: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints.FAMILIES[family](tmp_path, **SIZES)
    reference = checkpoints.reference(folder)
    if dtype == "bfloat16":
        for parameter in reference.parameters():
            parameter.data = parameter.data.bfloat16().float()
    looked, find = [], ops.shared_prefixes
    monkeypatch.setattr(ops, "shared_prefixes", lambda *given: looked.append(len(given[0])) or find(*given))
    monkeypatch.setattr(prefix_sharing, "LEAST_SAVED", 1 << 15)
    sections = {"cache": CACHE, "scheduler": {"max_num_seqs": 17}, "model": {"max_model_len": 800}}
    llm = load(folder, graphs=graphs, dtype=dtype, **sections)
    prompts = prompts_of(llm.info.vocab_size)
    for _ in range(3):  # Graphs are there from the second time on.
        found = run(llm, prompts)
        assert_most_greedy(reference, prompts, found, dtype=dtype)
    # Kernels are for 16 bits.
    assert bool(looked) == (dtype == "bfloat16")
    llm.close()
    looked.clear()
    plain = load(folder, graphs=graphs, dtype=dtype, runtime={"cascade_attention": False}, **sections)
    run(plain, prompts, GREEDY)
    assert not looked
    plain.close()
