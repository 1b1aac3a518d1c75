"""GPUs as their makers describe them, for plans made where there is none."""

from __future__ import annotations

from typing import NamedTuple

from raylm.errors import ConfigError


class Gpu(NamedTuple):
    """One GPU. `memory_gib` is what a program finds, a little less than the name says."""

    memory_gib: float
    bandwidth_gb_s: float
    """Of its memory, in 10^9 bytes a second."""
    bf16_tflops: float
    """Dense products of bfloat16, in 10^12 operations a second."""
    fp8_tflops: float | None = None
    """The same of FP8; None where raylm has no kernels for it."""


GPUS = {
    "L4": Gpu(22.0, 300, 121),
    "L40S": Gpu(44.4, 864, 362),
    "A100-40": Gpu(39.4, 1555, 312),
    "A100-80": Gpu(79.1, 2039, 312),
    "H100": Gpu(79.1, 3350, 989, 1979),
    "H200": Gpu(139.8, 4800, 989, 1979),
    "B200": Gpu(178.3, 8000, 2250),
}
"""The SXM variants where there are several."""


def find_gpu(name: str) -> Gpu:
    """A GPU by name, in any case. Raises ConfigError naming those there are."""
    for known, gpu in GPUS.items():
        if known.lower() == name.lower():
            return gpu
    raise ConfigError(f"--gpu {name!r} is unknown; allowed: {', '.join(GPUS)}")
