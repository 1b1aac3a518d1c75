"""What of a model a GPU has no fast kernel for."""

from __future__ import annotations

import torch

from raylm import ops
from raylm.config.engine import EngineConfig
from raylm.layers.attention_backends import INVARIANT, RAYLM, AttentionBackend, Setting
from raylm.layers.dtypes import dtype_name
from raylm.models.arch import ArchConfig


def setting_of(config: EngineConfig, arch: ArchConfig, dtype: torch.dtype, device: torch.device) -> Setting:
    """What attention has to do."""
    return Setting(
        device,
        dtype,
        arch.head_dim,
        config.cache.block_size,
        alibi=arch.alibi > 0,
        sinks=arch.sinks,
        codes=config.cache.dtype == "fp8",
        deterministic=config.runtime.deterministic,
    )


def slow_parts(arch: ArchConfig, setting: Setting, attention: AttentionBackend) -> list[str]:
    """What runs slowly on this GPU, and why; nothing on a CPU. Of attention only raylm's own backend is known."""
    device, dtype = setting.device, dtype_name(setting.dtype)
    if device.type == "cpu":
        return []
    parts = []
    if arch.transformers_config:
        parts.append("layers are transformers' modules: raylm has no family for the model, or was asked for them")
    q = torch.empty(0, arch.num_heads, arch.head_dim, dtype=setting.dtype, device=device)
    if attention is RAYLM or attention is INVARIANT:
        biased, codes = setting.alibi, setting.codes
        has = ops.attention_kernels(q, arch.num_kv_heads, setting.block_size, biased=biased, codes=codes)
        missing = " and ".join(name for name, is_there in zip(("decode", "prefill"), has, strict=True) if not is_there)
        if attention is INVARIANT:  # The kernel for prefill has decode too.
            missing = "" if has[1] else "decode and prefill"
        if missing:
            heads = f"heads of size {arch.head_dim} in {dtype}" + (" with linear biases" if arch.alibi else "")
            heads += " over a cache of fp8 (cache.dtype)" if setting.codes else ""
            parts.append(f"attention of {missing}: {heads} have no kernel on tensor cores here")
    if not ops.linear_rows(q):
        parts.append(f"products of few rows in {dtype} are torch's: raylm's kernels are for 16 bits and Hopper")
    if not ops.sample_is_async(device, arch.vocab_size):
        parts.append(
            f"sampling is torch's, outside of CUDA graphs: raylm's kernel needs blocks that share memory, and "
            f"{arch.vocab_size:,} logits must fit into it"
        )
    return parts
