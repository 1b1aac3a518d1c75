"""The tensors of a GGUF file, quantised ones decoded by the gguf package."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GGMLType
from torch import Tensor

from raylm.errors import ConfigError
from raylm.layers.slots import BlockForm
from raylm.model_files.gguf_header import GGUFTensorInfo, read_gguf
from raylm.model_files.source import ModelSource
from raylm.model_files.weight_files import weight_files
from raylm.models.checkpoint import CheckpointTensor, Encoding, plain

_PLAIN = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}
_QUANTISED = (
    GGMLType.Q4_0,
    GGMLType.Q4_1,
    GGMLType.Q5_0,
    GGMLType.Q5_1,
    GGMLType.Q8_0,
    GGMLType.Q2_K,
    GGMLType.Q3_K,
    GGMLType.Q4_K,
    GGMLType.Q5_K,
    GGMLType.Q6_K,
    GGMLType.IQ1_S,
    GGMLType.IQ1_M,
    GGMLType.IQ2_XXS,
    GGMLType.IQ2_XS,
    GGMLType.IQ2_S,
    GGMLType.IQ3_XXS,
    GGMLType.IQ3_S,
    GGMLType.IQ4_NL,
    GGMLType.IQ4_XS,
    GGMLType.MXFP4,
)
_GROUPS = 16
"""The gguf package decodes at least this many rows at a time, one call each."""


def gguf_tensors(source: ModelSource) -> list[CheckpointTensor]:
    """Every tensor of the file and its shards. Raises ConfigError for a type that cannot be decoded."""
    return [
        CheckpointTensor(info.name, info.shape, path, info.offset, _encoding(path, info))
        for path in weight_files(source, "gguf").paths
        for info in read_gguf(path).tensors
    ]


def _encoding(path: Path, info: GGUFTensorInfo) -> Encoding:
    if info.type in _PLAIN:
        return plain(_PLAIN[GGMLType(info.type)])
    if info.type not in _QUANTISED:
        known = {kind.value: kind.name for kind in GGMLType}
        allowed = ", ".join(kind.name for kind in (*_PLAIN, *_QUANTISED))
        raise ConfigError(f"{path}: tensor {info.name} has type {known.get(info.type, info.type)}; allowed: {allowed}")
    kind = GGMLType(info.type)
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    form = BlockForm(kind.value, kind.name, values, num_bytes)
    return Encoding(values, num_bytes, partial(_dequantise, kind=kind, block_bytes=num_bytes), form)


def _dequantise(raw: np.ndarray, kind: GGMLType, block_bytes: int) -> Tensor:
    # Blocks stand alone, so any division into rows decodes alike; few long rows save calls.
    num_blocks = raw.size // block_bytes
    rows = _GROUPS if num_blocks % _GROUPS == 0 else 1
    return torch.from_numpy(gguf.dequantize(raw.reshape(rows, -1), kind).reshape(-1))
