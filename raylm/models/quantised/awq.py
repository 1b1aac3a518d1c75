"""AWQ, as AutoAWQ writes it. Without torch."""

from __future__ import annotations

from raylm.models.fields import Fields
from raylm.models.quantised.fields import bits_of, choice, group_of, names_of
from raylm.models.quantised.gptq import scheme_of
from raylm.models.quantised.scheme import Group, Quantisation

BITS = (4,)


def read_awq(fields: Fields) -> Quantisation:
    """Raises ConfigError for a packing that raylm does not read: gemv and other versions."""
    for name in ("version", "checkpoint_format", "format"):
        given = fields.get(name)
        choice(fields.having(**{name: given.lower() if isinstance(given, str) else given}), name, ("gemm",), "gemm")
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point", False, "true")
    bits, columns = bits_of(fields, "bits", "w_bit", allowed=BITS), group_of(fields, "group_size", "q_group_size")
    group = Group(targets=(), scheme=scheme_of("awq", bits, columns, "stored"))
    return Quantisation(method="awq", groups=(group,), ignored=names_of(fields, "modules_to_not_convert"))
