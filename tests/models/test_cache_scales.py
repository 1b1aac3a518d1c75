"""Scales of a quantised KV cache: what checkpoints call them, which are used, and what they do."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.attention import CacheScales
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.cache_scales import read_cache_scales
from tests.models.paged import PagedRun, generate, load
from tests.support import checkpoints
from tests.support.quantised import FILE, change_config

FLOATS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
LAYER = "model.layers.1."


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    """A llama of two layers whose files have these tensors as well."""
    plain, made = checkpoints.llama(folder / "plain", num_hidden_layers=2), folder / "made"
    shutil.copytree(plain, made)
    save_file(load_file(plain / FILE) | tensors, made / FILE)
    of_cache = config or {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": FLOATS}
    change_config(made, quantization_config=of_cache)
    return made


def scales_of(path: Path) -> dict[int, CacheScales]:
    source = locate(str(path))
    return read_cache_scales(source, ArchConfig.from_source(source), "auto")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"self_attn.k_scale": 0.5, "self_attn.v_scale": 0.25}, CacheScales(0.5, 0.25)),
        ({"self_attn.attn.k_scale": 0.5, "self_attn.attn.v_scale": 2.0}, CacheScales(0.5, 2.0)),
        ({"self_attn.k_proj.k_scale": 0.5, "self_attn.v_proj.v_scale": 2.0}, CacheScales(0.5, 2.0)),
        ({"self_attn.k_proj.output_scale": 3.0, "self_attn.v_proj.output_scale": 2.0}, CacheScales(3.0, 2.0)),
        ({"self_attn.kv_scale": 0.125}, CacheScales(0.125, 0.125)),
        ({"self_attn.v_scale": 0.25}, CacheScales(1.0, 0.25)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_every_name(
    names: dict[str, float],
    expected: CacheScales,
    shape: tuple[int, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tensors = {LAYER + name: torch.full(shape, value) for name, value in names.items()}
    others = {LAYER + "self_attn.q_scale": torch.ones(1), LAYER + "self_attn.q_proj.output_scale": torch.ones(1)}
    with caplog.at_level(logging.INFO, logger="raylm"):
        assert scales_of(checkpoint(tmp_path, tensors | others)) == {1: expected}
    assert "KV cache: fp8, with the checkpoint's scales in 1 of 2 layers" in caplog.messages


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": FLOATS},
    ],
    ids=["algorithm", "scheme"],
)
def test_scales_of_modelopt(config: dict[str, object], tmp_path: Path) -> None:
    scale = torch.tensor(0.5, dtype=torch.bfloat16)
    path = checkpoint(tmp_path, {LAYER + "self_attn.k_proj.k_scale": scale}, **config)
    assert scales_of(path) == {1: CacheScales(0.5, 1.0)}


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "NVFP4"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": {**FLOATS, "num_bits": 4},
        },
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {**FLOATS, "type": "int"}},
    ],
    ids=["nvfp4", "4 bits", "integers"],
)
def test_scales_for_other_numbers_are_not_used(
    config: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(tmp_path, {LAYER + "self_attn.k_scale": torch.tensor(0.5)}, **config)
    with caplog.at_level(logging.INFO, logger="raylm"):
        assert scales_of(path) == {}
    assert "KV cache: fp8, with scales of 1: the checkpoint has none for such numbers" in caplog.messages


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        (torch.ones(4, 1, 1), r"k_scale has shape \(4, 1, 1\); allowed with cache.dtype fp8: one number"),
        (torch.zeros(1), "k_scale is 0; allowed: positive numbers"),
        (torch.tensor(float("nan")), "k_scale is nan; allowed: positive numbers"),
        (torch.tensor(float("inf")), "k_scale is inf; allowed: positive numbers"),
    ],
)
def test_wrong_scales_are_named(scale: torch.Tensor, problem: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, {LAYER + "self_attn.k_scale": scale})
    with pytest.raises(ConfigError, match=problem):
        scales_of(path)


def test_a_layer_stores_and_reads_by_its_scales(tmp_path: Path) -> None:
    """Powers of two shift codes, so that answers stay; numbers past the largest code show a scale that is too small."""
    names = {LAYER + "self_attn.k_scale": 0.25, LAYER + "self_attn.v_scale": 2.0**-6}
    path = checkpoint(tmp_path, {name: torch.tensor(value) for name, value in names.items()})
    prompts = {"a": [3, 5, 7, 9, 4], "b": [8, 1]}
    found = []
    for scaled in (False, True):
        run = PagedRun(load(path, cache_codes=scaled), dtype=ops.CODES)
        found.append((generate(run, prompts, num_tokens=3), run.caches))
    (plain_tokens, plain_logits), plain = found[0]
    (tokens, logits), scaled_caches = found[1]
    assert tokens == plain_tokens
    for row in plain_logits:
        torch.testing.assert_close(logits[row], plain_logits[row], atol=0.05, rtol=0.05)
    assert torch.equal(plain[0][0].view(torch.uint8), scaled_caches[0][0].view(torch.uint8))
    keys, values = (cache.float().nan_to_num() for cache in plain[1])
    assert float((scaled_caches[1][0].float().nan_to_num() * 0.25 - keys).norm() / keys.norm()) < 0.05
    assert float((scaled_caches[1][1].float().nan_to_num() * 2.0**-6 - values).norm() / values.norm()) < 0.1
