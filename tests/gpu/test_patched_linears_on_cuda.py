"""Linear layers as codes in patches on a GPU, with CUDA graphs and without: answers are those of the decoded model."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.gpu.answering import answers, differences
from tests.gpu.test_llm_on_cuda import load
from tests.models.test_gguf_patches import LEGACY, MEDIUM, OTHERS, written
from tests.support import checkpoints, torchao
from tests.support.greedy import random_prompts
from tests.support.quantised import KINDS, write_both

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernels of codes in patches are for Hopper GPUs")


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "awq"),
        ("qwen3", "gptq_128"),
        ("qwen2", "ct_w4a16_zeros"),
        ("phi3", "gptq_rows"),
        ("llama", "gptq_ordered"),
        ("qwen3", "fp8_128"),
        ("llama", "ct_int8"),
        ("llama", "ct_w8a8"),
        ("qwen2", "gptq_8"),
        ("llama", "ct_mxfp4"),
        ("llama", "ao_int4"),
        ("qwen3", "ao_tiles"),
        ("qwen2", "ao_intx_4_zeros"),
        ("llama", "ao_int8"),
        ("qwen3", "nf4"),
        ("qwen2", "ct_mxfp8"),
        ("llama", "nf4_nested_64"),
    ],
)
def test_answers_are_those_of_the_decoded_model(family: str, kind: str, graphs: bool, tmp_path: Path) -> None:
    packed, _ = write_both(
        checkpoints.FAMILIES[family](tmp_path / "plain", **SIZES), tmp_path, (KINDS | torchao.KINDS)[kind]
    )
    _compare(packed, graphs=graphs)


def _compare(packed: Path, *, graphs: bool) -> None:
    for prompts in (random_prompts(8, 200), random_prompts(1, 200)):  # one row may have a kernel of its own
        ours, theirs = (answers(packed, prompts, graphs=graphs, weights=weights) for weights in ("stored", "decoded"))
        found = differences(ours, theirs)
        assert len(found) > 3 * len(prompts)
        # The decoded numbers are rounded to bfloat16; of one row there are few to take the mean of.
        assert max(found) < 1 and sum(found) < (0.05 if len(prompts) > 1 else 0.15) * len(found)


@pytest.mark.parametrize("kinds", [MEDIUM, OTHERS, LEGACY], ids=["medium", "others", "legacy"])
def test_a_gguf_file_answers_as_decoded(kinds: dict[str, GGMLQuantizationType], tmp_path: Path) -> None:
    _compare(written(tmp_path, "qwen2", kinds), graphs=True)


def test_a_model_takes_a_third_of_the_memory(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain", hidden_size=512, intermediate_size=2048, num_hidden_layers=2)
    packed, _ = write_both(plain, tmp_path, KINDS["gptq_128"])
    held = {}
    for weights in ("decoded", "stored"):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        llm = load(packed, dtype="bfloat16", model={"weights": weights})
        held[weights] = torch.cuda.memory_allocated() - before
        llm.close()
        del llm
    assert held["stored"] < held["decoded"] - 6_000_000  # of 8.9 MB of linear layers
