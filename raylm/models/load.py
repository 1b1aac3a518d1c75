"""From a model on disk to a model that runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch

from raylm.errors import ConfigError
from raylm.layers.attention_backends import RAYLM, AttentionBackend
from raylm.layers.dtypes import dtype_name
from raylm.log import get_logger
from raylm.model_files.source import ModelSource
from raylm.models import checkpoint
from raylm.models.arch import ArchConfig
from raylm.models.blocks import Build
from raylm.models.cache_scales import read_cache_scales
from raylm.models.check import check_format
from raylm.models.decoder import DecoderModel
from raylm.models.formats import read_checkpoint
from raylm.models.registry import family_of, model_class
from raylm.models.scheme import (
    AS_FP8,
    AS_NUMBERS,
    HOPPER,
    Scheme,
    configured_scheme,
    has_fp8,
    not_kept,
    read_scheme,
    stored_forms,
)
from raylm.models.weights import WeightLoader, fill_dummy
from raylm.parallel.context import ParallelContext

logger = get_logger(__name__)


@torch.inference_mode()
def load_model(
    source: ModelSource,
    arch: ArchConfig,
    context: ParallelContext,
    dtype: torch.dtype,
    load_format: str,
    *,
    attention: AttentionBackend = RAYLM,
    as_stored: bool = False,
    quantise: bool = False,
    cache_codes: bool = False,
    seed: int = 0,
    progress: bool = True,
    fill: Callable[[DecoderModel], bool] = lambda model: False,
) -> DecoderModel:
    """Build the model of `arch` on the context's device and fill it from `source`; it is ready for inference.

    `load_format` is a LoadFormat of the configuration; "dummy" reads no weights and draws them from `seed`. With
    `as_stored`, matrices stay in the blocks of a GGUF file, or such blocks that hold the same integers, in 8-bit floats
    with a scale a row or a tensor, as codes in patches, or in 16 bits where `dtype` is float32, if the device has
    kernels that read them so; else they are converted to `dtype`.
    With `quantise`, linear layers and experts are quantised to FP8 while they are loaded. With `cache_codes` the KV
    cache will hold 8-bit floats, whose scales are read too. `fill` is tried first and may fill the model from
    elsewhere; it says if it has. Raises ConfigError when the format is not the source's, or the checkpoint is damaged
    or does not fit.
    """
    check_format(source, load_format)
    names = family_of(arch.architecture).names
    read = cache(partial(read_checkpoint, source, arch, load_format))
    with _too_large(source):
        scheme = AS_NUMBERS
        if quantise:
            _check_fp8(context.device, dtype)
            scheme = AS_FP8
        elif as_stored and load_format == "dummy":
            scheme = configured_scheme(arch, dtype, context.device)
        elif as_stored and _may_stay(source, arch, context):
            scheme = read_scheme(*read(), names, arch, dtype, context.device)
        scales = read_cache_scales(source, arch, load_format) if cache_codes else {}
        model = model_class(arch.architecture)(Build(arch, context, dtype, attention, scheme, scales))
    if fill(model):
        return model
    began = time.monotonic()
    if load_format == "dummy":
        fill_dummy(model, seed=seed)
    else:
        if arch.quantisation is not None and arch.quantisation.of_weights and not stored_forms(model):
            logger.info(
                "weights: stored as %s, decoded to %s while they are loaded: they take the memory of the latter",
                arch.quantisation,
                dtype_name(dtype),
            )
        _log_decoded(WeightLoader(model, names, progress=progress).load(*read()), dtype)
    seconds, size = time.monotonic() - began, sum(x.nbytes for x in model.parameters()) / 1e9
    origin = f"seed {seed}" if load_format == "dummy" else source.path
    logger.info("weights: %.2f GB from %s in %.2f s (%.1f GB/s)", size, origin, seconds, size / max(seconds, 1e-9))
    _log_forms(model, scheme, quantised=quantise)
    return model


def _may_stay(source: ModelSource, arch: ArchConfig, context: ParallelContext) -> bool:
    """Whether the device may compute with matrices as the source stores them."""
    if context.device.type == "cpu" or arch.quantisation is not None:
        return True
    # Products of patches sum in an order that depends on the number of rows.
    return source.kind == "gguf" and not context.deterministic


def file_scheme(source: ModelSource, arch: ArchConfig, dtype: torch.dtype) -> Scheme:
    """What Hopper GPUs keep of a GGUF file as it is stored, by its header alone. Raises ConfigError."""
    names = family_of(arch.architecture).names
    return read_scheme(*read_checkpoint(source, arch, "gguf"), names, arch, dtype, HOPPER)


def _log_decoded(blocks: Counter[str], dtype: torch.dtype) -> None:
    """How many matrices in blocks of a GGUF file, by their types, are not computed with as they are stored."""
    if blocks:
        found = ", ".join(f"{count} in {name}" for name, count in sorted(blocks.items()))
        logger.info("weights: matrices decoded to %s while they are loaded: %s", dtype_name(dtype), found)


def _log_forms(model: DecoderModel, scheme: Scheme, *, quantised: bool) -> None:
    """What matrices are, and what they are in spite of the scheme."""
    dtype = dtype_name(model.dtype)
    if forms := stored_forms(model):
        found = ", ".join(f"{count} in {name}" for name, count in sorted(forms.items()))
        how = "quantised while they were loaded" if quantised else "computed with as they are stored"
        logger.info("weights: %s: %s; activations and all other weights are %s", how, found, dtype)
    if others := not_kept(model, scheme):
        logger.info(
            "weights: matrices that are %s all the same: %d; ranks cut their blocks or patches, kernels do not take "
            "their sizes, or what is computed in one product with them is stored otherwise",
            dtype,
            others,
        )


def _check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cuda" and dtype == torch.float32:
        raise ConfigError(
            "model.quantization is fp8, but model.dtype is float32; allowed with it on GPUs: bfloat16, float16"
        )
    if device.type == "cuda" and not has_fp8(device):
        raise ConfigError(
            f"model.quantization is fp8, but {torch.cuda.get_device_name(device)} ({device}) has no kernels for it: "
            "those are raylm's extension's, for Hopper GPUs; allowed here: none"
        )


@contextmanager
def _too_large(source: ModelSource) -> Iterator[None]:
    """A ConfigError where the CPU's memory cannot hold what the source describes."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if "DefaultCPUAllocator" not in str(error) and "overflow" not in str(error).lower():
            raise
        raise ConfigError(f"{source.path}: describes a model that is too large for this machine's memory") from None


def checkpoint_digest(source: ModelSource, arch: ArchConfig, load_format: str, *, seed: int) -> str:
    """Equal for equal weights, read here or on another node. Raises ConfigError where the checkpoint is damaged."""
    if load_format == "dummy":
        return f"seed {seed}"
    tensors, _ = read_checkpoint(source, arch, load_format)
    return checkpoint.digest(tensors)
