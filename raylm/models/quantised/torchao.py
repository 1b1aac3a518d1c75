"""TorchAO: config.json's quantization_config, as transformers writes it. Without torch.

The configuration says what was asked for; the files say of each weight how it is stored (flattened.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from raylm.models.fields import Fields
from raylm.models.quantised.fields import block_of, choice, group_of, names_of
from raylm.models.quantised.patterns import REGEX
from raylm.models.quantised.scheme import Group, Quantisation, Scheme

METHOD = "torchao"
AGAIN = (
    "quantise the original again with torchao 0.16 or later and transformers 5, whose save_pretrained(FOLDER) writes "
    "safetensors"
)
"""The way to a checkpoint that is read."""
CONVERT = (
    "load the model with transformers 5 and torchao 0.16 or later and write it with save_pretrained(FOLDER), or, where "
    "these do not load it, quantise the original again"
)
"""The same from a pickle."""
_DEFAULT = "_default"
"""The key of a mapping of modules that stands for all others."""
_INTEGERS = tuple(f"int{bits}" for bits in range(1, 9))
_WEIGHT = ".weight"
_FLOAT8_INT4_COLUMNS = 128
"""TorchAO has no other groups beside activations in FP8."""


def read_torchao(fields: Fields) -> Quantisation:
    """Raises ConfigError for a configuration whose weights raylm does not read."""
    if isinstance(kind := fields.get("quant_type"), str):
        raise fields.error("quant_type", kind, f"a mapping, as newer programs write it; {AGAIN}")
    whole = fields.section("quant_type")
    if whole.get("default") is None:
        raise whole.error("default", None, "one of TorchAO's configurations")
    return Quantisation(
        method=METHOD,
        groups=tuple(_groups(whole.section("default"))),
        ignored=names_of(fields, "modules_to_not_convert"),
        in_files=True,
    )


def integer_bits(fields: Fields, name: str) -> int:
    """Bits of a type of integers. Raises ConfigError."""
    given = fields.section(name).get("_data")
    if given not in _INTEGERS:
        raise fields.error(name, given, f"one of {', '.join(_INTEGERS)}")
    return int(str(given).removeprefix("int"))


def int4_scheme(layout: Literal["signed_nibbles", "tiles"], columns: int) -> Scheme:
    """Of integers of 4 bits, two a byte."""
    return Scheme(layout=layout, numbers="int", bits=4, columns=columns, zero="added")


def _groups(fields: Fields) -> list[Group]:
    if fields.get("_type") not in ("FqnToConfig", "ModuleFqnToConfig"):
        return [Group(targets=(), scheme=_scheme(fields))]
    data = fields.section("_data")
    name = "fqn_to_config" if data.get("fqn_to_config") else "module_fqn_to_config"
    modules, groups = data.section(name), []
    for key in modules.values:
        scheme = None if modules.get(key) is None else _scheme(modules.section(key))
        is_name = not key.startswith(REGEX)
        targets = () if key == _DEFAULT else (key.removesuffix(_WEIGHT) if is_name else key,)
        groups.append(Group(targets=targets, scheme=scheme))
    if not groups:
        raise data.error(name, modules.values, "a mapping of modules")
    return groups


def _scheme(fields: Fields) -> Scheme:
    kind = choice(fields, "_type", _SCHEMES)
    return _SCHEMES[kind](fields.section("_data"))


def _int8(data: Fields) -> Scheme:
    rows, columns = _shared(data, "granularity")
    if data.get("group_size") is not None:
        rows, columns = 1, group_of(data, "group_size")
    return Scheme(layout="values", numbers="int", bits=8, rows=rows, columns=columns, zero="stored", weights_only=True)


def _int8_activations(data: Fields) -> Scheme:
    scheme = _int8(data)
    return replace(scheme, zero="none", weights_only=False) if is_symmetric(data, "act_mapping_type") else scheme


def is_symmetric(data: Fields, name: str) -> bool:
    """Whether a mapping to integers, an enumeration's member or a word, has no zero point. By default it has none."""
    given = data.get(name)
    word = data.section(name).get("_data") if isinstance(given, dict) else given
    return word is None or (isinstance(word, str) and word.lower() == "symmetric")


