"""What runtime.deterministic needs of a device, beside what raylm/models/check.py knows without one."""

from __future__ import annotations

import torch

from raylm import ops
from raylm.errors import ConfigError
from raylm.models.arch import ArchConfig, ExpertsSpec
from raylm.parallel.context import ParallelContext


def check_experts(arch: ArchConfig, dtype: torch.dtype, context: ParallelContext) -> None:
    """Raises ConfigError where a mixture's experts would be torch's products, whose sums depend on how many tokens an
    expert has."""
    mixtures = {layer.mlp for layer in arch.layers if isinstance(layer.mlp, ExpertsSpec)}
    for spec in mixtures:
        share = spec.size // context.tensor_size
        if not ops.invariant_experts(spec.num_experts, arch.hidden_size, share, dtype, context.device):
            raise ConfigError(
                f"runtime.deterministic is true, but {context.device} has no kernels for {spec.num_experts} experts "
                f"of {arch.hidden_size} to {share} columns; raylm's are for Hopper GPUs, up to 512 experts, and "
                "columns in multiples of 8; allowed here: false"
            )
