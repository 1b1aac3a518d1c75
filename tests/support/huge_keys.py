"""Checkpoints whose keys and values are much larger than 8-bit floats go."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.support.quantised import FILE


def changed(path: Path, folder: Path, **factors: float) -> Path:
    """A copy of a checkpoint in which weights and biases of these projections are so many times as large."""
    shutil.copytree(path, folder)
    tensors = load_file(folder / FILE)
    for name, factor in factors.items():
        of_projection = [key for key in tensors if f".{name}." in key]
        assert of_projection, name
        for key in of_projection:
            tensors[key] = tensors[key] * factor
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def with_huge_keys(path: Path, folder: Path) -> Path:
    """A copy with keys and values 4,096 times as large, for which queries and o_proj are as much smaller: with a cache
    of numbers it gives the same bits."""
    return changed(path, folder, k_proj=2.0**12, q_proj=2.0**-12, v_proj=2.0**12, o_proj=2.0**-12)