def _float8(data: Fields, *, weights_only: bool) -> Scheme:
    _packing(data, "packing_format", "plain")
    rows, columns = _shared(data, "granularity")
    return Scheme(layout="values", numbers="float", bits=8, rows=rows, columns=columns, weights_only=weights_only)


def _float8_activations(data: Fields) -> Scheme:
    return _float8(data, weights_only=False)


def _float8_weights(data: Fields) -> Scheme:
    return _float8(data, weights_only=True)


def _int4(data: Fields) -> Scheme:
    packing = _packing(data, "int4_packing_format", "plain", "tile_packed_to_4d")
    tile = 8 if data.get("int4_tile_packed_ntile") is None else data.integer("int4_tile_packed_ntile")
    if packing != "plain" and tile != 8:
        raise data.error("int4_tile_packed_ntile", tile, "8: other tiles are those of AMD's GPUs")
    return int4_scheme("signed_nibbles" if packing == "plain" else "tiles", group_of(data, "group_size", default=128))


def _float8_int4(data: Fields) -> Scheme:
    _packing(data, "int4_packing_format", "plain", default="preshuffled")
    return int4_scheme("signed_nibbles", _FLOAT8_INT4_COLUMNS)


def _intx(data: Fields, granularity: str = "granularity") -> Scheme:
    _packing(data, "intx_packing_format", "unpacked_to_int8")
    rows, columns = _shared(data, granularity)
    bits = 8 if data.get("weight_dtype") is None else integer_bits(data, "weight_dtype")
    return Scheme(
        layout="values", numbers="int", bits=bits, rows=rows, columns=columns, zero="stored", weights_only=True
    )


def _intx_activations(data: Fields) -> Scheme:
    return _intx(data, "weight_granularity")


_SCHEMES: dict[str, Callable[[Fields], Scheme]] = {
    "Int4WeightOnlyConfig": _int4,
    "Int8WeightOnlyConfig": _int8,
    "Int8DynamicActivationInt8WeightConfig": _int8_activations,
    "Int8StaticActivationInt8WeightConfig": _int8_activations,
    "IntxWeightOnlyConfig": _intx,
    "Int8DynamicActivationIntxWeightConfig": _intx_activations,
    "Float8WeightOnlyConfig": _float8_weights,
    "Float8DynamicActivationFloat8WeightConfig": _float8_activations,
    "Float8DynamicActivationInt4WeightConfig": _float8_int4,
}


def _packing(data: Fields, name: str, *allowed: str, default: str = "") -> str:
    """TorchAO writes a member of an enumeration, or the word that it stands for."""
    given = data.get(name)
    value = data.section(name).get("_data") if isinstance(given, dict) else given
    word = value.lower() if isinstance(value, str) else value or default or allowed[0]
    if word not in allowed:
        raise data.error(name, word, f"one of {', '.join(allowed)}: others are for the kernels of one kind of device")
    return str(word)


def _shared(data: Fields, name: str) -> tuple[int, int]:
    """Rows and columns that share a scale. Of a list, the second granularity is that of weights."""
    given = data.get(name)
    if isinstance(given, list) and len(given) == 2 and isinstance(given[1], dict):
        data = data.having(**{name: given[1]})
    granularity = data.section(name)
    kind = choice(granularity, "_type", ("PerTensor", "PerRow", "PerAxis", "PerGroup", "PerBlock"), "PerRow")
    inner = granularity.section("_data")
    if kind == "PerGroup":
        return 1, group_of(inner, "group_size")
    if kind == "PerBlock":
        return block_of(inner, "block_size")
    if kind == "PerTensor":
        return 0, 0
    axis = inner.get("axis") if kind == "PerAxis" else inner.get("dim")
    return (0, 1) if axis == (1 if kind == "PerAxis" else 0) else (1, 0)
