"""Mixtures of experts whose weights are codes, on a GPU, with CUDA graphs and without: answers are those of the decoded
model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.answering import answers, differences
from tests.models import test_mxfp4
from tests.support import checkpoints
from tests.support.greedy import random_prompts
from tests.support.quantised import KINDS, write_both

SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernels of experts in codes are for Hopper GPUs")


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3_moe", "fp8_128"),
        ("qwen3_moe", "ct_fp8_weights"),
        ("qwen3_moe", "awq"),
        ("qwen3_moe", "nf4"),
        ("mixtral", "ct_mxfp8"),
        ("qwen3_moe", "ct_w8a8"),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_answers_are_those_of_the_decoded_model(family: str, kind: str, graphs: bool, tmp_path: Path) -> None:
    if kind == "mxfp4":
        packed, _ = test_mxfp4.write_both(tmp_path)
    else:
        packed, _ = write_both(checkpoints.FAMILIES[family](tmp_path / "plain", **SIZES), tmp_path, KINDS[kind])
    prompts = random_prompts(8, 200)
    ours, theirs = (answers(packed, prompts, graphs=graphs, weights=weights) for weights in ("stored", "decoded"))
    found = differences(ours, theirs)
    assert len(found) > 30
    # The decoded numbers are rounded to bfloat16.
    assert max(found) < 1 and sum(found) < 0.05 * len(found)
