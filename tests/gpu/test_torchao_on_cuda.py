"""TorchAO's tiles of 4-bit integers are what torch's own kernels write and compute with."""

from __future__ import annotations

import torch

from tests.support.torchao import tile_words

ROWS, COLUMNS, GROUP = 24, 256, 64


def test_tiles_are_those_of_torchs_kernels() -> None:
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=random)
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs.cuda(), 8)
    assert torch.equal(packed.cpu(), tile_words(codes))
    # Scales and shifts of which float32's sums are exact in bfloat16.
    scales = 2.0 ** torch.randint(-3, 0, (COLUMNS // GROUP, ROWS), generator=random)
    shifts = torch.randint(-4, 5, scales.shape, generator=random).float()
    both = torch.stack((scales, shifts), dim=-1).bfloat16().cuda()
    unit = torch.eye(COLUMNS, dtype=torch.bfloat16, device="cuda")
    found = torch.ops.aten._weight_int4pack_mm(unit, packed, GROUP, both).float().cpu().t()
    of_columns = (grid.t().repeat_interleave(GROUP, 1) for grid in (scales, shifts))
    scale, shift = of_columns
    assert torch.equal(found, (codes - 8) * scale + shift)
