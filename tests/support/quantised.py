"""Small random checkpoints of every quantisation, and their twins of decoded weights.

A packer makes the tensors of one weight [N, K] and its decoded values. It says of a format what its authors' programs
do, in plain operations.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from raylm import ops

FILE = "model.safetensors"
Packed = tuple[dict[str, Tensor], Tensor]
"""End of a tensor's name behind the module's -> tensor, and the decoded weight."""
Packer = Callable[[torch.Generator, int, int], Packed]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLES = {"nf4": ops.NF4, "fp4": tuple(math.sin(i / 5 - 1.5) for i in range(16))}
"""bitsandbytes' tables by quant_type. Files carry their table, so FP4's may be any here. A weight in NF4 is computed as
stored only with the real one."""


def integers(random: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=random)


def scales(random: torch.Generator, *shape: int, size: float = 0.02) -> Tensor:
    """Numbers that float16 and bfloat16 hold."""
    return (size * (0.5 + torch.rand(shape, generator=random))).bfloat16().float()


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """[R, C] integers one behind the other, the lowest bit first, as words of 32 bits with a sign."""
    ones = (codes.long()[:, :, None] >> torch.arange(bits) & 1).flatten(1)
    words = pad(ones, (0, -ones.shape[1] % 32)).unflatten(1, (-1, 32))
    return (words << torch.arange(32)).sum(2).to(torch.int32)


def pack_columns(codes: Tensor, bits: int) -> Tensor:
    return pack_rows(codes.t(), bits).t().contiguous()


Places = tuple[Tensor | int, Tensor | int]


def decoded(codes: Tensor, zeros: Tensor | int, scale: Tensor, group_of: Callable[[Tensor, Tensor], Places]) -> Tensor:
    """`group_of` says where the scales of rows [N, 1] and columns [K] are."""
    places = group_of(torch.arange(codes.shape[0])[:, None], torch.arange(codes.shape[1]))
    less = zeros if isinstance(zeros, int) else zeros.double()[places]
    return ((codes.double() - less) * scale.double()[places]).float()


def fp8_codes(random: torch.Generator, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)


def blocks(rows: int, columns: int) -> Callable[[Tensor, Tensor], Places]:
    """0 stands for all."""
    return lambda i, j: (i // rows if rows else 0, j // columns if columns else 0)


def by_groups(groups: Tensor) -> Callable[[Tensor, Tensor], Places]:
    """A scale for each row and group, of which each column has the number in `groups` [K]."""
    return lambda i, j: (i, groups[j])


def grid_shape(n: int, k: int, rows: int, columns: int) -> tuple[int, int]:
    return -(-n // rows) if rows else 1, -(-k // columns) if columns else 1


def fp8(
    rows: int,
    columns: int,
    *,
    name: str = "weight_scale",
    shape: str = "matrix",
    kind: str = "float",
    extra: str = "",
    ordered: bool = False,
) -> Packer:
    """`shape` of the scales: matrix, vector, number or 4 (ModelOpt's blocks). `kind`: float, e8m0 or exponents."""

    def pack(random: torch.Generator, n: int, k: int) -> Packed:
        codes = fp8_codes(random, n, k)
        size = grid_shape(n, k, rows, columns)
        scale = scales(random, *size, size=0.15)
        stored = scale
        if kind != "float":
            exponents = integers(random, 122, 127, *size)
            scale = 2.0 ** (exponents.float() - 127)
            stored = exponents.to(torch.uint8)
            stored = stored.view(torch.float8_e8m0fnu) if kind == "e8m0" else stored
        group_of = by_groups(groups_of(k, columns)) if ordered else blocks(rows, columns)
        dense = decoded(codes.float(), 0, scale, group_of)
        stored = {"vector": stored.flatten(), "number": stored.flatten()[0], "4": stored[:, None, :, None]}.get(
            shape, stored
        )
        parts = {"weight": codes, name: stored.contiguous()}
        if extra:
            parts[extra] = torch.tensor(0.7)
        if ordered:
            parts["weight_g_idx"] = groups_of(k, columns)
        return parts, dense

    return pack


def int8(rows: int, columns: int, *, symmetric: bool = True) -> Packer:
    def pack(random: torch.Generator, n: int, k: int) -> Packed:
        codes = integers(random, -128, 128, n, k).to(torch.int8)
        size = grid_shape(n, k, rows, columns)
        scale = scales(random, *size, size=0.002)
        parts: dict[str, Tensor] = {"weight": codes, "weight_scale": scale.bfloat16()}
        zeros: Tensor | int = 0
        if not symmetric:
            zeros = parts["weight_zero_point"] = integers(random, -20, 20, *size).to(torch.int8)
        return parts, decoded(codes, zeros, scale, blocks(rows, columns))

    return pack


def groups_of(k: int, columns: int) -> Tensor:
    """Of each column, in an activation order: the same for all matrices that see the same inputs."""
    return (torch.randperm(k, generator=torch.Generator().manual_seed(k)) // columns).int()


def ct_packed(bits: int, columns: int, *, symmetric: bool = True, ordered: bool = False) -> Packer:
    """compressed-tensors' pack-quantized."""

    def pack(random: torch.Generator, n: int, k: int) -> Packed:
        middle = 1 << bits - 1
        codes = integers(random, -middle, middle, n, k)
        size = grid_shape(n, k, 1, columns)
        scale = scales(random, *size, size=0.3 / middle)
        parts = {
            "weight_packed": pack_rows(codes + middle, bits),
            "weight_scale": scale.bfloat16(),
            "weight_shape": torch.tensor([n, k]),
        }
        zeros: Tensor | int = 0
        if not symmetric:
            zeros = integers(random, -middle, middle, *size)
            parts["weight_zero_point"] = pack_columns(zeros + middle, bits)
        group_of = blocks(1, columns)
        if ordered:
            parts["weight_g_idx"] = groups_of(k, columns)
            group_of = by_groups(parts["weight_g_idx"])
        return parts, decoded(codes, zeros, scale, group_of)

    return pack


def gptq(bits: int, columns: int, *, v2: bool = False, ordered: bool = False, zero: int | None = None) -> Packer:
    """`zero`: all zero points; by default any."""

    def pack(random: torch.Generator, n: int, k: int) -> Packed:
        codes = integers(random, 0, 1 << bits, n, k)
        size = grid_shape(n, k, 1, columns)
        scale = scales(random, *size, size=0.5 / (1 << bits)).half()
        scale[0, 0] *= -1  # AutoRound's may be negative
        zeros = integers(random, 1, 1 << bits, *size) if zero is None else torch.full(size, zero)
        stored = pack_columns(zeros if v2 else zeros - 1, bits).t().contiguous()
        groups = groups_of(k, columns) if ordered else torch.arange(k, dtype=torch.int32) // (columns or k)
        parts = {
            "qweight": pack_columns(codes.t().contiguous(), bits),
            "qzeros": stored,
            "scales": scale.t().contiguous(),
            "g_idx": groups,
        }
        return parts, decoded(codes, zeros, scale.float(), by_groups(groups))

    return pack


def awq(columns: int) -> Packer:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def eights(codes: Tensor) -> Tensor:
        """[R, C], C in words of eight, of which the order says whose turn it is."""
        return pack_rows(codes.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)

    def pack(random: torch.Generator, n: int, k: int) -> Packed:
        codes, size = integers(random, 0, 16, n, k), grid_shape(n, k, 1, columns)
        scale, zeros = scales(random, *size).half(), integers(random, 0, 16, *size)
        parts = {"qweight": eights(codes.t()), "qzeros": eights(zeros.t()), "scales": scale.t().contiguous()}
        return parts, decoded(codes, zeros, scale.float(), blocks(1, columns))

    return pack


def float4(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Two a byte, and what they stand for."""
    table = torch.tensor([sign * value for sign in (1, -1) for value in E2M1])
    return pack_rows(codes, 4).view(torch.uint8), table[codes]


def mxfp4(name: str) -> Packer:
    def pack(random: torch.Generator, n: int, k: int) -> Packed:
        data, values = float4(integers(random, 0, 16, n, k))
        exponents = integers(random, 121, 126, *grid_shape(n, k, 1, 32))
        parts = {name: data, "weight_scale": exponents.to(torch.uint8)}
        return parts, decoded(values, 0, 2.0 ** (exponents.float() - 127), blocks(1, 32))

    return pack


def nvfp4(name: str, whole: str, *, divides: bool) -> Packer:
    def pack(random: torch.Generator, n: int, k: int) -> Packed:
        data, values = float4(integers(random, 0, 16, n, k))
        scale = (100 * torch.rand(grid_shape(n, k, 1, 16), generator=random)).to(torch.float8_e4m3fn)
        factor = torch.tensor([700.0 if divides else 1 / 700])
        used = scale.float() / factor if divides else scale.float() * factor
        parts = {name: data, "weight_scale": scale, whole: factor, "input_scale": torch.tensor(1.5)}
        return parts, decoded(values, 0, used, blocks(1, 16))

    return pack


def bnb4(kind: str, *, nested: bool, block: int = 64, storage: torch.dtype = torch.uint8) -> Packer:
    def pack(random: torch.Generator, n: int, k: int) -> Packed:
        codes = integers(random, 0, 16, n * k)
        even = pad(codes, (0, n * k % 2))
        data = (even[0::2] << 4 | even[1::2]).to(torch.uint8)
        count = -(-n * k // block)
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
        table = torch.tensor(TABLES[kind])
        parts = {"weight": data.view(storage).unsqueeze(1), "weight.quant_map": table}
        largest = scales(random, count, size=0.3)
        parts["weight.absmax"] = largest
        if nested:
            nested_codes, nested_block = integers(random, 0, 256, count), 16
            nested_table = torch.linspace(-1, 1, 256)
            nested_largest = scales(random, -(-count // nested_block), size=0.05)
            largest = torch.empty(count)
            for i, code in enumerate(nested_codes.tolist()):
                largest[i] = float(nested_table[code]) * float(nested_largest[i // nested_block]) + 0.2
            parts |= {"weight.absmax": nested_codes.to(torch.uint8), "weight.nested_absmax": nested_largest}
            parts["weight.nested_quant_map"] = nested_table
            state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": 0.2}
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = text
        dense = table[codes] * largest[torch.arange(n * k) // block]
        return parts, dense.view(n, k)

    return pack


def bnb8(random: torch.Generator, n: int, k: int) -> Packed:
    codes, largest = integers(random, -127, 128, n, k).to(torch.int8), scales(random, n, size=0.4)
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, decoded(codes, 0, (largest / 127).unsqueeze(1), blocks(1, 0))


def compressed(stored: str, *, activations: dict[str, object] | None = None, **weights: object) -> dict[str, object]:
    """compressed-tensors' quantization_config of one group; with floats of 8 bits, activations are such too."""
    if stored == "float-quantized":
        activations = _float(8, strategy="token", dynamic=True)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def weights_only(config: dict[str, object]) -> dict[str, object]:
    """The same of a checkpoint that leaves activations as they are."""
    group = {**config["config_groups"]["group_0"], "input_activations": None}
    return {**config, "config_groups": {"group_0": group}}


def quark(*, rounds: str | None = None, **weight: object) -> dict[str, object]:
    """`rounds`: to what activations are quantised; by default weights that are floats of 8 bits have such."""
    rounds = "fp8_e4m3" if weight["dtype"] == "fp8_e4m3" else rounds
    activations = {"dtype": rounds, "qscheme": "per_tensor", "is_dynamic": False} if rounds else None
    whole = {
        "weight": {"is_dynamic": False, **weight},
        "input_tensors": activations,
        "output_tensors": None,
        "bias": None,
    }
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": whole,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head", "re:.*mlp.gate$"],
    }


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to store a checkpoint."""

    config: dict[str, object]
    packer: Packer
    file: tuple[str, dict[str, object]] | None = None
    """A file that says it in place of config.json, by its name."""
    metadata: Callable[[dict[str, tuple[int, int]], dict[str, Tensor]], dict[str, str]] | None = None
    """Shapes of the quantised weights by their modules, and all tensors -> what the header of the file says of them."""


def _gptq_config(bits: int, group: int, **more: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False, **more}


def _auto_round(packing: str, *, sym: bool) -> dict[str, object]:
    return {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": sym, "packing_format": packing}


def _int(bits: int, **more: object) -> dict[str, object]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, **more}


def _float(bits: int, **more: object) -> dict[str, object]:
    return {"num_bits": bits, "type": "float", "symmetric": True, "dynamic": False, **more}


_FP8: dict[str, object] = {"quant_method": "fp8"}


def _modelopt(algorithm: str, **more: object) -> dict[str, object]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


_INT8_ROWS = _int(8, strategy="token", dynamic=True)
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
KINDS: dict[str, Kind] = {
    "fp8": Kind(_FP8 | {"activation_scheme": "static"}, fp8(0, 0, shape="number", extra="input_scale")),
    "fp8_inv": Kind(_FP8 | {"activation_scheme": "static"}, fp8(0, 0, name="weight_scale_inv", shape="number")),
    "fp8_blocks": Kind(_FP8 | {"weight_block_size": [24, 32]}, fp8(24, 32, name="weight_scale_inv")),
    "fp8_128": Kind(_FP8 | {"weight_block_size": [128, 128]}, fp8(128, 128, name="weight_scale_inv")),
    "fp8_ue8m0": Kind(
        _FP8 | {"weight_block_size": [24, 32], "scale_fmt": "ue8m0"},
        fp8(24, 32, name="weight_scale_inv", kind="e8m0"),
    ),
    "fbgemm": Kind({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, fp8(1, 0)),
    "ct_fp8": Kind(compressed("float-quantized", **_float(8, strategy="tensor")), fp8(0, 0, shape="vector")),
    "ct_fp8_weights": Kind(
        weights_only(compressed("float-quantized", **_float(8, strategy="tensor"))), fp8(0, 0, shape="vector")
    ),
    "ct_fp8_ordered": Kind(
        weights_only(
            compressed("float-quantized", **_float(8, strategy="group", group_size=128, actorder="group")),
        ),
        fp8(1, 128, ordered=True),
    ),
    "ct_fp8_channel": Kind(compressed("float-quantized", **_float(8, strategy="channel")), fp8(1, 0)),
    "ct_fp8_blocks": Kind(
        compressed("float-quantized", **_float(8, strategy="block", block_structure=[24, 32])), fp8(24, 32)
    ),
    "ct_int8": Kind(compressed("int-quantized", **_int(8, strategy="channel")), int8(1, 0)),
    "ct_int8_tensor": Kind(compressed("int-quantized", **_int(8, strategy="tensor")), int8(0, 0)),
    "ct_int8_zeros": Kind(
        compressed("int-quantized", **_int(8, strategy="group", group_size=32) | {"symmetric": False}),
        int8(1, 32, symmetric=False),
    ),
    "ct_w8a8_groups": Kind(
        compressed("int-quantized", activations=_INT8_ROWS, **_int(8, strategy="group", group_size=64)), int8(1, 64)
    ),
    **{
        name: Kind(
            compressed("int-quantized", activations=_INT8_ROWS | changes, **_int(8, strategy="channel")), int8(1, 0)
        )
        for name, changes in {
            "ct_w8a8": {},
            "ct_w8a4": {"num_bits": 4},
            "ct_w8a8_groups_of_activations": {"strategy": "group", "group_size": 128},
            "ct_w8a8_zeros_of_activations": {"symmetric": False},
        }.items()
    },
    "ct_w8a16": Kind(compressed("pack-quantized", **_int(8, strategy="channel")), ct_packed(8, 0)),
    "ct_w4a16": Kind(compressed("pack-quantized", **_int(4, strategy="group", group_size=32)), ct_packed(4, 32)),
    "ct_w4a16_zeros": Kind(
        compressed("pack-quantized", **_int(4, strategy="group", group_size=32) | {"symmetric": False}),
        ct_packed(4, 32, symmetric=False),
    ),
    "ct_w4a16_ordered": Kind(
        compressed("pack-quantized", **_int(4, strategy="group", group_size=32, actorder="group")),
        ct_packed(4, 32, ordered=True),
    ),
    "ct_w8a16_ordered": Kind(
        compressed("pack-quantized", **_int(8, strategy="group", group_size=64, actorder="group")),
        ct_packed(8, 64, ordered=True),
    ),
    "ct_w2a16": Kind(compressed("pack-quantized", **_int(2, strategy="channel")), ct_packed(2, 0)),
    "ct_nvfp4": Kind(
        compressed("nvfp4-pack-quantized", **_float(4, strategy="tensor_group", group_size=16)),
        nvfp4("weight_packed", "weight_global_scale", divides=True),
    ),
    "ct_mxfp4": Kind(
        compressed("mxfp4-pack-quantized", **_float(4, strategy="group", group_size=32)), mxfp4("weight_packed")
    ),
    "ct_mxfp8": Kind(
        compressed("mxfp8-quantized", **_float(8, strategy="group", group_size=32)), fp8(1, 32, kind="exponents")
    ),
    "modelopt_fp8": Kind(
        {},
        fp8(0, 0, shape="number", extra="input_scale"),
        file=(
            "hf_quant_config.json",
            {
                "producer": {"name": "modelopt", "version": "0.29"},
                "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
            },
        ),
    ),
    "modelopt_channel": Kind(_modelopt("FP8_PER_CHANNEL_PER_TOKEN"), fp8(1, 0, shape="vector")),
    "modelopt_blocks": Kind(_modelopt("fp8_pb_wo"), fp8(128, 128, shape="4")),
    "modelopt_nvfp4": Kind(_modelopt("NVFP4", group_size=16), nvfp4("weight", "weight_scale_2", divides=False)),
    "modelopt_mxfp8": Kind(_modelopt("MXFP8"), fp8(1, 32, kind="exponents")),
    "quark_fp8": Kind(quark(dtype="fp8_e4m3", qscheme="per_tensor", symmetric=True), fp8(0, 0, shape="number")),
    "quark_channel": Kind(
        quark(dtype="fp8_e4m3", qscheme="per_channel", ch_axis=0, symmetric=True), fp8(1, 0, shape="vector")
    ),
    **{
        f"quark_w8a{bits}": Kind(
            quark(rounds=f"int{bits}", dtype="int8", qscheme="per_tensor", symmetric=True), int8(0, 0)
        )
        for bits in (4, 8)
    },
    "quark_int8": Kind(quark(dtype="int8", qscheme="per_channel", ch_axis=0, symmetric=True), int8(1, 0)),
    "quark_mxfp4": Kind(
        quark(dtype="fp4", qscheme="per_group", ch_axis=-1, group_size=32, symmetric=None, scale_format="e8m0"),
        mxfp4("weight"),
    ),
    **{f"gptq_{bits}": Kind(_gptq_config(bits, 32), gptq(bits, 32)) for bits in (2, 3, 4, 8)},
    **{
        f"gptq_{bits}_v2": Kind(_gptq_config(bits, 32, checkpoint_format="gptq_v2"), gptq(bits, 32, v2=True))
        for bits in (2, 3, 4, 8)
    },
    "gptq_rows": Kind(_gptq_config(4, -1), gptq(4, 0)),
    "gptq_ordered": Kind(_gptq_config(4, 32) | {"desc_act": True}, gptq(4, 32, ordered=True)),
    "gptq_3_ordered": Kind(_gptq_config(3, 32) | {"desc_act": True}, gptq(3, 32, ordered=True)),
    "gptq_128": Kind(_gptq_config(4, 128) | {"sym": True}, gptq(4, 128, zero=8)),
    "gptq_file": Kind({}, gptq(4, 32), file=("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False})),
    "awq_file": Kind({}, awq(32), file=("quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True})),
    "awq": Kind({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq(32)),
    "awq_rows": Kind({"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM"}, awq(0)),
    "auto_round": Kind(_auto_round("auto_round:auto_gptq", sym=False), gptq(4, 32)),
    "auto_round_sym": Kind(_auto_round("auto_round:gptq", sym=True), gptq(4, 32, v2=True, zero=8)),
    "auto_round_awq": Kind(_auto_round("auto_round:auto_awq", sym=False), awq(32)),
    "nf4": Kind(_NF4, bnb4("nf4", nested=False, block=32)),
    "nf4_nested": Kind(_NF4, bnb4("nf4", nested=True, block=16)),
    "nf4_nested_64": Kind(_NF4, bnb4("nf4", nested=True, block=64)),
    "nf4_over_rows": Kind(_NF4 | {"_load_in_4bit": True}, bnb4("nf4", nested=True, block=96, storage=torch.bfloat16)),
    "fp4": Kind(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        bnb4("fp4", nested=False),
    ),
    "bnb8": Kind({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8),
}
"""Name of a test's case -> how it is stored."""


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether programs quantise it: matrices of attention, MLPs and experts."""
    is_weight = tensor.ndim == 2 and name.endswith(".weight") and re.search(r"\.\d+\.", name) is not None
    return is_weight and not name.endswith((".gate.weight", "router.weight", "_gate.weight", "norm.weight"))


def write_both(plain: Path, folder: Path, kind: Kind, *, changes: dict[str, Tensor] | None = None) -> tuple[Path, Path]:
    """From a plain checkpoint: one whose linear layers are quantised, and its twin of their decoded weights."""
    random = torch.Generator().manual_seed(0)
    stored, dense, shapes = {}, {}, {}
    for name, tensor in load_file(plain / FILE).items():
        if not is_linear(name, tensor):
            stored[name] = dense[name] = tensor
            continue
        module = name.removesuffix(".weight")
        parts, dense[name] = kind.packer(random, *tensor.shape)
        shapes[module] = tuple(tensor.shape)
        stored |= {f"{module}.{part}": found for part, found in parts.items()}
    metadata = kind.metadata and kind.metadata(shapes, stored)
    packed, twin = folder / "packed", folder / "twin"
    for target, tensors in ((packed, stored | (changes or {})), (twin, dense)):
        shutil.copytree(plain, target)
        own = metadata if target == packed else None
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / FILE, own)
    if kind.config:
        change_config(packed, quantization_config=kind.config)
    if kind.file is not None:
        name, values = kind.file
        (packed / name).write_text(json.dumps(values))
    return packed, twin


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
