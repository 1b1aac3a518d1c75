"""Blocks of quantised GGUF weights with random bytes, and rows of x that 16 bits hold exactly."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

HALVES = {
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0,),
    Kind.Q5_1: (0, 2),
    Kind.Q8_0: (0,),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
    Kind.MXFP4: (),
}
"""The kinds with compiled kernels, and where a block of each has its float16 scales. Those of MXFP4 are exponents."""
KINDS = tuple(HALVES)


def values_of(kind: Kind) -> int:
    """Values of one block."""
    return gguf.GGML_QUANT_SIZES[kind][0]


def random_blocks(kind: Kind, rows: int, num_blocks: int, seed: int = 0) -> Tensor:
    """uint8 [rows, bytes of num_blocks]: codes and integer scales of any bits, float scales of moderate size."""
    random = np.random.default_rng(seed + 1000 * kind + rows + 7 * num_blocks)
    raw = random.integers(0, 256, (rows * num_blocks, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for offset in HALVES[kind]:
        scales = random.uniform(-1 / 64, 1 / 64, (len(raw), 1)).astype(np.float16)
        raw[:, offset : offset + 2] = scales.view(np.uint8)
    if kind == Kind.MXFP4:
        raw[:, 0] = random.integers(112, 124, len(raw), dtype=np.uint8)
    return torch.from_numpy(raw.reshape(rows, -1))


def decoded(blocks: Tensor, kind: Kind) -> Tensor:
    """The float64 weight [N, K]."""
    return torch.from_numpy(gguf.dequantize(blocks.contiguous().numpy(), kind)).double()


def exact_rows(rows: int, size: int, seed: int = 0) -> Tensor:
    """float32 [rows, size] that quantisation to 16 bits keeps: of 32 values each is an integer of at most 32,767 times
    a power of two, and one is 32,767 times it."""
    generator = torch.Generator().manual_seed(seed + rows + size)
    codes = torch.randint(-32767, 32768, (rows, size // 32, 32), generator=generator)
    codes[..., 5] = 32767
    scales = torch.exp2(torch.randint(-24, -15, (rows, size // 32, 1), generator=generator).float())
    return (codes * scales).reshape(rows, size)


def quantisation_bound(x: Tensor, weight: Tensor) -> Tensor:
    """How far products of x with a weight may be off when each 32 values of x are rounded to 16 bits: half of a
    step, a 32,767th of the largest, times the sum of the weights' sizes."""
    steps = x.double().unflatten(-1, (-1, 32)).abs().amax(-1) / 32767
    return steps / 2 @ weight.unflatten(-1, (-1, 32)).abs().sum(-1).t()
