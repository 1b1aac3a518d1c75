"""bitsandbytes, as transformers saves its models. Without torch."""

from __future__ import annotations

from raylm.models.fields import Fields
from raylm.models.quantised.fields import choice, names_of
from raylm.models.quantised.scheme import Group, Quantisation, Scheme

_BLOCK = 64
"""Columns that share a scale, if nobody asks for another number: the configuration does not say."""


def read_bitsandbytes(fields: Fields) -> Quantisation:
    """Which values 16 codes of 4 bits stand for is in the files. Raises ConfigError."""
    if fields.flag("load_in_8bit", False) or fields.flag("_load_in_8bit", False):
        scheme = Scheme(layout="bnb8", numbers="int", bits=8)
    elif fields.flag("load_in_4bit", False) or fields.flag("_load_in_4bit", False):
        is_nf4 = choice(fields, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4") == "nf4"
        scheme = Scheme(layout="nf4" if is_nf4 else "fp4", numbers="float", bits=4, columns=_BLOCK)
    else:
        raise fields.error("load_in_4bit", fields.get("load_in_4bit"), "true, or load_in_8bit true")
    group = Group(targets=(), scheme=scheme)
    return Quantisation(method="bitsandbytes", groups=(group,), ignored=names_of(fields, "llm_int8_skip_modules"))
