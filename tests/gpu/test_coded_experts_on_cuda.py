"""Mixtures of experts whose weights are codes, on a GPU, with CUDA graphs and without: answers are those of the decoded
model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raylm import ops
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


@pytest.mark.parametrize("kind", [None, "fp8_128", "gptq_128"])
def test_one_row_in_one_kernel_answers_as_layer_by_layer(
    kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = SIZES | {"head_dim": 128, "moe_intermediate_size": 256, "num_experts": 8}
    path = checkpoints.FAMILIES["qwen3_moe"](tmp_path / "plain", **sizes)
    if kind is not None:
        path, _ = write_both(path, tmp_path, KINDS[kind])
    found: list[float] = []
    taken: list[int] = []
    rows = ops.few_layers_rows

    def seen(*args: object, **keywords: object) -> int:
        taken.append(rows(*args, **keywords))
        return taken[-1]

    monkeypatch.setattr(ops, "few_layers_rows", seen)
    prompts = [[[7 * i % 190 + 3 for i in range(length)]] for length in (5, 30, 50)]
    ours = [answers(path, one) for one in prompts]
    assert taken and all(each == 1 for each in taken)
    monkeypatch.setattr(ops, "few_layers_rows", lambda *args, **keywords: 0)
    for mine, one in zip(ours, prompts, strict=True):
        found += differences(mine, answers(path, one))
    assert max(found) < 1 and sum(found) < 0.05 * len(found)
