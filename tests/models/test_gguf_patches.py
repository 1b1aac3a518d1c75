"""A GGUF file's matrices as codes in patches, kept so where GPUs have kernels; torch stands for these here."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as GGMLType
from torch import Tensor

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.experts import ParallelExperts
from raylm.layers.slots import BlockForm, PatchForm
from raylm.layers.weight import MixedWeight, PatchedWeight, PlainWeight
from raylm.model_files.source import ModelSource, locate
from raylm.models.arch import ArchConfig
from raylm.models.decoder import DecoderModel
from raylm.models.gguf import gguf_tensors
from raylm.models.gguf_patched import BlocksInPatches, patches_of
from raylm.models.load import _may_stay, file_scheme
from raylm.models.scheme import AS_NUMBERS, stored_forms
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, PagedRun, generate, load
from tests.models.test_gguf_layouts import Apart, Joining
from tests.models.test_gguf_tensors import random_bytes, write
from tests.support import checkpoints

EXACT = {
    "Q4_0": PatchForm("int4", 32),
    "Q5_0": PatchForm("int8", 32),
    "Q8_0": PatchForm("int8", 32),
    "Q3_K": PatchForm("int8", 16),
    "IQ4_NL": PatchForm("int8", 32),
    "IQ4_XS": PatchForm("int8", 32),
    "MXFP4": PatchForm("mxfp4", 32),
}
"""Types whose patches hold a file's numbers as they are."""
MINIMA = {
    "Q4_1": (PatchForm("affine4", 32), 2),
    "Q5_1": (PatchForm("affine8", 32), 2),
    "Q2_K": (PatchForm("affine4", 16), 82),
    "Q4_K": (PatchForm("affine4", 32), 2),
    "Q5_K": (PatchForm("affine8", 32), 2),
}
"""Types with a scale and an offset, and the byte of a block at which that of the offset is."""
FORMS = EXACT | {name: form for name, (form, _) in MINIMA.items()} | {"Q6_K": PatchForm("int8", 16)}
SHAPE = (256, 1024)
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "num_hidden_layers": 1}
MEDIUM = {
    "attn_q": GGMLType.Q4_K,
    "attn_k": GGMLType.Q4_K,
    "attn_v": GGMLType.Q6_K,
    "attn_output": GGMLType.Q4_K,
    "ffn_gate": GGMLType.Q4_K,
    "ffn_up": GGMLType.Q4_K,
    "ffn_down": GGMLType.Q6_K,
    "token_embd": GGMLType.Q6_K,
}
"""As Q4_K_M has them in half of the layers."""
OTHERS = {
    "attn_q": GGMLType.Q5_0,
    "attn_k": GGMLType.Q8_0,
    "attn_v": GGMLType.IQ4_NL,
    "attn_output": GGMLType.IQ4_XS,
    "ffn_gate": GGMLType.Q2_K,
    "ffn_up": GGMLType.Q2_K,
    "ffn_down": GGMLType.Q3_K,
}
LEGACY = {
    "attn_q": GGMLType.Q4_1,
    "attn_k": GGMLType.Q4_0,
    "attn_v": GGMLType.Q5_1,
    "attn_output": GGMLType.Q4_0,
    "ffn_gate": GGMLType.Q5_K,
    "ffn_up": GGMLType.Q5_1,
    "ffn_down": GGMLType.MXFP4,
}
PROMPTS = {"a": [(5 * i + 3) % 300 + 3 for i in range(20)], "b": [3, 1, 4]}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU had the kernels of a GPU, and none of its own."""

    def takes(numbers: ops.Numbers, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> bool:
        return rows % ops.PATCH_ROWS == 0 and columns % ops.PATCHED_UNIT == 0

    def takes_experts(
        numbers: ops.Numbers, num_experts: int, hidden: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> bool:
        return hidden % ops.PATCH_ROWS == 0 and size % ops.PATCH_ROWS == 0

    monkeypatch.setattr(ops, "takes_patched", takes)
    monkeypatch.setattr(ops, "takes_patched_experts", takes_experts)
    monkeypatch.setattr(ops, "block_kernels", lambda like, kind: False)
    monkeypatch.setattr(ops, "takes_narrow_weights", lambda like: False)


def in_file(path: Path, name: str, raw: np.ndarray) -> BlocksInPatches:
    write(path, {"x": (raw, GGMLType[name])})
    (tensor,) = gguf_tensors(ModelSource(path, "gguf"))
    return BlocksInPatches(tensor)


def numbers_of(tensor: BlocksInPatches, name: str) -> Tensor:
    rows, columns = tensor.shape
    pieces = torch.cat([piece for _, piece in tensor.pieces(0, rows // ops.PATCH_ROWS)])
    return ops.unpack(pieces, *FORMS[name], columns)


def written(folder: Path, family: str, kinds: dict[str, GGMLType], **changes: object) -> Path:
    hf = checkpoints.FAMILIES[family](folder / "hf", **{**SIZES, **changes})
    return checkpoints.write_gguf(hf, folder / "model.gguf", kinds)


def matrices(model: DecoderModel) -> dict[str, PlainWeight | PatchedWeight | MixedWeight]:
    kinds = PlainWeight | PatchedWeight | MixedWeight
    found = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    return {name: module for name, module in found.items() if ".runs." not in name}


def read(weight: PlainWeight | PatchedWeight | MixedWeight) -> Tensor:
    if isinstance(weight, MixedWeight):
        return torch.cat([read(run) for run in weight.runs])
    if isinstance(weight, PlainWeight):
        return weight.values
    return ops.unpack(weight.patches, *weight.form, weight.num_values // (len(weight.patches) * ops.PATCH_ROWS))


def assert_close(found: Tensor, expected: Tensor) -> None:
    """But for rounding to bfloat16."""
    torch.testing.assert_close(found, expected, atol=float(expected.abs().max()) / 64, rtol=0)


@pytest.mark.parametrize("name", EXACT)
def test_codes_hold_the_numbers(name: str, tmp_path: Path) -> None:
    raw = random_bytes(GGMLType[name], SHAPE)
    expected = torch.tensor(gguf.dequantize(raw, GGMLType[name]))
    assert torch.equal(numbers_of(in_file(tmp_path / "a.gguf", name, raw), name), expected)


def test_scales_of_q6_k_keep_16_bits(tmp_path: Path) -> None:
    raw = random_bytes(GGMLType.Q6_K, SHAPE)
    expected = torch.tensor(gguf.dequantize(raw, GGMLType.Q6_K))
    found = numbers_of(in_file(tmp_path / "a.gguf", "Q6_K", raw), "Q6_K")
    torch.testing.assert_close(found, expected, atol=0, rtol=2.0**-16)


@pytest.mark.parametrize("name", MINIMA)
def test_scales_and_offsets_are_rounded(name: str, tmp_path: Path) -> None:
    kind, (_, place) = GGMLType[name], MINIMA[name]
    raw = random_bytes(kind, SHAPE)
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, num_bytes)
    if name.endswith("_K"):
        blocks[:, [place - 1, place + 1]] %= 0x30  # scale and offset are not above 0.125, as real ones
    expected = torch.tensor(gguf.dequantize(raw, kind))
    alone = blocks.copy()
    alone[:, place : place + 2] = 0
    scaled = torch.tensor(gguf.dequantize(alone.reshape(raw.shape), kind))
    found = numbers_of(in_file(tmp_path / "a.gguf", name, raw), name)
    # Scales and offsets of Q4_1 and Q5_1 are float16 in the file too.
    bound = (scaled.abs() + (expected - scaled).abs()) * (0 if name.endswith("_1") else 2.0**-11)
    assert bool(((found - expected).abs() <= bound * 1.01 + 1e-6 * expected.abs().max()).all())


@pytest.mark.parametrize("name", FORMS)
def test_ranks_read_their_columns(name: str, tmp_path: Path) -> None:
    """Of patches that begin and end within blocks of 256 numbers too."""
    tensor = in_file(tmp_path / "a.gguf", name, random_bytes(GGMLType[name], SHAPE))
    (size,) = {FORMS[name].patch_bytes}
    pieces = torch.cat([piece for _, piece in tensor.pieces(3, 9, (3 * size, 7 * size))])
    found = ops.unpack(pieces, *FORMS[name], 4 * ops.PATCH_COLUMNS)
    assert torch.equal(found, numbers_of(tensor, name)[48:144, 384:896])


def test_each_type_has_its_patches() -> None:
    kinds = [kind for kind in GGMLType if patches_of(BlockForm(kind, kind.name, *gguf.GGML_QUANT_SIZES[kind]))]
    assert {kind.name for kind in kinds} == set(FORMS) and patches_of(None) is None


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "Q4_K", "Q5_1"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, 65504.0])
def test_scales_that_are_no_numbers_stay_so(name: str, scale: float, tmp_path: Path) -> None:
    """As they do where blocks are decoded."""
    kind = GGMLType[name]
    raw = random_bytes(kind, SHAPE)
    place = 208 if name == "Q6_K" else 0
    raw[5, place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.tensor(gguf.dequantize(raw, kind))
    found = numbers_of(in_file(tmp_path / "a.gguf", name, raw), name)
    assert torch.equal(found.isfinite(), expected.isfinite()) and torch.equal(found.isnan(), expected.isnan())


def test_scales_of_mxfp4_that_kernels_do_not_take_are_refused(tmp_path: Path) -> None:
    raw = random_bytes(GGMLType.MXFP4, SHAPE)
    raw[7, 0] = ops.MOST_EXPONENT + 1
    tensor = in_file(tmp_path / "a.gguf", "MXFP4", raw)
    with pytest.raises(ConfigError, match="tensor x holds scales that are no finite numbers, or above 2"):
        numbers_of(tensor, "MXFP4")


@pytest.mark.usefixtures("kernels")
def test_a_file_cut_short(tmp_path: Path) -> None:
    path = written(tmp_path, "llama", MEDIUM)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="the file ends inside tensor .*: it is cut short"):
        load(path, as_stored=True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("family", "kinds", "size"),
    [
        ("llama", MEDIUM, 2),  # rows of heads in pairs
        ("qwen2", MEDIUM, 1),  # biases of queries, keys and values
        ("llama", OTHERS, 1),
        ("qwen3", LEGACY, 2),
        *[
            pytest.param(family, kinds, size, marks=pytest.mark.nightly)
            for family in ("llama", "qwen2", "qwen3", "olmo2", "glm4")
            for kinds in (MEDIUM, OTHERS, LEGACY)
            for size in (1, 2, 4)
        ],
    ],
)
def test_the_numbers_of_a_file_stay(family: str, kinds: dict[str, GGMLType], size: int, tmp_path: Path) -> None:
    path = written(tmp_path, family, kinds)
    for rank in range(size):
        context = ParallelContext(rank, rank, size, 0, 1, CPU)
        stored, plain = (matrices(load(path, context=context, as_stored=each)) for each in (True, False))
        assert sum(not isinstance(weight, PlainWeight) for weight in stored.values()) >= 4
        assert stored.keys() == plain.keys()
        for name, weight in stored.items():
            assert_close(read(weight), read(plain[name]))
    if size == 1:
        stored, plain = (
            generate(PagedRun(load(path, as_stored=each)), PROMPTS, num_tokens=2) for each in (True, False)
        )
        for name in PROMPTS:
            assert_close(stored[1][name][0], plain[1][name][0])


@pytest.mark.usefixtures("kernels")
def test_parts_of_several_types_stand_side_by_side(tmp_path: Path) -> None:
    model = load(written(tmp_path, "qwen2", MEDIUM), as_stored=True)
    layer = model.layers["0"].self_attn.qkv_proj
    assert isinstance(layer.weight, MixedWeight)
    assert [run.form for run in layer.weight.runs] == [PatchForm("affine4", 32), PatchForm("int8", 16)]
    x = torch.randn(5, 512)
    torch.testing.assert_close(layer(x), F.linear(x, read(layer.weight), layer.bias))
    torch.testing.assert_close(layer.weight.matmul(x), F.linear(x, read(layer.weight)))
    last = sum(len(run.patches) for run in layer.weight.runs) * ops.PATCH_ROWS - 1
    numbers = torch.tensor([last, 0, 17, last - 20])
    assert torch.equal(layer.weight.rows(numbers), read(layer.weight)[numbers])


@pytest.mark.usefixtures("kernels")
def test_gate_and_up_of_several_types(tmp_path: Path) -> None:
    layer = load(written(tmp_path, "llama", LEGACY | {"ffn_up": GGMLType.Q6_K}), as_stored=True).layers["0"].mlp
    assert isinstance(layer.gate_up_proj.weight, MixedWeight)
    x = torch.randn(5, 512)
    gate, up = F.linear(x, read(layer.gate_up_proj.weight)).chunk(2, dim=-1)
    torch.testing.assert_close(layer.gate_up_proj(x), F.silu(gate) * up)


@pytest.mark.usefixtures("kernels")
def test_queries_keys_and_values_in_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = dict.fromkeys(("attn_q", "attn_k", "attn_v"), GGMLType.Q5_K)
    usual = read(
        load(written(tmp_path / "usual", "llama", kinds), as_stored=True).layers["0"].self_attn.qkv_proj.weight
    )
    monkeypatch.setattr(gguf, "GGUFWriter", Joining)
    for rank in range(2):
        context = ParallelContext(rank, rank, 2, 0, 1, CPU)
        path = written(tmp_path / "joined", "llama", kinds)
        weight = load(path, context=context, as_stored=True).layers["0"].self_attn.qkv_proj.weight
        assert isinstance(weight, PatchedWeight) and weight.form == PatchForm("affine8", 32)
        parts = zip(usual.split((512, 256, 256)), (256, 128, 128), strict=True)
        assert torch.equal(read(weight), torch.cat([part.split(size)[rank] for part, size in parts]))


EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
OF_MIXTURES = {"hidden_size": 256, "moe_intermediate_size": 512}


def experts_of(model: DecoderModel) -> ParallelExperts:
    (found,) = (module for module in model.modules() if isinstance(module, ParallelExperts))
    return found


def both(experts: ParallelExperts) -> list[Tensor]:
    """Numbers of both matrices: [E, rows, columns]."""
    pairs = (experts.matrices.gate_up_proj, experts.matrices.down_proj)
    if experts.form is None:
        return [matrix.float() for matrix in pairs]
    columns = len(experts.matrices.down_proj[0]) * 16, len(experts.matrices.gate_up_proj[0]) * 8
    return [
        torch.stack([ops.unpack(each, *experts.form, size) for each in matrix])
        for matrix, size in zip(pairs, columns, strict=True)
    ]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("family", "name", "writer", "size"),
    [
        ("qwen3_moe", "Q4_K", gguf.GGUFWriter, 2),
        ("qwen3_moe", "MXFP4", Joining, 1),
        ("mixtral", "Q8_0", Apart, 2),
        ("gpt_oss", "MXFP4", gguf.GGUFWriter, 1),
        *[
            pytest.param("qwen3_moe", name, writer, 2, marks=pytest.mark.nightly)
            for name in FORMS
            for writer in (gguf.GGUFWriter, Joining)
        ],
    ],
)
def test_experts_stay(
    family: str, name: str, writer: type, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "GGUFWriter", writer)
    own = {
        "mixtral": {"intermediate_size": 512},
        "gpt_oss": {"intermediate_size": 512, "layer_types": ["full_attention"]},
    }
    changes = OF_MIXTURES | own.get(family, {})
    path = written(tmp_path, family, dict.fromkeys(EXPERTS, GGMLType[name]), **changes)
    for rank in range(size):
        context = ParallelContext(rank, rank, size, 0, 1, CPU)
        stored, plain = (experts_of(load(path, context=context, as_stored=each)) for each in (True, False))
        assert (stored.form, plain.form) == (FORMS[name], None)
        for found, expected in zip(both(stored), both(plain), strict=True):
            assert_close(found, expected)


@pytest.mark.usefixtures("kernels")
def test_experts_of_several_forms_are_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = dict.fromkeys(EXPERTS, GGMLType.Q4_K) | {"ffn_down_exps": GGMLType.Q6_K}
    path = written(tmp_path, "qwen3_moe", kinds, **OF_MIXTURES)
    with caplog.at_level(logging.INFO, logger="raylm"):
        stored = experts_of(load(path, as_stored=True))
    assert stored.form is None
    count = stored.num_experts
    found = f"weights: matrices decoded to float32 while they are loaded: {2 * count} in Q4_K, {count} in Q6_K"
    assert found in caplog.messages
    assert all(map(torch.equal, both(stored), both(experts_of(load(path)))))


@pytest.mark.usefixtures("kernels")
def test_the_log_says_what_is_computed_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, "llama", MEDIUM | {"ffn_up": GGMLType.IQ3_S})
    with caplog.at_level(logging.INFO, logger="raylm"):
        assert len(stored_forms(load(path, as_stored=True))) == 2
    assert "weights: matrices decoded to float32 while they are loaded: 1 in IQ3_S, 1 in Q4_K, 1 in Q6_K" in (
        caplog.messages
    )
    kept = "2 in affine4 with a scale for each 32 columns, 2 in int8 with a scale for each 16 columns; activations"
    assert any(f"weights: computed with as they are stored: {kept}" in message for message in caplog.messages)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="raylm"):
        assert not stored_forms(load(path))
    assert any("1 in IQ3_S, 4 in Q4_K, 3 in Q6_K" in message for message in caplog.messages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_header_says_what_gpus_keep(dtype: torch.dtype, tmp_path: Path) -> None:
    """In float16 there are no kernels for offsets and MXFP4."""
    source = locate(str(written(tmp_path, "llama", LEGACY | MEDIUM | {"attn_output": GGMLType.MXFP4})))
    scheme = file_scheme(source, ArchConfig.from_source(source, "auto"), dtype)
    q, v = PatchForm("affine4", 32), PatchForm("int8", 16)
    is_wide = dtype == torch.bfloat16
    assert scheme.forms("layers.0.self_attn.qkv_proj.weight") == ({"q": q, "k": q, "v": v} if is_wide else {"v": v})
    assert scheme.forms("layers.0.mlp.down_proj.weight") == {None: v}
    assert bool(scheme.forms("layers.0.self_attn.o_proj.weight")) == is_wide
    assert scheme.forms("embed_tokens.weight") == scheme.forms("lm_head.weight") == AS_NUMBERS.forms("lm_head.weight")


def test_deterministic_gpus_decode(tmp_path: Path) -> None:
    source = locate(str(written(tmp_path, "llama", {})))
    may = partial(_may_stay, source, ArchConfig.from_source(source, "auto"))
    gpu = torch.device("meta")
    assert may(ParallelContext.single(gpu)) and not may(ParallelContext.single(gpu, deterministic=True))
    assert may(ParallelContext.single(CPU, deterministic=True))  # in blocks
