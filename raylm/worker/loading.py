"""The first half of a worker's start: what the model is, who shares it, its weights.

describe -> join -> load; raylm/worker/building.py goes on from there.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from raylm import ops
from raylm.config.engine import RuntimeConfig
from raylm.config.resolve import ResolvedEngine
from raylm.errors import TransferError
from raylm.layers.attention_backends import RAYLM, AttentionBackend, choose_backend, raylm_lacks
from raylm.layers.dtypes import dtype_name
from raylm.log import get_logger
from raylm.model_files.source import ModelSource, locate
from raylm.models.arch import ArchConfig
from raylm.models.check import quantises, target_arch
from raylm.models.coverage import setting_of, slow_parts
from raylm.models.decoder import DecoderModel
from raylm.models.from_peer import Peer, WeightSender, receive_weights
from raylm.models.load import checkpoint_digest, load_model
from raylm.parallel.context import ParallelContext
from raylm.parallel.groups import Seat, connect
from raylm.parallel.peer_reduce import SplitLimits
from raylm.worker import memory
from raylm.worker.deterministic import check_experts
from raylm.worker.device import choose_cache_dtype, choose_dtype
from raylm.worker.drafting import Drafting, DraftSettings, load_drafting

logger = get_logger(__name__)


class Described(NamedTuple):
    """What is known of the model before it is loaded."""

    source: ModelSource
    arch: ArchConfig
    dtype: torch.dtype


class Loaded(NamedTuple):
    """A model on its device."""

    model: DecoderModel
    arch: ArchConfig
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    captures: bool
    """Whether steps run as CUDA graphs."""
    shares_prefixes: bool
    """Whether decode may read once what rows of a step share."""
    drafting: Drafting | None
    weights: WeightSender | None
    """What a new replica's worker of this place gets its weights from; with load.from_peer alone."""


def describe(config: ResolvedEngine, device: torch.device) -> Described:
    """Read the model's own configuration. Raises ConfigError."""
    source = locate(config.model.reference)
    arch = target_arch(ArchConfig.from_source(source, config.model.implementation), config)
    return Described(source, arch, choose_dtype(config.model.dtype, arch.dtype, device))


def join(config: ResolvedEngine, described: Described, device: torch.device, seat: Seat | None) -> ParallelContext:
    """Meet the other workers of the model; with no seat there are none."""
    deterministic = config.runtime.deterministic
    if seat is None:
        return ParallelContext.single(device, deterministic=deterministic)
    split = None
    # A rank that norms its share of the rows alone does not have the others' hidden states.
    whole = config.speculation.reads_hidden_states
    if not whole and described.arch.norms_sum:
        row_bytes = described.arch.hidden_size * described.dtype.itemsize
        split = SplitLimits(config.scheduler.max_num_batched_tokens, row_bytes)
    return connect(
        config.parallel,
        seat,
        device,
        timeout_s=config.runtime.start_timeout_s,
        split=split,
        hidden_size=described.arch.hidden_size,
        deterministic=deterministic,
    )


def load(
    config: ResolvedEngine,
    described: Described,
    context: ParallelContext,
    device: torch.device,
    *,
    peer: Peer | None,
    progress: bool,
) -> Loaded:
    """Load this worker's part of the weights: from `peer` where load.from_peer asks for it and it can be done, else
    from files. Raises ConfigError."""
    model_config = config.model
    source, arch, dtype = described
    if config.runtime.deterministic:
        check_experts(arch, dtype, context)
    attention = choose_attention(config, device, arch, dtype)
    digest = None
    if config.load.from_peer:
        digest = checkpoint_digest(source, arch, model_config.load_format, seed=model_config.seed)
    name = f"{model_config.served_name}, {dtype_name(dtype)}"
    with memory.out_of_memory(device, f"the weights of {name}, did not fit"):
        model = load_model(
            source,
            arch,
            context,
            dtype,
            model_config.load_format,
            attention=attention,
            as_stored=model_config.weights == "stored",
            quantise=quantises(arch, model_config),
            cache_codes=config.cache.dtype == "fp8",
            measure_cache=config.cache.scales == "measured",
            seed=model_config.seed,
            progress=progress,
            fill=lambda model: digest is not None and _receive(config, model, digest, peer),
        )
    sender = WeightSender(model, digest) if digest is not None else None
    captures = captures_graphs(config.runtime, device, attention)
    shares = shares_prefixes(config, device, attention, arch, dtype)
    drafting = _load_drafting(config, model, device, progress=progress)
    cache_dtype = choose_cache_dtype(config.cache.dtype, dtype)
    return Loaded(model, arch, dtype, cache_dtype, device, captures, shares, drafting, sender)


