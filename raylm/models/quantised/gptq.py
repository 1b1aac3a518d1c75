"""GPTQ, as AutoGPTQ and GPTQModel write it. Without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from raylm.models.fields import Fields
from raylm.models.quantised.fields import bits_of, choice, group_of, names_of
from raylm.models.quantised.patterns import REGEX
from raylm.models.quantised.scheme import Group, Quantisation, Scheme, Zero

BITS = (2, 3, 4, 8)
_ZEROS: dict[str, Zero] = {"gptq": "stored_less_1", "gptq_v2": "stored"}


def read_gptq(fields: Fields) -> Quantisation:
    """Raises ConfigError for a packing that raylm does not read."""
    name = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
    stored = choice(fields, name, _ZEROS, "gptq")
    if fields.get("is_marlin_format"):
        raise fields.error("is_marlin_format", True, "false: take the checkpoint as GPTQ wrote it")
    choice(fields, "pack_dtype", ("int32",), "int32")
    bits, columns = bits_of(fields, "bits", allowed=BITS), group_of(fields, "group_size")
    usual = scheme_of("gptq", bits, columns, _ZEROS[stored], ordered=fields.flag("desc_act", False))
    groups, ignored = _dynamic(fields.section("dynamic"), usual)
    return Quantisation(
        method="gptq",
        groups=(*groups, Group(targets=(), scheme=usual)),
        ignored=(*ignored, *names_of(fields, "modules_to_not_convert")),
    )


def scheme_of(layout: Literal["gptq", "awq"], bits: int, columns: int, zero: Zero, *, ordered: bool = False) -> Scheme:
    """Of integers that are packed as GPTQ or AWQ packs them."""
    return Scheme(layout=layout, numbers="int", bits=bits, columns=columns, zero=zero, ordered=ordered)


def _dynamic(fields: Fields, usual: Scheme) -> tuple[list[Group], list[str]]:
    """GPTQModel's settings of single modules: by regular expressions, behind "-:" for those that are not quantised."""
    groups, ignored = [], []
    for pattern in fields.values:
        if pattern.startswith("-:"):
            ignored.append(REGEX + pattern.removeprefix("-:"))
            continue
        own = fields.section(pattern)
        scheme = replace(
            usual,
            bits=usual.bits if own.get("bits") is None else bits_of(own, "bits", allowed=BITS),
            columns=group_of(own, "group_size", default=usual.columns),
            ordered=own.flag("desc_act", usual.ordered),
        )
        groups.append(Group(targets=(REGEX + pattern.removeprefix("+:"),), scheme=scheme))
    return groups, ignored
