"""compressed-tensors, which llm-compressor writes: groups of modules, each with its own format. Without torch."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.fields import Fields
from raylm.models.quantised.fields import bits_of, block_of, choice, group_of, names_of
from raylm.models.quantised.scheme import CacheNumbers, Group, Quantisation, Scheme

_FORMATS = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_MIXED = "mixed-precision"
"""Each group names its own."""
_CACHE_BITS = _ACTIVATION_BITS = 8
_ORDERED = (True, "group", "dynamic")
_NVFP4_COLUMNS, _MX_COLUMNS = 16, 32


def read_compressed_tensors(fields: Fields) -> Quantisation:
    """Raises ConfigError for formats that raylm does not read, and for weights that are sparse or rotated."""
    sparsity = fields.section("sparsity_config")
    choice(sparsity, "format", ("dense",), "dense")
    if fields.section("transform_config").section("config_groups").values:
        raise fields.error("transform_config", "there", "none: raylm does not rotate activations")
    groups = []
    configured = fields.section("config_groups")
    cache = read_cache_scheme(fields)
    if not configured.values and cache is None:
        raise fields.error("config_groups", fields.get("config_groups"), "a mapping of groups of modules")
    for name in configured.values:
        group = configured.section(name)
        if group.get("weights") is not None:
            group_format = "format" if group.get("format") is not None else None
            place = group if group_format else fields
            stored = choice(place, "format", _FORMATS if group_format else (*_FORMATS, _MIXED))
            if stored == _MIXED:
                raise group.error("format", None, f"one of {', '.join(_FORMATS)}: the whole is {_MIXED}")
            scheme = _scheme(group.section("weights"), stored)
            if (scheme.numbers == "float" or scheme.rounds_rows) and not _rounds_activations(group, scheme):
                scheme = replace(scheme, weights_only=True)
            groups.append(Group(targets=names_of(group, "targets"), scheme=scheme))
    ignored = names_of(fields, "ignore")
    return Quantisation(method="compressed-tensors", groups=tuple(groups), ignored=ignored, cache=cache)


def _rounds_activations(group: Fields, scheme: Scheme) -> bool:
    """Whether products may round activations as they round weights, with a scale a token."""
    if group.get("input_activations") is None:
        return False
    if scheme.numbers == "float":
        return True
    activations = group.section("input_activations")
    is_integer = activations.get("type") in (None, "int") and activations.get("num_bits") == _ACTIVATION_BITS
    of_tokens = activations.get("strategy") in (None, "token", "tensor")
    return is_integer and of_tokens and activations.flag("symmetric", True)


def read_cache_scheme(fields: Fields) -> CacheNumbers | None:
    """What kv_cache_scheme asks for."""
    if fields.get("kv_cache_scheme") is None:
        return None
    if not isinstance(fields.get("kv_cache_scheme"), dict):
        return "other"
    scheme = fields.section("kv_cache_scheme")
    return "fp8" if scheme.get("type") == "float" and scheme.get("num_bits") == _CACHE_BITS else "other"


def _scheme(weights: Fields, stored: str) -> Scheme:
    if stored == "nvfp4-pack-quantized":
        group = group_of(weights, "group_size", default=_NVFP4_COLUMNS)
        return _fp4(weights, group, _NVFP4_COLUMNS, exponents=False)
    if stored == "mxfp4-pack-quantized":
        return _fp4(weights, group_of(weights, "group_size", default=_MX_COLUMNS), _MX_COLUMNS, exponents=True)
    is_packed = stored == "pack-quantized"
    numbers = choice(weights, "type", _numbers(stored), "int")
    bits = 8
    if numbers == "int":
        bits = bits_of(weights, "num_bits", allowed=(2, 4, 8) if is_packed else range(2, 9))
    else:
        bits_of(weights, "num_bits", allowed=(8,))
    rows, columns = _shared(weights)
    symmetric = weights.flag("symmetric", True)
    if stored == "mxfp8-quantized" and columns != _MX_COLUMNS:
        raise weights.error("group_size", columns, str(_MX_COLUMNS))
    if not symmetric and numbers == "float":
        raise weights.error("symmetric", False, "true: floats have no zero point")
    return Scheme(
        layout="packed" if is_packed else "values",
        numbers="int" if numbers == "int" else "float",
        bits=bits,
        rows=rows,
        columns=columns,
        zero="stored" if not symmetric else "middle" if is_packed else "none",
        exponents=stored == "mxfp8-quantized",
        ordered=weights.get("actorder") in _ORDERED,
    )


def _numbers(stored: str) -> tuple[str, ...]:
    if stored in ("float-quantized", "mxfp8-quantized"):
        return ("float",)
    return ("int", "float") if stored == "naive-quantized" else ("int",)


def _fp4(weights: Fields, columns: int, expected: int, *, exponents: bool) -> Scheme:
    choice(weights, "type", ("float",))
    bits_of(weights, "num_bits", allowed=(4,))
    if columns != expected:
        raise weights.error("group_size", columns, str(expected))
    if not weights.flag("symmetric", True):
        raise weights.error("symmetric", False, "true: floats have no zero point")
    return Scheme(
        layout="nibbles", numbers="float", bits=4, columns=columns, exponents=exponents, two_scales=not exponents
    )


def _shared(weights: Fields) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    group = group_of(weights, "group_size", default=0)
    usual = "tensor" if weights.get("group_size") is None else "group" if group else "channel"
    strategy = choice(weights, "strategy", ("tensor", "channel", "group", "block"), usual)
    if strategy == "block":
        return block_of(weights, "block_structure")
    if strategy == "group" and not group:
        raise weights.error("group_size", weights.get("group_size"), "a positive integer, as the strategy is group")
    return {"tensor": (0, 0), "channel": (1, 0), "group": (1, group)}[strategy]