def shares_prefixes(
    config: ResolvedEngine, device: torch.device, attention: AttentionBackend, arch: ArchConfig, dtype: torch.dtype
) -> bool:
    """Whether decode may read keys and values that its rows share once for all of them."""
    has_kernel = arch.head_dim <= ops.PREFIX_HEAD_DIM and config.cache.block_size % 16 == 0 and not arch.alibi
    has_kernel = has_kernel and dtype.itemsize == 2 and device.type == "cuda" and attention is RAYLM
    return has_kernel and config.runtime.cascade_attention


def captures_graphs(config: RuntimeConfig, device: torch.device, attention: AttentionBackend) -> bool:
    """Whether steps of few tokens run as CUDA graphs."""
    return device.type == "cuda" and config.cuda_graphs and attention.supports_graphs


def choose_attention(
    config: ResolvedEngine, device: torch.device, arch: ArchConfig, dtype: torch.dtype
) -> AttentionBackend:
    """What attention runs on. Raises ConfigError."""
    setting = setting_of(config, arch, dtype, device)
    attention, reason = choose_backend(config.runtime.attention, setting)
    graphs = "" if attention.supports_graphs else ", no CUDA graphs"
    if device.type == "cuda" and (missing := raylm_lacks(device)):
        logger.warning("attention: %s%s; the other kernels are slow: %s", attention.name, graphs, missing)
        return attention
    logger.info("attention: %s (%s)%s", attention.name, reason, graphs if device.type == "cuda" else "")
    for part in slow_parts(arch, setting, attention):
        logger.warning("slow on this GPU: %s", part)
    return attention


def _receive(config: ResolvedEngine, model: DecoderModel, digest: str, peer: Peer | None) -> bool:
    """Get the weights from the peer; where they do not come from it, the log says why."""
    if peer is None:
        logger.info("weights: not from a live peer (load.from_peer): there is none")
        return False
    try:
        receive_weights(model, digest, peer, limit_s=config.load.peer_timeout_s)
    except TransferError as error:
        logger.warning("weights: not from a live peer (load.from_peer): %s", error)
        return False
    return True


def _load_drafting(
    config: ResolvedEngine, model: DecoderModel, device: torch.device, *, progress: bool
) -> Drafting | None:
    """What drafts on the device; None where nothing does."""
    speculation, limits = config.speculation, config.scheduler
    if not speculation.on_device:
        return None
    settings = DraftSettings(
        speculation.method,
        speculation.model,
        dummy=config.model.load_format == "dummy",
        seed=config.model.seed,
        as_stored=config.model.weights == "stored",
        max_tokens=limits.max_num_batched_tokens,
        block_size=config.cache.block_size,
        cache_dtype=choose_cache_dtype(config.cache.dtype, model.dtype),
        measure_cache=config.cache.scales == "measured",
    )
    if settings.measure_cache and settings.method != "draft_model":
        logger.info(
            "KV cache: fp8, with scales of 1 in the layer that drafts (speculation.method %s), which is not measured",
            settings.method,
        )
    with memory.out_of_memory(device, f"what drafts (speculation.method {speculation.method}) did not fit"):
        attention = partial(choose_attention, config, device)
        return load_drafting(settings, model, attention, progress=progress)
