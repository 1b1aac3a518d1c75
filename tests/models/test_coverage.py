"""What a model is told of a GPU that lacks kernels for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raylm import ops
from raylm.layers.attention_backends import INVARIANT, RAYLM, AttentionBackend, Setting
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.coverage import slow_parts
from tests.support import checkpoints

GPU = torch.device("meta")
"""A device that has nothing compiled, as a GPU may be."""


@pytest.fixture
def arch(tmp_path: Path) -> ArchConfig:
    return ArchConfig.from_source(locate(str(checkpoints.llama(tmp_path))))


def _parts(arch: ArchConfig, attention: AttentionBackend = RAYLM) -> list[str]:
    return slow_parts(arch, Setting(GPU, torch.bfloat16, arch.head_dim, 16), attention)


def test_each_part_is_named_with_its_reason(arch: ArchConfig) -> None:
    attention, products, sampling = _parts(arch)
    assert attention.startswith(f"attention of decode and prefill: heads of size {arch.head_dim} in bfloat16 have no")
    assert products.startswith("products of few rows in bfloat16 are torch's")
    assert sampling.startswith("sampling") and f"{arch.vocab_size:,} logits" in sampling


def test_only_what_is_slow_is_named(arch: ArchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_parts(arch, replace(RAYLM, name="another"))) == 2
    monkeypatch.setattr(ops, "attention_kernels", lambda *_, **__: (True, False))
    monkeypatch.setattr(ops, "linear_rows", lambda _: 64)
    monkeypatch.setattr(ops, "sample_is_async", lambda *_: True)
    (only,) = _parts(arch)
    assert only.startswith("attention of prefill")
    assert _parts(arch, INVARIANT)[0].startswith("attention of decode and prefill")
    monkeypatch.setattr(ops, "attention_kernels", lambda *_, **__: (False, True))
    assert _parts(arch, INVARIANT) == []
    monkeypatch.setattr(ops, "attention_kernels", lambda *_, **__: (True, True))
    assert _parts(arch) == []


def test_layers_of_transformers_are_named(tmp_path: Path) -> None:
    folder = checkpoints.of_transformers("ArceeForCausalLM", tmp_path)
    assert _parts(ArchConfig.from_source(locate(str(folder))))[0].startswith("layers are transformers' modules")


def test_nothing_is_said_of_a_cpu(arch: ArchConfig) -> None:
    assert slow_parts(arch, Setting(torch.device("cpu"), torch.float32, arch.head_dim, 16), RAYLM) == []


@pytest.mark.gpu
def test_a_usual_model_has_all_kernels_on_hopper(arch: ArchConfig) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this is for a GPU of compute capability 9.0")
    q = torch.empty(0, 32, 128, dtype=torch.bfloat16, device="cuda")
    assert ops.attention_kernels(q, 8, 16, biased=False) == (True, True)
    assert ops.attention_kernels(q, 8, 16, biased=True) == (True, True)
    assert ops.attention_kernels(q[..., :72], 8, 16, biased=False) == (True, False)
    assert ops.attention_kernels(q.float(), 8, 16, biased=False) == (False, False)
    assert ops.linear_rows(q) == 64 and ops.linear_rows(q.float()) == 0
    assert ops.sample_is_async(q.device, 262_144)
