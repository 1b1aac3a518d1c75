"""A deterministic model on a CPU, where torch's versions of the operators give a row the same bits as the GPUs' kernels
do: whatever else is in the step. So no layer calls an operator that sums by the number of rows."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from raylm import ops
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError
from raylm.layers.attention_backends import INVARIANT
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.check import check_model
from raylm.models.decoder import DecoderModel
from raylm.models.load import load_model
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext
from raylm.worker.deterministic import check_experts
from tests.models.paged import CPU
from tests.support import checkpoints
from tests.support.alone import Alone

LENGTH = 67
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


def test_what_cannot_be_computed_so_is_refused(tmp_path: Path) -> None:
    stored = checkpoints.llama(tmp_path / "stored")
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    (stored / "config.json").write_text(json.dumps(config))
    plain, all_heads = checkpoints.llama(tmp_path / "plain"), checkpoints.FAMILIES["olmo2"](tmp_path / "all")
    elsewhere = checkpoints.of_transformers("ArceeForCausalLM", tmp_path / "arcee")
    for path, sections, problem in (
        (elsewhere, {}, "runtime.deterministic is true, but this model runs through transformers"),
        (plain, {"model": {"quantization": "fp8"}}, "model.quantization is fp8, but runtime.deterministic is true"),
        (stored, {}, r"model.weights is stored, but .* this checkpoint is quantised \(.*\); allowed with it: decoded"),
        (all_heads, {"parallel": {"tensor": 2}}, "parallel.tensor is 2, but .* norms the heads of all ranks together"),
    ):
        model = {"path": str(path), "load_format": "dummy", **sections.get("model", {})}
        data = {**sections, "model": model, "runtime": {"deterministic": True}}
        with pytest.raises(ConfigError, match=problem):
            check_model(EngineConfig.model_validate(data))
        usual = EngineConfig.model_validate({**data, "runtime": {}})
        assert check_model(usual).num_layers > 0
    decoded = {"path": str(stored), "load_format": "dummy", "weights": "decoded"}
    check_model(EngineConfig.model_validate({"model": decoded, "runtime": {"deterministic": True}}))


def test_experts_without_kernels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = ArchConfig.from_source(locate(str(checkpoints.FAMILIES["mixtral"](tmp_path))))
    context = ParallelContext.single(CPU, deterministic=True)
    with pytest.raises(ConfigError, match="cpu has no kernels for 6 experts of 64 to 96 columns"):
        check_experts(arch, torch.bfloat16, context)
    monkeypatch.setattr(ops, "invariant_experts", lambda *_: True)
    check_experts(arch, torch.bfloat16, context)


def test_ranks_are_added_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a library or a kernel, whose order depends on how much there is."""
    parts = torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(0)).mul_(100).bfloat16()

    def gather(out: torch.Tensor, x: torch.Tensor, group: object) -> None:
        rows = slice(0, len(x))
        out.copy_(torch.cat([part[rows] for part in parts]))

    monkeypatch.setattr(collectives, "_all_gather", gather)
    context = ParallelContext(0, 0, 3, 0, 1, CPU, reducer=Mock(), deterministic=True)
    whole = collectives.all_reduce(parts[0], context)
    assert torch.equal(whole, ((parts[0].float() + parts[1].float()) + parts[2].float()).bfloat16())
    assert torch.equal(collectives.all_reduce(parts[0][:5], context), whole[:5])
    assert not context.reducer.takes.called


def test_the_same_numbers_up_to_rounding(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path)
    ours, usual = (Alone(load(folder, deterministic=which), LENGTH, num_blocks=64).whole() for which in (True, False))
    torch.testing.assert_close(ours, usual, rtol=1e-4, atol=1e-4)
