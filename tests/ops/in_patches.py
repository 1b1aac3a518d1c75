"""Weights in patches, and the numbers that they hold, found by another way."""

from __future__ import annotations

import torch
from torch import Tensor

from raylm import ops
from raylm.ops.patches import GROUPS, NUMBERS

KINDS = [(numbers, group) for numbers in NUMBERS for group in GROUPS[numbers]]
HALVES = dict.fromkeys(("int4", "int8", "int8_rows"), (torch.bfloat16, torch.float16))
"""Types of activations that kernels take; of other numbers bfloat16 alone."""


ROUNDED = {"int8_rows": 127, "fp8_rows": 448}
"""Numbers that round activations too, and the largest of them."""


def rounded(x: Tensor, numbers: str) -> Tensor:
    """Each row as integers or floats of 8 bits and a scale stand for it. In float32, as kernels have it: in float64
    some lie on the other side of the middle between two of them."""
    most = ROUNDED[numbers]
    scales = x.float().abs().amax(1, keepdim=True) / most
    whole = x.float() * (1 / scales)
    whole = whole.round() if numbers == "int8_rows" else whole.clamp(-most, most).to(ops.CODES).float()
    return (whole.clamp(-most, most) * scales).double()


def dtypes(numbers: str) -> tuple[torch.dtype, ...]:
    return HALVES.get(numbers, (torch.bfloat16,))


def _floats(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random codes of 8-bit floats, some of them subnormal."""
    floats = torch.randn(rows, columns, generator=generator).mul(60).to(ops.CODES)
    floats[::7, ::5] = floats[::7, ::5].float().mul(2.0**-14).to(ops.CODES)
    return floats


def in_patches(numbers: str, group: int, rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Patches of random numbers, and these numbers: float32 [rows, columns]."""
    generator, across = torch.Generator().manual_seed(seed), -(-columns // group)
    # Words keep all bits of such scales.
    scales = ((torch.rand(rows, across, generator=generator) + 0.5) / 64).bfloat16().float()
    if numbers == "int8_rows":
        scales = scales[:, :1].expand(-1, across)
    spread = scales.repeat_interleave(group, 1)[:, :columns]
    if numbers in ("fp8", "fp8_rows"):
        floats = _floats(rows, columns, generator)
        return ops.pack_fp8(floats, scales), floats.float() * spread
    most = ops.MOST_CODE.get(numbers, 15) + 1
    codes = torch.randint(0, most, (rows, columns), generator=generator, dtype=torch.uint8)
    if numbers == "nf4":
        return ops.pack_nf4(codes, scales, group), torch.tensor(ops.NF4).bfloat16().float()[codes.long()] * spread
    if numbers.startswith("affine"):
        offsets = (torch.randn(rows, across, generator=generator) * most / 256).half().float()
        wide = offsets.repeat_interleave(group, 1)[:, :columns]
        return ops.pack_affine(numbers, codes, scales, offsets, group), codes.float() * spread + wide
    if numbers in ops.MOST_ZERO:
        zeros = torch.randint(0, most, (rows, across), generator=generator, dtype=torch.uint8)
        if numbers == "int8_rows":
            zeros.fill_(128)
        found = codes.float() - zeros.float().repeat_interleave(group, 1)[:, :columns]
        return ops.pack_integers(numbers, codes, scales, zeros, group), found * spread
    exponents = torch.randint(120, 130, (rows, across), generator=generator, dtype=torch.uint8)
    exponents[0], exponents[1] = 60, 100
    powers = torch.ldexp(torch.ones(rows, across), exponents.int() - 127).repeat_interleave(group, 1)[:, :columns]
    if numbers == "mxfp8":
        floats = _floats(rows, columns, generator)
        return ops.pack_mxfp8(floats, exponents), floats.float() * powers
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    signed = torch.cat((table, -table))[codes.long()]
    return ops.pack_mxfp4(codes, exponents), signed * powers
