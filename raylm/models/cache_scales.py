"""Scales of keys and values that a quantised checkpoint has, for a KV cache of 8-bit floats."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from raylm.errors import ConfigError
from raylm.layers.attention import CacheScales
from raylm.log import get_logger
from raylm.model_files.source import ModelSource
from raylm.models.arch import ArchConfig
from raylm.models.checkpoint import CheckpointTensor
from raylm.models.formats import raw_tensors

logger = get_logger(__name__)

_NAME = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.(?:.*\.)?(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)")
"""Such as model.layers.0.self_attn.k_scale, ...attn.v_scale, ...k_proj.k_scale: keys, values or both of a layer."""


def read_cache_scales(
    source: ModelSource, arch: ArchConfig, load_format: str, *, others_measured: bool = False
) -> dict[int, CacheScales]:
    """Of layers by their numbers; a layer that is not there has scales of 1, or is measured later. Raises ConfigError
    for scales that are not one number for the layer, and positive."""
    found: dict[int, dict[str, float]] = {}
    quantisation = arch.quantisation
    has_scales = quantisation is not None and quantisation.has_parts and quantisation.cache != "other"
    if has_scales and load_format != "dummy":
        for tensor in raw_tensors(source, arch, load_format):
            match = _NAME.fullmatch(tensor.name)
            # A layer past the last one drafts (MTP).
            if match is not None and int(match[1]) < arch.num_layers:
                scale = _value(tensor)
                found.setdefault(int(match[1]), {}).update(dict.fromkeys(match[2] or match[3], scale))
    if found:
        kept = "; these are not measured" if others_measured else ""
        logger.info(
            "KV cache: fp8, with the checkpoint's scales in %d of %d layers%s", len(found), arch.num_layers, kept
        )
    elif not others_measured:
        why = "the checkpoint has none for such numbers" if load_format != "dummy" else "there is no checkpoint"
        logger.info("KV cache: fp8, with scales of 1: %s", why)
    return {number: CacheScales(scales.get("k", 1.0), scales.get("v", 1.0)) for number, scales in found.items()}


def _value(tensor: CheckpointTensor) -> float:
    if tensor.num_values != 1:
        raise ConfigError(
            f"{tensor.path}: tensor {tensor.name} has shape {tensor.shape}; allowed with cache.dtype fp8: one number "
            "for a layer's keys or values"
        )
    ((_, piece),) = replace(tensor, shape=(1,)).pieces(0, 1)
    scale = float(piece)
    if not 0 < scale < math.inf:
        raise ConfigError(f"{tensor.path}: tensor {tensor.name} is {scale:g}; allowed: positive numbers")
    return scale
