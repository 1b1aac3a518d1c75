"""A deterministic model on a CPU, where torch's versions of the operators give a row the same bits as the GPUs' kernels
do: whatever else is in the step. So no layer calls an operator that sums by the number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raylm import ops
from raylm.layers.attention_backends import INVARIANT
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.decoder import DecoderModel
from raylm.models.load import load_model
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU
from tests.support import checkpoints
from tests.support.alone import Alone

LENGTH = 83
USUAL = ("llama", "gemma3", "bloom", "olmo2", "stablelm", "deepseek")
"""Windows, linear biases, norms by mean and variance, of all heads together, layers side by side, a router."""
FAMILIES = sorted(checkpoints.FAMILIES.keys() - {"qwen2_moe"})
"""Without one whose gate has a single column: on a CPU, torch's sigmoid rounds another way where vectors end."""


def load(folder: Path, *, deterministic: bool = True) -> DecoderModel:
    source = locate(str(folder))
    context = ParallelContext.single(CPU, deterministic=deterministic)
    arch = ArchConfig.from_source(source)
    how = {"attention": INVARIANT} if deterministic else {}
    return load_model(source, arch, context, torch.float32, "auto", progress=False, **how)


@pytest.fixture
def experts_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's kernels are: those for CPUs multiply an expert's rows as many as there are."""

    def each(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *rest: object, **options: object):
        weights, chosen, activation = rest
        rows = [slice(row, row + 1) for row in range(len(x))]
        return torch.cat([every(x[r], gate_up, down, weights[r], chosen[r], activation, **options) for r in rows])

    every = ops.experts
    monkeypatch.setattr(ops, "experts", each)


@pytest.mark.parametrize(
    "family",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES],
)
def test_logits_do_not_depend_on_the_rest_of_a_step(family: str, experts_row_by_row: None, tmp_path: Path) -> None:
    alone = Alone(load(checkpoints.FAMILIES[family](tmp_path)), LENGTH, num_blocks=64)
    expected = alone.whole()
    assert torch.equal(alone.in_chunks(17), expected)
    assert torch.equal(alone.in_chunks(LENGTH, others=9), expected)
    assert torch.equal(alone.decoded(31, others=3), expected)


def test_the_same_numbers_up_to_rounding(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path)
    ours, usual = (Alone(load(folder, deterministic=which), LENGTH, num_blocks=64).whole() for which in (True, False))
    torch.testing.assert_close(ours, usual, rtol=1e-4, atol=1e-4)
