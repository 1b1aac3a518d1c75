"""config.json's quantization_config, whichever method it is of. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from raylm.errors import ConfigError
from raylm.models.fields import Fields
from raylm.models.quantised.auto_round import read_auto_round
from raylm.models.quantised.awq import read_awq
from raylm.models.quantised.bitsandbytes import read_bitsandbytes
from raylm.models.quantised.compressed_tensors import read_compressed_tensors
from raylm.models.quantised.fp8 import read_fbgemm_fp8, read_fp8
from raylm.models.quantised.gptq import read_gptq
from raylm.models.quantised.modelopt import read_modelopt
from raylm.models.quantised.patterns import Schemes
from raylm.models.quantised.quark import read_quark
from raylm.models.quantised.scheme import MXFP4, Quantisation
from raylm.models.quantised.torchao import METHOD, read_torchao
from raylm.models.read_json import read_json

FIELD = "quantization_config"
OLD_FIELD = "compression_config"
"""llm-compressor's first name for it."""
FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside config.json that say it where that does not, and the method whose programs write them."""
_METHODS: dict[str, Callable[[Fields], Quantisation]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm_fp8,
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "modelopt": read_modelopt,
    "quark": read_quark,
    "bitsandbytes": read_bitsandbytes,
    METHOD: read_torchao,
}
_ALIASES = {
    "compressed_tensors": "compressed-tensors",
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
}
"""Other names in files."""


def read_quantisation(fields: Fields, folder: Path, *, mxfp4: bool) -> Quantisation | None:
    """None where weights are of 16 or 32 bits. `mxfp4`: those of this family may be GPT-OSS's.

    Raises ConfigError for a method or a packing that raylm does not read.
    """
    section = fields.section(FIELD)
    if not section.values and fields.get(OLD_FIELD) is not None:
        section = fields.section(OLD_FIELD).having(quant_method="compressed-tensors")
    if not section.values:
        name = next((name for name in FILES if (folder / name).is_file()), None)
        if name is None:
            return None
        section = Fields({"quant_method": FILES[name], **read_json(folder / name)}, str(folder / name))
    found = _read(section, mxfp4=mxfp4)
    try:
        Schemes(found)
    except ConfigError as error:
        raise ConfigError(f"{section.source}: {error}") from None
    return found


def method_of(values: Mapping[str, object]) -> object:
    """The name of the method; ModelOpt's older files do not say it."""
    name = values.get("quant_method")
    if name is None and isinstance(values.get("producer"), dict) and values["producer"].get("name") == "modelopt":  # type: ignore[attr-defined]
        return "modelopt"
    if name is None and (values.get("load_in_4bit") or values.get("load_in_8bit")):
        return "bitsandbytes"
    return _ALIASES.get(name, name) if isinstance(name, str) else name


def _read(section: Fields, *, mxfp4: bool) -> Quantisation:
    method = method_of(section.values)
    if method == MXFP4 and mxfp4:
        return Quantisation(method=MXFP4)
    if not isinstance(method, str) or method not in _METHODS:
        allowed = ", ".join((*_METHODS, *([MXFP4] if mxfp4 else [])))
        raise section.error("quant_method", section.get("quant_method"), f"{allowed}, or a .gguf file")
    return _METHODS[method](section)
