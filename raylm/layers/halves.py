"""Products that torch's library computes faster as a batch of two halves, because more of the GPU is busy then.

- Halves of the inner dimension (split-K), which the next norm adds: with 65 to 256 rows the library has tiles for half
  of the multiprocessors, or splits K itself and adds the parts in another kernel.
- Halves of the rows: of 320, 448 and 576 rows in tiles of 128, as the library takes them, the last tile is half empty.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

MIN_ROWS, MAX_ROWS = 65, 256
"""Where the inner dimension is split. Fewer rows are for raylm's own products."""
_TILE = 128
_MIN_ELEMENTS = 4096 * 4096
"""Of a weight. Measured, us on an H200, whole and in halves: 4096 x 4096 with 96, 192 and 256 rows 15.2, 17.4, 16.9 and
11.3, 12.5, 14.6; 4096 x 14336 37.6, 44.8, 51.0 and 31.6, 36.8, 46.2; with 384 rows 69.2 and 72.9."""
_ROWS_IN_HALVES = (320, 448, 576)
"""Measured as above: 4096 x 14336 with 448 and 576 rows 98.1, 106.4 and 83.3, 101.4; 6144 x 4096 with 576 rows 52.1 and
46.2, but with 384 and 640 28.2, 48.9 and 31.5, 51.9."""
_LEAST_ELEMENTS, _MOST_OUTPUTS = 4096 * 2048, 10240
"""Of a weight whose product is cut by rows. A head of 128256 x 4096 with 448 rows takes 768 whole and 835 in halves."""


class Halves(NamedTuple):
    """Two parts of a sum, [2, T, H]."""

    parts: Tensor

    def total(self) -> Tensor:
        """[T, H]"""
        return self.parts.sum(0)


def in_halves(x: Tensor, weight: Tensor) -> Halves | None:
    """x [T, K] times the transpose of `weight` [H, K], both of 16 bits on a Hopper GPU; None elsewhere, and where
    halves are no faster."""
    rows, (out_size, in_size) = len(x), weight.shape
    if not MIN_ROWS <= rows <= MAX_ROWS or weight.numel() < _MIN_ELEMENTS or in_size % 16 or weight.itemsize != 2:
        return None
    tiles = -(-rows // _TILE) * -(-out_size // _TILE)
    if 2 * tiles > room_for_tiles(x.device):
        return None
    half = in_size // 2
    return Halves(torch.bmm(x.view(rows, 2, half).transpose(0, 1), weight.view(out_size, 2, half).permute(1, 2, 0)))


def in_halves_of_rows(x: Tensor, weight: Tensor) -> Tensor | None:
    """x [T, K] times the transpose of `weight` [N, K], both of 16 bits on a Hopper GPU: [T, N]. None elsewhere, and for
    other sizes than those above."""
    rows, (out_size, in_size) = len(x), weight.shape
    if rows not in _ROWS_IN_HALVES or weight.itemsize != 2:
        return None
    if out_size > _MOST_OUTPUTS or weight.numel() < _LEAST_ELEMENTS or not room_for_tiles(x.device):
        return None
    return torch.bmm(x.view(2, rows // 2, in_size), weight.t().expand(2, in_size, out_size)).view(rows, out_size)


@functools.cache
def room_for_tiles(device: torch.device) -> int:
    """How many tiles run at a time, each on a multiprocessor; 0 where nothing has been measured."""
    is_measured = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return torch.cuda.get_device_properties(device).multi_processor_count if is_measured else 0
