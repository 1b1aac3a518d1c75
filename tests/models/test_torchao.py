"""Checkpoints of TorchAO: what files say of each weight, and every form that weights are kept in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raylm import ops
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.scheme import configured_scheme, stored_forms
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, PagedRun, generate, load
from tests.models.reads import share_of_second_half
from tests.models.stored import assert_equal
from tests.models.test_fp8 import read as read_scaled
from tests.models.test_fp8 import weights as scaled_weights
from tests.models.test_patched_linears import SIZES, read, weights
from tests.models.test_quantised_models import answers, assert_same
from tests.support import checkpoints
from tests.support.greedy import assert_greedy
from tests.support.quantised import FILE, Kind, Packer, change_config, compressed, int8, is_linear, write_both
from tests.support.torchao import (
    KINDS,
    PER_ROW,
    Told,
    by_name,
    config,
    fp8,
    int4,
    metadata_of,
    rewrite,
    told,
    values,
    written,
)

PROMPTS = {"a": [(5 * i + 3) % 300 + 3 for i in range(20)], "b": [3, 1, 4]}
INT8, FP8 = ({"_type": kind, "_data": {}} for kind in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig"))


@pytest.fixture
def exact_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were kernels for every kind of blocks, with the products of the fallback, which are exact."""
    monkeypatch.setattr(ops, "block_kernels", lambda like, kind: True)
    monkeypatch.setattr("raylm.ops.blocks._has_kernels", lambda device, kind: False)


