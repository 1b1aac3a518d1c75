"""Matrices that stay as their file has them: the right blocks in the right places, and the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType
from safetensors.torch import load_file, save_file

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.weight import BlockWeight, PlainWeight
from raylm.models.scheme import stored_forms
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, PagedRun, generate, load
from tests.models.stored import assert_equal, matrices
from tests.support import checkpoints

KINDS = {
    "attn_q": GGMLType.Q8_0,
    "attn_k": GGMLType.Q4_1,
    "attn_v": GGMLType.Q5_0,
    "attn_output": GGMLType.Q4_0,
    "ffn_gate": GGMLType.Q8_0,
    "ffn_up": GGMLType.Q5_1,
    "ffn_down": GGMLType.Q8_0,
    "token_embd": GGMLType.Q4_0,
    "output": GGMLType.Q8_0,
}
PROMPTS = {"a": list(range(20)), "b": [3, 1, 4]}


@pytest.fixture(autouse=True)
def exact_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were kernels for every kind, with the products of the fallback, which are exact."""
    monkeypatch.setattr(ops, "block_kernels", lambda like, kind: True)
    monkeypatch.setattr("raylm.ops.blocks._has_kernels", lambda device, kind: False)


def written(folder: Path, family: str, kinds: dict[str, GGMLType] = KINDS, **changes: object) -> Path:
    hf = checkpoints.FAMILIES[family](folder / "hf", **changes)
    return checkpoints.write_gguf(hf, folder / "model.gguf", kinds)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "glm4", "olmo2", "qwen2_moe"])
def test_the_same_model(family: str, tmp_path: Path) -> None:
    window = ["sliding_attention"] * 5 + ["full_attention"]
    changes = {"gemma3": {"layer_types": window, "query_pre_attn_scalar": 16}}
    path = written(tmp_path, family, **changes.get(family, {}))
    stored, plain = load(path, as_stored=True), load(path)
    assert stored_forms(plain) == {} and stored_forms(stored).total() >= 6 * plain.arch.num_layers / 2
    assert sum(x.nbytes for x in stored.parameters()) < 0.8 * sum(x.nbytes for x in plain.parameters())
    texts, logits = generate(PagedRun(stored), PROMPTS, num_tokens=4)
    expected_texts, expected = generate(PagedRun(plain), PROMPTS, num_tokens=4)
    assert texts == expected_texts
    for name in PROMPTS:
        torch.testing.assert_close(logits[name], expected[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 1), (3, 1), (4, 1)])
def test_each_rank_has_its_part(tensor: int, pipeline: int, tie: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3} if tensor == 3 else {}
    path = written(tmp_path, "llama", tie_word_embeddings=tie, intermediate_size=192, **sizes)
    assert_equal(path, tensor=tensor, pipeline=pipeline)


def test_columns_that_cut_blocks_are_decoded(tmp_path: Path) -> None:
    # o_proj has 96 columns, 48 a rank: three heads, one and a half blocks. So has down_proj, of which the first has 64.
    path = written(tmp_path, "llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=6)
    layer = load(path, context=ParallelContext(0, 0, 2, 0, 1, CPU), as_stored=True).layers["0"]
    assert isinstance(layer.self_attn.o_proj.weight, PlainWeight)
    assert isinstance(layer.self_attn.qkv_proj.weight, BlockWeight)
    assert isinstance(layer.mlp.down_proj.weight, BlockWeight)
    assert_equal(path, tensor=2)


def test_one_plain_part_makes_the_matrix_plain(tmp_path: Path) -> None:
    kinds = {name: kind for name, kind in KINDS.items() if name != "attn_k"}  # keys in F16
    model = load(written(tmp_path, "llama", kinds), as_stored=True)
    attention = model.layers["1"].self_attn
    assert isinstance(attention.qkv_proj.weight, PlainWeight)
    assert isinstance(attention.o_proj.weight, BlockWeight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_matrices_of_16_bits_stay_so(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "takes_narrow_weights", lambda like: like.dtype == torch.float32)
    folder = checkpoints.FAMILIES[family](tmp_path)
    path = folder / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    stored, plain = load(folder, as_stored=True), load(folder)
    assert stored_forms(stored) == {str(dtype).removeprefix("torch."): len(matrices(stored))}
    assert stored_forms(load(folder, as_stored=True, dtype=dtype)) == {}
    texts, logits = generate(PagedRun(stored), PROMPTS, num_tokens=4)
    expected_texts, expected = generate(PagedRun(plain), PROMPTS, num_tokens=4)
    assert texts == expected_texts
    for name in PROMPTS:
        assert torch.equal(logits[name], expected[name])


def test_a_file_cut_short(tmp_path: Path) -> None:
    path = written(tmp_path, "llama")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="the file ends inside tensor .*: it is cut short"):
        load(path, as_stored=True)


def test_devices_without_kernels_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "block_kernels", lambda like, kind: kind != GGMLType.Q8_0)
    model = load(written(tmp_path, "llama"), as_stored=True)
    assert isinstance(model.layers["0"].self_attn.o_proj.weight, BlockWeight)
    assert isinstance(model.layers["0"].mlp.down_proj.weight, PlainWeight)
