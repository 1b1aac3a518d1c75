"""What of a model a GPU has no fast kernel for."""

from __future__ import annotations

import torch

from raylm import ops
from raylm.models.arch import ArchConfig


def slow_parts(
    arch: ArchConfig, dtype: torch.dtype, device: torch.device, *, block_size: int, own_attention: bool
) -> list[str]:
    """What runs slowly on this GPU, and why; nothing on a CPU. Without `own_attention` another backend attends, whose
    limits are its own."""
    if device.type == "cpu":
        return []
    parts = []
    q = torch.empty(0, arch.num_heads, arch.head_dim, dtype=dtype, device=device)
    decode = prefill = True
    if own_attention:
        decode, prefill = ops.attention_kernels(q, arch.num_kv_heads, block_size, biased=arch.alibi)
    missing = " and ".join(name for name, has in (("decode", decode), ("prefill", prefill)) if not has)
    if missing:
        parts.append(f"attention of {missing}: {_of_heads(arch, dtype)} have no kernel on tensor cores here")
    if not ops.linear_rows(q):
        parts.append(f"products of few rows in {_name(dtype)} are torch's: raylm's kernels are for 16 bits and Hopper")
    if not ops.sample_is_async(device, arch.vocab_size):
        parts.append(
            f"sampling, and graphs end before it: a row of {arch.vocab_size:,} logits does not fit the shared memory "
            "of this GPU's blocks, or these cannot share theirs; torch's operators serve"
        )
    return parts


def _of_heads(arch: ArchConfig, dtype: torch.dtype) -> str:
    biases = " with linear biases" if arch.alibi else ""
    return f"heads of size {arch.head_dim} in {_name(dtype)}{biases}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
