"""What attention over the paged cache can run on, and the choice between them. Writing to the cache is always ours."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from types import ModuleType
from typing import Generic, TypeVar

import torch
from torch import Tensor

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.attention import AttentionMetadata, KVCache, Scores
from raylm.layers.dtypes import dtype_name
from raylm.ops import extension, fallback

FLASH_PACKAGES = ("vllm_flash_attn", "vllm.vllm_flash_attn")
_FLASH_VERSIONS = (3, 2)
"""Of FlashAttention: 3 (arXiv:2407.08608) is for Hopper, 2 (arXiv:2307.08691) for every GPU since Ampere."""
_FLASH_ALIBI_VERSIONS = (2,)
"""Those that take linear biases."""


StepT = TypeVar("StepT", bound=AttentionMetadata)


@dataclass(frozen=True, slots=True)
class AttentionBackend(Generic[StepT]):
    """One implementation of attention: `plan` once a step and cache group, then `attend` in each of its layers."""

    name: str
    plan: Callable[[AttentionMetadata], StepT]
    """Adds what is equal in all layers, whatever their Scores; a backend without such returns what it is given."""
    attend: Callable[[Tensor, KVCache, StepT, Scores], Tensor]
    """q [T, num_heads, head_dim] over a layer's cache -> the same shape."""
    supports_graphs: bool
    """Whether a CUDA graph may hold both."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a backend has to work with; block_size in tokens, `alibi` where the model's scores have linear biases,
    `sinks` where its heads have attention sinks, `codes` where the cache holds 8-bit floats (cache.dtype fp8),
    `deterministic` where a query's result must not depend on the rest of the step (runtime.deterministic)."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    block_size: int
    alibi: bool = False
    sinks: bool = False
    codes: bool = False
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchMetadata(AttentionMetadata):
    """With what the torch version needs of a step on the host: asking a device for it would wait in each layer."""

    lengths: fallback.AttentionLengths


def _unchanged(meta: AttentionMetadata) -> AttentionMetadata:
    return meta


def _attend(
    operator: Callable[..., Tensor], q: Tensor, cache: KVCache, step: AttentionMetadata, scores: Scores
) -> Tensor:
    """By one of raylm's operators."""
    k_cache, v_cache = cache
    return operator(
        q,
        k_cache,
        v_cache,
        step.block_table,
        step.query_start,
        step.seq_lens,
        max_query_len=step.max_query_len,
        max_seq_len=step.max_seq_len,
        scale=scores.scale,
        window=scores.window,
        soft_cap=scores.soft_cap,
        alibi_slopes=scores.alibi_slopes,
        sinks=scores.sinks,
        k_scale=scores.cache.keys,
        v_scale=scores.cache.values,
    )


def _attend_raylm(q: Tensor, cache: KVCache, step: AttentionMetadata, scores: Scores) -> Tensor:
    # Lengths and tables were written before the embedding or the previous stage gave what q was made of.
    operator = partial(ops.paged_attention, arrivals=step.arrivals, prefixes=step.prefixes, frozen=True)
    return _attend(operator, q, cache, step, scores)


RAYLM = AttentionBackend("raylm", _unchanged, _attend_raylm, supports_graphs=True)
"""Its kernels find out by themselves what they need of a step: a graph that is replayed must follow its inputs."""


def _attend_invariant(q: Tensor, cache: KVCache, step: AttentionMetadata, scores: Scores) -> Tensor:
    return _attend(ops.invariant_attention, q, cache, step, scores)


INVARIANT = AttentionBackend("raylm", _unchanged, _attend_invariant, supports_graphs=True)
"""Raylm's, with one kernel for all queries of a layer: a query's result does not depend on the rest of the step."""


def choose_backend(wanted: str, setting: Setting) -> tuple[AttentionBackend, str]:
    """The backend of runtime.attention (auto: the first that can run), and why. Raises ConfigError."""
    if setting.deterministic:
        return _deterministic(setting)
    tries = {"raylm": _raylm, "flash_attn": _flash, "torch": _torch}
    if wanted != "auto":
        found = tries[wanted](setting)
        if isinstance(found, str):
            raise ConfigError(f"runtime.attention {wanted!r} was asked for, but {found}")
        return found, f"runtime.attention is {wanted}"
    obstacles: list[str] = []
    for name, make in tries.items():
        found = make(setting)
        if isinstance(found, AttentionBackend):
            return found, "; ".join(obstacles) or f"the compiled extension has its kernel for {setting.device.type}"
        obstacles.append(f"not {name}: {found}")
    raise AssertionError("torch runs everywhere")


def _deterministic(setting: Setting) -> tuple[AttentionBackend, str]:
    """The configuration allows no other attention with it."""
    if setting.device.type == "cpu":
        raise ConfigError("runtime.deterministic is true, but the device is a CPU; allowed there: false")
    if lacking := raylm_lacks(setting.device, "invariant_attention"):
        raise ConfigError(f"runtime.deterministic needs raylm's own attention, but {lacking}")
    return INVARIANT, "runtime.deterministic: one kernel for all queries"


def raylm_lacks(device: torch.device, operator: str = "paged_attention") -> str | None:
    """What keeps our own kernel from running on the device, and the command that helps; None where nothing does."""
    status = extension.load()
    if operator in status.ops.get(device.type, ()):
        return None
    if not status.loaded:
        return _clause(str(status))
    build = (
        f"build it again where {device.type} can be compiled for, in raylm's repository: `{extension.BUILD_COMMAND}`"
    )
    return f"the compiled extension {status.path} has no {operator} for {device.type}; {build}"


