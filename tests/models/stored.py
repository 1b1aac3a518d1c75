"""Matrices as a model keeps them, and whether ranks have the same numbers in blocks and decoded."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from raylm import ops
from raylm.layers.weight import BlockWeight, PlainWeight
from raylm.models.decoder import DecoderModel
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, load


def decoded(weight: PlainWeight | BlockWeight) -> Tensor:
    if isinstance(weight, PlainWeight):
        return weight.values
    parts = zip(weight.blocks, weight.forms, strict=True)
    return torch.cat([ops.decode_blocks(blocks, form.kind) for blocks, form in parts])


def matrices(model: DecoderModel) -> dict[str, PlainWeight | BlockWeight]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PlainWeight | BlockWeight)}


def assert_equal(folder: Path, *, tensor: int = 1, pipeline: int = 1) -> None:
    """Every rank's numbers, in blocks and decoded. Both are of equal codes and scales, so they are equal to the bit. Of
    an MLP those of all tensor ranks together: they share it by whole blocks, and decoded evenly."""
    for stage in range(pipeline):
        contexts = [
            ParallelContext(stage * tensor + rank, rank, tensor, stage, pipeline, CPU) for rank in range(tensor)
        ]
        stored, plain = (
            [matrices(load(folder, context=context, as_stored=each)) for context in contexts] for each in (True, False)
        )
        assert stored[0].keys() == plain[0].keys()
        for name in stored[0]:
            found, expected = ([decoded(each[name]) for each in ranks] for ranks in (stored, plain))
            if name.endswith((".gate_up_proj.weight", ".up_proj.weight", ".down_proj.weight")):
                found, expected = [_joined(name, found)], [_joined(name, expected)]
            assert all(map(torch.equal, found, expected)), name


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    if name.endswith(".down_proj.weight"):
        return torch.cat(parts, dim=1)
    if name.endswith(".gate_up_proj.weight"):
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat((*gates, *ups))
    return torch.cat(parts)
