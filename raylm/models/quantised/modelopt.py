"""NVIDIA ModelOpt: quantization_config of config.json, or hf_quant_config.json beside it. Without torch."""

from __future__ import annotations

from raylm.models.fields import Fields
from raylm.models.quantised.compressed_tensors import read_cache_scheme
from raylm.models.quantised.fields import group_of, names_of
from raylm.models.quantised.scheme import CacheNumbers, Group, Quantisation, Scheme

_MIXED, _UNQUANTISED = "MIXED_PRECISION", ("UNQUANTIZED", "NONE")
_BLOCK = 128
_NVFP4_COLUMNS, _MX_COLUMNS = 16, 32
_NVFP4 = Scheme(layout="nibbles", numbers="float", bits=4, columns=_NVFP4_COLUMNS, two_scales=True)
_ALGORITHMS = {
    "FP8": Scheme(layout="values", numbers="float", bits=8, rows=0, columns=0),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(layout="values", numbers="float", bits=8),
    "FP8_PB_WO": Scheme(layout="values", numbers="float", bits=8, rows=_BLOCK, columns=_BLOCK, weights_only=True),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "MXFP8": Scheme(layout="values", numbers="float", bits=8, columns=_MX_COLUMNS, exponents=True),
}


def read_modelopt(fields: Fields) -> Quantisation:
    """`fields` are those of quantization_config, or of the whole hf_quant_config.json. Raises ConfigError for an
    algorithm that raylm does not read."""
    if fields.get("quantization") is not None:
        fields = fields.section("quantization")
    ignored = names_of(fields, "exclude_modules", "ignore")
    cache = _cache(fields)
    if fields.get("quant_algo") is None and cache is not None:
        return Quantisation(method="modelopt", ignored=ignored, cache=cache)
    algorithm = _algorithm(fields, mixed=True)
    if algorithm != _MIXED:
        group = Group(targets=(), scheme=_scheme(fields, algorithm))
        return Quantisation(method="modelopt", groups=(group,), ignored=ignored, cache=cache)
    layers = fields.section("quantized_layers")
    if not layers.values:
        raise fields.error("quantized_layers", fields.get("quantized_layers"), f"a mapping, as quant_algo is {_MIXED}")
    groups = []
    for name in layers.values:
        own = layers.section(name)
        given = str(own.get("quant_algo")).upper()
        scheme = None if given in _UNQUANTISED else _scheme(own, _algorithm(own, mixed=False))
        groups.append(Group(targets=(name,), scheme=scheme))
    return Quantisation(method="modelopt", groups=tuple(groups), ignored=ignored, cache=cache)


def _cache(fields: Fields) -> CacheNumbers | None:
    algorithm = fields.get("kv_cache_quant_algo")
    if algorithm is None:
        return read_cache_scheme(fields)
    return "fp8" if str(algorithm).upper() == "FP8" else "other"


def _algorithm(fields: Fields, *, mixed: bool) -> str:
    given = fields.get("quant_algo")
    name = given.upper() if isinstance(given, str) else None
    if name not in _ALGORITHMS and not (mixed and name == _MIXED):
        allowed = (*_ALGORITHMS, _MIXED) if mixed else tuple(_ALGORITHMS)
        raise fields.error("quant_algo", given, f"one of {', '.join(allowed)}")
    return str(name)


def _scheme(fields: Fields, algorithm: str) -> Scheme:
    scheme = _ALGORITHMS[algorithm]
    if scheme.columns and (group := group_of(fields, "group_size", default=scheme.columns)) != scheme.columns:
        raise fields.error("group_size", group, f"{scheme.columns}, as quant_algo is {algorithm}")
    return scheme