def _raylm(setting: Setting) -> AttentionBackend | str:
    if setting.codes and setting.device.type == "cpu":
        return "its kernels for CPUs do not read a cache of fp8 (cache.dtype)"
    return raylm_lacks(setting.device) or RAYLM


def _torch(setting: Setting) -> AttentionBackend | str:
    # It reads lengths on the host, which a graph cannot.
    return AttentionBackend("torch", _plan_torch, _attend_torch, supports_graphs=False)


def _plan_torch(meta: AttentionMetadata) -> TorchMetadata:
    own = {field.name: getattr(meta, field.name) for field in fields(meta)}
    lengths = fallback.attention_lengths(meta.query_start, meta.seq_lens, meta.max_query_len, meta.max_seq_len)
    return TorchMetadata(**own, lengths=lengths)


def _attend_torch(q: Tensor, cache: KVCache, step: TorchMetadata, scores: Scores) -> Tensor:
    k_cache, v_cache = cache
    return fallback.attend_paged(
        q,
        k_cache,
        v_cache,
        step.block_table,
        step.lengths,
        scale=scores.scale,
        window=scores.window,
        soft_cap=scores.soft_cap,
        alibi_slopes=scores.alibi_slopes,
        sinks=scores.sinks,
        k_scale=scores.cache.keys,
        v_scale=scores.cache.values,
    )


def _flash(setting: Setting) -> AttentionBackend | str:
    """FlashAttention of vLLM's packages, or the sentence that says why not."""
    return _flash_obstacle(setting) or _flash_package(setting)


def _flash_obstacle(setting: Setting) -> str | None:
    """What of the setting its kernels cannot do."""
    if setting.device.type != "cuda":
        return f"it runs on CUDA only and the device is {setting.device.type}"
    if setting.dtype not in (torch.bfloat16, torch.float16):
        return f"the dtype is {dtype_name(setting.dtype)}; allowed: bfloat16, float16"
    if setting.head_dim % 32 or setting.head_dim > 256:
        return f"the head size is {setting.head_dim}; allowed: multiples of 32 up to 256"
    if setting.codes:
        return "it does not read a cache of fp8 (cache.dtype) here"
    if setting.sinks:
        return "it has no attention sinks, which this model's heads have"
    if setting.block_size % 16:
        return f"cache.block_size is {setting.block_size}; allowed: multiples of 16"
    return None


def _flash_package(setting: Setting) -> AttentionBackend | str:
    obstacles: list[str] = []
    for name in FLASH_PACKAGES:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError):
            continue
        found = _flash_of(module, setting)
        if isinstance(found, AttentionBackend):
            return found
        obstacles.append(f"{name} {found}")
    return "; ".join(obstacles) or f"neither {' nor '.join(FLASH_PACKAGES)} can be imported"


def _flash_of(module: ModuleType, setting: Setting) -> AttentionBackend | str:
    varlen = getattr(module, "flash_attn_varlen_func", None)
    supported = getattr(module, "is_fa_version_supported", None)
    parameters = inspect.signature(varlen).parameters if varlen is not None else {}
    # Releases up to 2.6 are like this.
    if varlen is None or supported is None or "seqused_k" not in parameters:
        return "is too old: it has no flash_attn_varlen_func that takes seqused_k and fa_version"
    if setting.alibi and "alibi_slopes" not in parameters:
        return "cannot run this model's linear biases: its flash_attn_varlen_func takes no alibi_slopes"
    versions = _FLASH_ALIBI_VERSIONS if setting.alibi else _FLASH_VERSIONS
    version = next((version for version in versions if supported(version)), None)
    if version is None:
        purpose = "linear biases on this GPU" if setting.alibi else "this GPU"
        return f"has no kernels for {purpose} (FlashAttention {' or '.join(map(str, versions))})"
    # The launch depends on the lengths on the host, and what a graph replays does not follow them.
    return AttentionBackend("flash_attn", _unchanged, partial(_attend_flash, varlen, version), supports_graphs=False)


def _attend_flash(
    varlen: Callable[..., Tensor],
    version: int,
    q: Tensor,
    cache: KVCache,
    step: AttentionMetadata,
    scores: Scores,
) -> Tensor:
    """By `flash_attn_varlen_func`; every row of q must belong to a sequence, and there are no sinks."""
    k_cache, v_cache = cache
    biases = {} if scores.alibi_slopes is None else {"alibi_slopes": scores.alibi_slopes}
    return varlen(
        q,
        k_cache,
        v_cache,
        max_seqlen_q=step.max_query_len,
        cu_seqlens_q=step.query_start,
        max_seqlen_k=step.max_seq_len,
        seqused_k=step.seq_lens,
        softmax_scale=scores.scale,
        causal=True,
        # So many keys before the query's own, and none after it; (-1, -1) hides none but for the causal mask.
        window_size=(scores.window - 1, 0) if scores.window else (-1, -1),
        softcap=scores.soft_cap,
        block_table=step.block_table,
        fa_version=version,
        **biases,
    )


def _clause(sentence: str) -> str:
    """A sentence as part of another one."""
    return sentence[0].lower() + sentence[1:].removesuffix(".")
