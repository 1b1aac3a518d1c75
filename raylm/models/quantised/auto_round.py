"""AutoRound's own configuration; its weights are packed as GPTQ's or AWQ's. Without torch."""

from __future__ import annotations

import re
from typing import Literal

from raylm.models.fields import Fields
from raylm.models.quantised import awq, gptq
from raylm.models.quantised.fields import bits_of, choice, group_of
from raylm.models.quantised.patterns import REGEX
from raylm.models.quantised.scheme import Group, Quantisation, Scheme, Zero

_ZEROS: dict[str, Zero | None] = {"auto_gptq": "stored_less_1", "auto_awq": "stored", "gptq": None, "": None}
"""None: programs differ in what they store, so that only symmetric weights are certain."""
_UNQUANTISED = 16
_PLAIN = re.compile(r"[\w.\-]+")


def read_auto_round(fields: Fields) -> Quantisation:
    """Raises ConfigError for a packing that raylm does not read."""
    choice(fields, "data_type", ("int",), "int")
    given = fields.get("packing_format") or "auto_round:auto_gptq"
    packing = given.removeprefix("auto_round").removeprefix(":") if isinstance(given, str) else None
    if packing not in _ZEROS:
        allowed = ", ".join(f"auto_round:{name}" if name else "auto_round" for name in _ZEROS)
        raise fields.error("packing_format", given, f"one of {allowed}")
    usual = _scheme(fields, fields, packing)
    groups, ignored = [], []
    layers = fields.section("extra_config")
    for name in layers.values:
        own = layers.section(name)
        target = name if _PLAIN.fullmatch(name) else REGEX + name
        if own.get("bits") == _UNQUANTISED:
            ignored.append(target)
        else:
            choice(own, "data_type", ("int",), "int")
            groups.append(Group(targets=(target,), scheme=_scheme(own, fields, packing)))
    return Quantisation(method="auto-round", groups=(*groups, Group(targets=(), scheme=usual)), ignored=tuple(ignored))


def _scheme(own: Fields, all_layers: Fields, packing: str) -> Scheme:
    """Of one layer, whose settings are those of all layers where it has none of its own."""
    layout: Literal["gptq", "awq"] = "awq" if packing == "auto_awq" else "gptq"
    bits = bits_of(_having(own, all_layers, "bits"), "bits", allowed=awq.BITS if layout == "awq" else gptq.BITS)
    columns = group_of(_having(own, all_layers, "group_size"), "group_size")
    symmetric = _having(own, all_layers, "sym").flag("sym", True)
    zero: Zero | None = "middle" if symmetric else _ZEROS[packing]
    if zero is None:
        raise own.error("sym", False, "true, or the packing_format auto_round:auto_gptq or auto_round:auto_awq")
    return gptq.scheme_of(layout, bits, columns, zero)


def _having(own: Fields, all_layers: Fields, name: str) -> Fields:
    return all_layers if own.get(name) is None else own
