"""What of a checkpoint's files is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from raylm.layers.slots import Slot
from raylm.model_files.source import locate
from raylm.models import filling
from raylm.models.arch import ArchConfig
from raylm.models.quantised.join import join
from raylm.models.safetensors import file_tensors
from tests.support.quantised import FILE


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which every read from now on adds its bytes."""
    read: list[int] = []
    given = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(sum(len(buffer) for buffer in buffers))
        return given(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    return read


def share_of_second_half(folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """How much of the first layer's quantised down_proj, in bytes, is read for the second half of its columns."""
    quantisation = ArchConfig.from_source(locate(str(folder))).quantisation
    assert quantisation is not None
    files = file_tensors(folder / FILE, quantised=True)
    name = "model.layers.0.mlp.down_proj"
    total = sum(each.num_bytes for each in files if each.name.startswith(name))
    (tensor,) = [each for each in join(files, quantisation) if each.name == f"{name}.weight"]
    read = count_reads(monkeypatch)
    rows, columns = tensor.shape
    slot = Slot(torch.zeros(rows, columns // 2), tensor.shape, dim=1, start=columns // 2)
    filling.fill([(tensor, slot)], progress=False, num_threads=1)
    return sum(read) / total
