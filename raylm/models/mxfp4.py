"""MXFP4: blocks of 32 floats of 4 bits (e2m1) that share a scale, a power of two of 8 bits (e8m0). Format: OCP
Microscaling Formats (MX) 1.0."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raylm.ops.patches import E2M1

VALUES, BYTES = 32, 16
"""Of a block."""
_FLOATS = np.array(E2M1, dtype=np.float32)
_PAIRS = np.stack([np.tile(_FLOATS, 16), np.repeat(_FLOATS, 16)], axis=1).view(np.int64).reshape(-1)
"""The two values of a byte, the lower four bits first, as one number of 64 bits: one look-up for both."""
_SCALES = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


def decode(codes: np.ndarray, scales: np.ndarray) -> Tensor:
    """uint8 [N, 16 G] and uint8 [N, G] -> float32 [N, 32 G]. bfloat16 holds every finite value exactly. A scale of
    255 stands for NaN."""
    return e2m1(codes).view(*scales.shape, VALUES).mul_(e8m0(scales).unsqueeze(-1)).view(len(scales), -1)


def e2m1(codes: np.ndarray) -> Tensor:
    """uint8 [N, B] -> float32 [N, 2 B]: two values a byte, the lower four bits first."""
    return torch.from_numpy(_PAIRS[codes]).view(torch.float32)


def e8m0(scales: np.ndarray) -> Tensor:
    """Powers of two, by their exponents: uint8 -> float32. 255 stands for NaN."""
    return torch.from_numpy(_SCALES[scales])
