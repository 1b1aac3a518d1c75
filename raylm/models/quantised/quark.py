"""AMD Quark's export to transformers' format. Without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from raylm.models.fields import Fields
from raylm.models.quantised.fields import block_of, choice, group_of, names_of
from raylm.models.quantised.scheme import Group, Quantisation, Scheme

_MX_COLUMNS = 32
_NUMBERS = ("fp8_e4m3", "int8", "fp4")


def read_quark(fields: Fields) -> Quantisation:
    """Raises ConfigError for a type of weights that raylm does not read."""
    choice(fields.section("export"), "weight_format", ("real_quantized",), "real_quantized")
    groups = []
    for section in ("layer_quant_config", "layer_type_quant_config"):
        layers = fields.section(section)
        groups += [_group((name,), layers.section(name)) for name in layers.values]
    groups.append(_group((), fields.section("global_quant_config")))
    return Quantisation(method="quark", groups=tuple(groups), ignored=names_of(fields, "exclude"))


def _group(targets: tuple[str, ...], fields: Fields) -> Group:
    if fields.get("weight") is None:
        return Group(targets=targets, scheme=None)
    if isinstance(given := fields.get("weight"), list):
        raise fields.error("weight", given, "one type of numbers, not a list of them")
    weight = fields.section("weight")
    kind = choice(weight, "dtype", _NUMBERS)
    if weight.flag("symmetric", True) is False:
        raise weight.error("symmetric", False, "true")
    if kind == "fp4":
        choice(weight, "qscheme", ("per_group",))
        choice(weight, "scale_format", ("e8m0",))
        if (group := group_of(weight, "group_size")) != _MX_COLUMNS:
            raise weight.error("group_size", group, str(_MX_COLUMNS))
        scheme = Scheme(layout="nibbles", numbers="float", bits=4, columns=_MX_COLUMNS, exponents=True)
        return Group(targets=targets, scheme=scheme)
    shared = choice(weight, "qscheme", ("per_tensor", "per_channel", "per_block"))
    if shared == "per_channel" and weight.get("ch_axis") not in (0, None):
        raise weight.error("ch_axis", weight.get("ch_axis"), "0")
    rows, columns = block_of(weight, "block_size") if shared == "per_block" else (int(shared == "per_channel"), 0)
    numbers: Literal["int", "float"] = "int" if kind == "int8" else "float"
    scheme = Scheme(layout="values", numbers=numbers, bits=8, rows=rows, columns=columns)
    if not _rounds_activations(fields, numbers):
        scheme = replace(scheme, weights_only=True)
    return Group(targets=targets, scheme=scheme)


def _rounds_activations(fields: Fields, numbers: Literal["int", "float"]) -> bool:
    """Whether products may round activations as they round weights, with a scale a token."""
    if fields.get("input_tensors") is None:
        return False
    if numbers == "float" or isinstance(fields.get("input_tensors"), list):
        return numbers == "float"
    activations = fields.section("input_tensors")
    in_groups = activations.get("qscheme") == "per_group"
    return activations.get("dtype") == "int8" and activations.get("symmetric") is not False and not in_groups
