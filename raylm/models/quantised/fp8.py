"""FP8 as transformers, DeepSeek and Qwen publish it (quant_method fp8), and Meta's (fbgemm_fp8). Without torch."""

from __future__ import annotations

from raylm.models.fields import Fields
from raylm.models.quantised.fields import block_of, choice, names_of
from raylm.models.quantised.scheme import Group, Quantisation, Scheme


def read_fp8(fields: Fields) -> Quantisation:
    """A scale a tensor, or one a block of weight_block_size. How activations would be quantised changes no weight.
    Raises ConfigError."""
    choice(fields, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    choice(fields, "expert_dtype", ("fp8",), "fp8")
    rows, columns = (0, 0) if fields.get("weight_block_size") is None else block_of(fields, "weight_block_size")
    return _fp8("fp8", rows, columns, names_of(fields, "modules_to_not_convert", "ignored_layers"))


def read_fbgemm_fp8(fields: Fields) -> Quantisation:
    """A scale a row. Raises ConfigError."""
    return _fp8("fbgemm_fp8", 1, 0, names_of(fields, "modules_to_not_convert"))


def _fp8(method: str, rows: int, columns: int, ignored: tuple[str, ...]) -> Quantisation:
    scheme = Scheme(layout="values", numbers="float", bits=8, rows=rows, columns=columns)
    return Quantisation(method=method, groups=(Group(targets=(), scheme=scheme),), ignored=ignored)
