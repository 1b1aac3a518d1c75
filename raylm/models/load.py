"""From a model on disk to a model that runs."""

from __future__ import annotations

import torch

from raylm.config.source import ModelSource
from raylm.errors import ConfigError
from raylm.layers.attention_backends import RAYLM, AttentionBackend
from raylm.models.arch import ArchConfig
from raylm.models.decoder import DecoderModel
from raylm.models.registry import model_class
from raylm.models.weights import WeightLoader, fill_dummy
from raylm.parallel.context import ParallelContext

_FORMATS = {"gguf": "gguf", "folder": "safetensors"}
"""Kind of source -> the format of its weights."""


@torch.inference_mode()
def load_model(
    source: ModelSource,
    arch: ArchConfig,
    context: ParallelContext,
    dtype: torch.dtype,
    load_format: str,
    *,
    attention: AttentionBackend = RAYLM,
    seed: int = 0,
    progress: bool = True,
) -> DecoderModel:
    """Build the model of `arch` on the context's device and fill it from `source`; it is ready for inference.

    `load_format` is a LoadFormat of the configuration; "dummy" reads no weights and draws them from `seed`.
    Raises ConfigError when the format is not the source's, or the checkpoint is damaged or does not fit.
    """
    native = _FORMATS[source.kind]
    if load_format not in ("auto", "dummy", native):
        raise ConfigError(f"model.load_format is {load_format!r}, but {source.path} allows: auto, dummy, {native}")
    model = model_class(arch.architecture)(arch, context, dtype, attention)
    if load_format == "dummy":
        fill_dummy(model, seed=seed)
    elif source.kind == "gguf":
        from raylm.models.gguf import gguf_tensors

        WeightLoader(model, progress=progress).load(gguf_tensors(source.path, arch), model.GGUF_WEIGHTS)
    else:
        from raylm.models.safetensors import folder_tensors

        WeightLoader(model, progress=progress).load(folder_tensors(source.path), model.WEIGHTS)
    return model