@pytest.fixture
def patch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU had kernels for patches."""

    def takes(numbers: ops.Numbers, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> bool:
        return rows % ops.PATCH_ROWS == 0 and columns % ops.PATCHED_UNIT == 0

    monkeypatch.setattr(ops, "takes_patched", takes)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen2", "ao_int4"),
        ("qwen3", "ao_fp8_blocks"),
        ("phi3", "ao_tiles"),  # queries, keys and values in one tensor; gate and up too
        ("gpt_neox", "ao_int8_groups"),  # queries, keys and values by heads
        ("cohere", "ao_intx_4_zeros"),  # rotary dimensions in pairs
        ("mixtral", "ao_int8"),  # experts of another naming
        ("qwen2_moe", "ao_int4"),
    ],
)
def test_families(tmp_path: Path, family: str, kind: str) -> None:
    plain = checkpoints.FAMILIES[family](tmp_path / "plain", num_hidden_layers=2)
    packed, twin = write_both(plain, tmp_path, KINDS[kind])
    assert sum(is_linear(name, tensor) for name, tensor in load_file(twin / FILE).items()) >= 8
    assert_same(packed, twin, size=2)


@pytest.mark.parametrize("kind", ["ao_int4", "ao_fp8"])
def test_models_through_transformers(tmp_path: Path, kind: str) -> None:
    plain = checkpoints.FAMILIES["qwen3"](tmp_path / "plain", num_hidden_layers=1)
    packed, twin = write_both(plain, tmp_path, KINDS[kind])
    assert_same(packed, twin, implementation="transformers")


@pytest.mark.parametrize("kind", ["ao_int8", "ao_tiles", "ao_fp8_dynamic"])
def test_tokens_are_those_of_the_decoded_weights(tmp_path: Path, kind: str) -> None:
    packed, twin = write_both(checkpoints.llama(tmp_path / "plain", num_hidden_layers=2), tmp_path, KINDS[kind])
    (answer,) = answers(packed, [PROMPTS["a"]])
    assert_greedy(checkpoints.reference(twin), PROMPTS["a"], answer)


def mixed(
    tmp_path: Path, kinds: dict[str, tuple[Packer, Told] | None], configuration: dict[str, object]
) -> tuple[Path, Path]:
    """A Llama whose matrices are of the first kind whose text is in their name; others stay as they are."""
    plain, twin = (checkpoints.llama(tmp_path / name, num_hidden_layers=2) for name in ("plain", "twin"))
    random = torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    modules: dict[str, tuple[Told, tuple[int, int]]] = {}
    dense = load_file(plain / FILE)
    for name, tensor in load_file(plain / FILE).items():
        kind = next((kind for text, kind in kinds.items() if text in name), None)
        if kind is None or tensor.ndim != 2:
            stored[name] = tensor
            continue
        module = name.removesuffix(".weight")
        parts, dense[name] = kind[0](random, *tensor.shape)
        modules[module] = kind[1], (tensor.shape[0], tensor.shape[1])
        stored |= {f"{module}.{part}": found.contiguous() for part, found in parts.items()}
    save_file(dense, twin / FILE)
    save_file(stored, plain / FILE, written(modules, stored))
    change_config(plain, quantization_config=configuration)
    return plain, twin


def test_modules_of_several_configurations(tmp_path: Path) -> None:
    """By whole names, by a regular expression that only Python's reads, the default, and none; embedding and head
    among them."""
    int4_64 = {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}}
    configuration = by_name(
        {
            "model.layers.0.self_attn.q_proj": INT8,
            "model.layers.1.self_attn.k_proj": None,
            r"re:model\.layers\.\d+\.mlp\.(?!down).*": int4_64,
            "model.embed_tokens.weight": INT8,
            "_default": FP8,
        }
    )
    whole = values(8, 1, 0), told("Int8Tensor")
    kinds = {
        "layers.0.self_attn.q_proj": whole,
        "layers.1.self_attn.k_proj": None,
        "up_proj": (int4(32), told("Int4Tensor", 1, 32, shaped=True)),
        "gate_proj": (int4(32), told("Int4Tensor", 1, 32, shaped=True)),
        "embed_tokens": whole,
        "": (fp8(1, 0), told("Float8Tensor", act_quant_kwargs=None)),
    }
    packed, twin = mixed(tmp_path, kinds, configuration)
    found = ArchConfig.from_source(locate(str(packed))).quantisation
    assert found is not None and [(group.targets, group.scheme is None) for group in found.groups] == [
        (("model.layers.0.self_attn.q_proj",), False),
        (("model.layers.1.self_attn.k_proj",), True),
        ((r"re:model\.layers\.\d+\.mlp\.(?!down).*",), False),
        (("model.embed_tokens",), False),
        ((), False),
    ]
    assert str(found) == (
        "torchao (integers of 8 bits, a scale a row; integers of 4 bits, groups of 32; floats of 8 bits, a scale a row)"
    )
    assert_same(packed, twin, size=2)


def test_modules_that_are_left_as_they_are(tmp_path: Path) -> None:
    configuration = config("Int8WeightOnlyConfig", granularity=PER_ROW)
    configuration["modules_to_not_convert"] = ["lm_head", "model.layers.0.mlp.down_proj"]
    kinds = {f"layers.0.mlp.{name}": (values(8, 1, 0), told("Int8Tensor")) for name in ("up_proj", "gate_proj")}
    packed, twin = mixed(tmp_path, kinds | {"layers.1.": (values(8, 1, 0), told("Int8Tensor"))}, configuration)
    found = ArchConfig.from_source(locate(str(packed))).quantisation
    assert found is not None and found.ignored == ("lm_head", "model.layers.0.mlp.down_proj")
    assert_same(packed, twin)


def test_several_files(tmp_path: Path) -> None:
    """A weight's parts lie in two of them; each has the metadata of all."""
    packed, twin = write_both(checkpoints.llama(tmp_path / "plain"), tmp_path, KINDS["ao_int8"])
    tensors, metadata = load_file(packed / FILE), metadata_of(packed / FILE)
    (packed / FILE).unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    where = {tensor: names[tensor.endswith("_scale")] for tensor in tensors}
    for name in names:
        save_file({key: tensors[key] for key in tensors if where[key] == name}, packed / name, metadata)
    (packed / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert_same(packed, twin)


BLOCKS = {
    "ao_int8": "Q8_0",
    "ao_int8_groups": "Q8_0",
    "ao_int8_tensor": "Q8_0",
    "ao_int8_dynamic": "Q8_0",
    "ao_int4_fp8": "Q4_0",
    "ao_intx_3": "Q4_0",
    "ao_intx_4": "Q4_0",
}


@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize("kind", [*BLOCKS, "ao_int4", "ao_tiles", "ao_intx_4_zeros", "ao_intx_8_zeros", "ao_fp8"])
def test_blocks(kind: str, tmp_path: Path) -> None:
    """The same numbers to the bit; what is shifted, or has zero points, is decoded."""
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", num_hidden_layers=1), tmp_path, KINDS[kind])
    assert stored_forms(load(packed, as_stored=True)) == ({BLOCKS[kind]: 7} if kind in BLOCKS else {})
    assert_equal(packed, tensor=2)


def four_bits_in_bytes(folder: Path, **sizes: int) -> tuple[Path, Path]:
    """compressed-tensors' int-quantized may have them too."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}

    def pack(random: torch.Generator, n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
        parts, _ = int8(1, 0)(random, n, k)
        codes = parts["weight"] >> 4
        return parts | {"weight": codes}, codes * parts["weight_scale"].float()

    plain = checkpoints.llama(folder / "plain", **{"num_hidden_layers": 1, **sizes})
    return write_both(plain, folder, Kind(compressed("int-quantized", **weights), pack))


@pytest.mark.usefixtures("exact_kernels")
def test_blocks_of_integers_of_four_bits_in_bytes_of_others(tmp_path: Path) -> None:
    packed, _ = four_bits_in_bytes(tmp_path)
    assert stored_forms(load(packed, as_stored=True)) == {"Q4_0": 7}
    assert_equal(packed)


@pytest.mark.usefixtures("patch_kernels")
def test_patches_of_integers_of_four_bits_in_bytes_of_others(tmp_path: Path) -> None:
    packed, dense = four_bits_in_bytes(tmp_path, **SIZES)
    stored, expected = weights(load(packed, as_stored=True)), load(dense)
    assert {weight.form.numbers for weight in stored.values()} == {"int4"} and len(stored) == 4
    for name, weight in stored.items():
        assert torch.equal(read(weight), expected.get_submodule(name).values), name


PATCHES = {
    "ao_int8": ("int8", 128),
    "ao_int8_groups": ("int8", 32),
    "ao_int8_tensor": ("int8", 128),
    "ao_int8_static": ("int8", 128),  # zero points are stored
    "ao_int8_dynamic": ("int8_rows", 128),
    "ao_int8_asymmetric": ("int8", 128),
    "ao_int4": ("affine4", 32),
    "ao_int4_64": ("affine4", 32),
    "ao_int4_fp8": ("affine4", 32),
    "ao_tiles": ("affine4", 32),
    "ao_tiles_128": ("affine4", 32),
    "ao_intx_3": ("int4", 32),
    "ao_intx_4": ("int4", 32),
    "ao_intx_4_zeros": ("int4", 32),
    "ao_intx_8_zeros": ("int8", 32),
    "ao_fp8": ("fp8", 128),
}


@pytest.mark.usefixtures("patch_kernels")
@pytest.mark.parametrize("kind", PATCHES)
def test_patches(kind: str, tmp_path: Path) -> None:
    """The same numbers, but that offsets of affine forms are float16."""
    packed, dense = write_both(checkpoints.llama(tmp_path / "plain", **SIZES), tmp_path, KINDS[kind])
    numbers, group = PATCHES[kind]
    for rank, size in ((0, 1), (1, 2)):
        context = ParallelContext(rank, rank, size, 0, 1, CPU)
        stored = weights(load(packed, context=context, as_stored=True))
        expected = load(dense, context=context)
        assert {(weight.form.numbers, weight.form.group) for weight in stored.values()} == {(numbers, group)}
        assert len(stored) >= 3
        for name, weight in stored.items():
            wanted = expected.get_submodule(name).values
            if numbers == "affine4":
                torch.testing.assert_close(read(weight), wanted, rtol=0, atol=2.0**-12)  # of offsets up to 1
            else:
                assert torch.equal(read(weight), wanted), name
    _, logits = generate(PagedRun(load(packed, as_stored=True)), PROMPTS, num_tokens=1)
    _, expected_logits = generate(PagedRun(load(dense)), PROMPTS, num_tokens=1)
    for name in PROMPTS:
        assert (logits[name] - expected_logits[name]).norm() < 5e-3 * expected_logits[name].norm()


@pytest.mark.usefixtures("patch_kernels")
def test_scales_that_no_offset_in_float16_fits_are_decoded(tmp_path: Path) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", **SIZES), tmp_path, KINDS["ao_int4"])
    name = "model.layers.0.mlp.down_proj._weight_zero_point"
    rewrite(packed, {name: load_file(packed / FILE)[name].fill_(1e5)}, {})
    model = load(packed, as_stored=True)
    assert len(weights(model)) == 3 and "layers.0.mlp.down_proj.weight" not in weights(model)


@pytest.mark.parametrize(("kind", "size"), [("ao_fp8_dynamic", 2), ("ao_fp8_tensor", 1)])
def test_codes_and_scales_of_fp8_stay(kind: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "takes_scaled", lambda rows, columns, device: True)
    packed, dense = write_both(checkpoints.llama(tmp_path / "plain"), tmp_path, KINDS[kind])
    for rank in range(size):
        context = ParallelContext(rank, rank, size, 0, 1, CPU)
        stored, expected = scaled_weights(load(packed, context=context, as_stored=True)), load(dense, context=context)
        assert len(stored) == 4 * expected.arch.num_layers
        for name, weight in stored.items():
            torch.testing.assert_close(read_scaled(weight), expected.get_submodule(name).values, rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("ao_fp8_dynamic", "torch.float8_e4m3fn"),
        ("ao_fp8", "fp8 with a scale for each 128 columns"),
        ("ao_int4_64", "affine4 with a scale for each 32 columns"),
        ("ao_tiles", "affine4 with a scale for each 32 columns"),
        ("ao_intx_4", "int4 with a scale for each 32 columns"),
        ("ao_int8", "int8 with a scale for each 128 columns"),
    ],
)
def test_what_is_planned_by_the_configuration_alone(kind: str, form: str, tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path)
    change_config(folder, quantization_config=KINDS[kind].config)
    scheme = configured_scheme(ArchConfig.from_source(locate(str(folder))), torch.bfloat16)
    assert str(scheme.linears) == form


@pytest.mark.parametrize(("kind", "share"), [("ao_int4", 0.7), ("ao_tiles", 0.7), ("ao_int8_groups", 0.7)])
def test_a_rank_reads_its_columns_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, share: float
) -> None:
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1, intermediate_size=1024)
    folder, _ = write_both(plain, tmp_path, KINDS[kind])
    assert 0.3 < share_of_second_half(folder, monkeypatch) < share


@pytest.mark.usefixtures("patch_kernels", "exact_kernels")
@pytest.mark.parametrize("in_patches", [True, False])
def test_integers_that_have_more_bits_than_they_say(
    in_patches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_patches:
        monkeypatch.setattr(ops, "takes_patched", lambda *arguments: False)
    folder, _ = write_both(checkpoints.llama(tmp_path / "plain", **SIZES), tmp_path, KINDS["ao_intx_4"])
    name = "model.layers.0.mlp.down_proj._weight_qdata"
    codes = load_file(folder / FILE)[name]
    codes[3, 5] = 8
    rewrite(folder, {name: codes}, {})
    with pytest.raises(ConfigError, match="down_proj._weight_qdata holds integers of more than 4 bits"):
        load(folder, as_stored=True)
