"""The model that drafts beside the target: loaded before the cache is sized, at work once there is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from raylm.config.speculation import SpeculationConfig
from raylm.errors import ConfigError
from raylm.layers.attention import KVCache
from raylm.layers.attention_backends import AttentionBackend
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.arch_eagle3 import read_eagle3_arch
from raylm.models.blocks import Build
from raylm.models.cache_spec import CacheSpec, cache_specs
from raylm.models.decoder import DecoderModel
from raylm.models.eagle3 import DUMMY, Eagle3Head, load_eagle3, owned_parts
from raylm.models.load import load_model
from raylm.models.mtp import MtpDecoder
from raylm.models.registry import model_class
from raylm.models.taps import HiddenTaps
from raylm.worker.cache_groups import CacheGroups
from raylm.worker.proposers import (
    DeviceProposer,
    DraftModelProposer,
    Eagle3Proposer,
    MtpProposer,
    Rows,
)

DeviceMethod = Literal["draft_model", "eagle3", "mtp"]
"""Values of speculation.method that draft on the device."""

ChooseAttention = Callable[[ArchConfig, torch.dtype], AttentionBackend]
MakeProposer = Callable[[Rows, list[KVCache], int], DeviceProposer]


class Drafting(NamedTuple):
    """What drafts beside a target model."""

    layers: tuple[CacheSpec, ...]
    """What each of its layers keeps. Windows count for nothing: the blocks are those of a group that keeps all."""
    make: MakeProposer
    """A proposer for rows, with the keys and values of its layers, in the blocks of a cache group."""


class DraftSettings(NamedTuple):
    """How drafts are made on the device."""

    method: DeviceMethod
    path: str | None
    """speculation.model: the draft model, or the EAGLE-3 head."""
    dummy: bool
    """Random weights, drawn from `seed`."""
    seed: int
    as_stored: bool
    """As load_model takes it."""
    max_tokens: int
    """Tokens of the largest step."""
    block_size: int
    cache_dtype: torch.dtype
    """Of the KV cache, the target's and that of the layers that draft."""
    measure_cache: bool = False
    """Whether a draft model's cache of 8-bit floats has scales as load_model measures them. All other layers that draft
    have scales of 1: what they store follows from the target's hidden states of a request."""


def load_drafting(
    settings: DraftSettings, target: DecoderModel, choose_attention: ChooseAttention, *, progress: bool
) -> Drafting:
    """Load what drafts for `target`. Raises ConfigError where it is none for this target."""
    if settings.method == "draft_model":
        return _draft_model(settings, target, choose_attention, progress)
    if settings.method == "eagle3":
        return _eagle3(settings, target, choose_attention, progress)
    return _mtp(settings, target)


class DraftOutline(NamedTuple):
    """What a model that drafts takes on one rank, beside its target."""

    weight_bytes: int
    layers: tuple[CacheSpec, ...]
    """As Drafting has them."""


@torch.inference_mode()
def outline_drafting(
    speculation: SpeculationConfig, target: DecoderModel, *, dummy: bool, block_size: int, cache_dtype: torch.dtype
) -> DraftOutline | None:
    """The same without memory for weights: for a target on the device "meta". None where nothing drafts on the device.
    Raises ConfigError as load_drafting does."""
    context, dtype = target.context, target.dtype
    if speculation.method == "mtp":
        # The layer's weights are the target's.
        return DraftOutline(0, _mtp_caches(target, block_size, cache_dtype))
    if speculation.model is None:
        return None
    source = locate(speculation.model, field="speculation.model")
    drafter: torch.nn.Module
    if speculation.method == "eagle3":
        spec = read_eagle3_arch(source, target.arch)
        arch = spec.arch
        drafter = Eagle3Head(spec, target, owned=DUMMY if dummy else owned_parts(source, spec, target))
    else:
        # The rotary tables take time to compute.
        arch = dataclasses.replace(ArchConfig.from_source(source), max_position=1)
        drafter = model_class(arch.architecture)(Build(arch, context, dtype))
    num_bytes = sum(parameter.nbytes for parameter in drafter.parameters())
    return DraftOutline(num_bytes, cache_specs(arch, context, block_size=block_size, dtype=cache_dtype))


def cache_group(groups: CacheGroups) -> int:
    """The cache group whose blocks hold the keys and values of layers that draft. Raises ConfigError."""
    if not groups.full_groups:
        raise ConfigError(
            "speculation.method: a draft model, EAGLE-3 and MTP need a target with a layer of full attention, whose "
            "blocks keep every token; all layers of this one have a sliding window"
        )
    return groups.full_groups[0]


def _draft_model(
    settings: DraftSettings, target: DecoderModel, choose_attention: ChooseAttention, progress: bool
) -> Drafting:
    source = locate(_path(settings), field="speculation.model")
    arch = ArchConfig.from_source(source)
    # Rows may be longer than what the draft model was made for; its drafts are bad there.
    arch = dataclasses.replace(arch, max_position=max(arch.max_position, target.arch.max_position))
    model = load_model(
        source,
        arch,
        target.context,
        target.dtype,
        "dummy" if settings.dummy else "auto",
        attention=choose_attention(arch, target.dtype),
        as_stored=settings.as_stored,
        cache_codes=settings.measure_cache,
        measure_cache=settings.measure_cache,
        seed=settings.seed,
        progress=progress,
    )

    def make(rows: Rows, caches: list[KVCache], group: int) -> DeviceProposer:
        return DraftModelProposer(model, rows, caches, group=group, target_vocab_size=target.arch.vocab_size)

    caches = cache_specs(arch, target.context, block_size=settings.block_size, dtype=settings.cache_dtype)
    return Drafting(caches, make)


def _eagle3(
    settings: DraftSettings, target: DecoderModel, choose_attention: ChooseAttention, progress: bool
) -> Drafting:
    source = locate(_path(settings), field="speculation.model")
    spec = read_eagle3_arch(source, target.arch)
    head = load_eagle3(
        source,
        spec,
        target,
        attention=choose_attention(spec.arch, target.dtype),
        dummy=settings.dummy,
        seed=settings.seed,
        progress=progress,
    )
    taps = HiddenTaps(target, spec.target_layers, max_tokens=settings.max_tokens)

    def make(rows: Rows, caches: list[KVCache], group: int) -> DeviceProposer:
        return Eagle3Proposer(head, rows, caches, taps, group=group, dtype=target.dtype)

    caches = cache_specs(spec.arch, target.context, block_size=settings.block_size, dtype=settings.cache_dtype)
    return Drafting(caches, make)


def _mtp(settings: DraftSettings, target: DecoderModel) -> Drafting:
    assert isinstance(target, MtpDecoder) and target.arch.uses_mtp, "with_mtp() made the target's architecture"
    model = target
    taps = HiddenTaps(model, [model.arch.num_layers], max_tokens=settings.max_tokens)

    def make(rows: Rows, caches: list[KVCache], group: int) -> DeviceProposer:
        return MtpProposer(model, rows, caches, taps, group=group)

    return Drafting(_mtp_caches(model, settings.block_size, settings.cache_dtype), make)


def _mtp_caches(target: DecoderModel, block_size: int, cache_dtype: torch.dtype) -> tuple[CacheSpec, ...]:
    """The MTP layer is as the base's last layer is."""
    return cache_specs(target.arch, target.context, block_size=block_size, dtype=cache_dtype)[-1:]


def _path(settings: DraftSettings) -> str:
    if settings.path is None:
        raise ConfigError(f"speculation.model is missing: speculation.method {settings.method} needs one")
    return settings.path
