"""Writes safetensors files tensor by tensor, without ever holding a whole one. Format:
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from raylm.models.safetensors import TYPE_NAMES

_ALIGNMENT = 8
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Item:
    """Tensors that are written together: a weight and its scales."""

    entries: tuple[Entry, ...]
    data: Callable[[], Iterator[tuple[int, Tensor]]]
    """Pieces of the entries, each with the entry's number; an entry's pieces come in the order of its bytes."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


def write_items(
    folder: Path, items: Sequence[Item], *, shard_bytes: int, advance: Callable[[int], object] = lambda count: None
) -> None:
    """Write model.safetensors, or several files of at most `shard_bytes` of data each and their index. An item that is
    larger has a file of its own. `advance` is told the bytes of each item that has been written."""
    shards = _shards(items, shard_bytes)
    count = len(shards)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = [_SINGLE]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, advance)
    if count > 1:
        files = {
            entry.name: name
            for name, shard in zip(names, shards, strict=True)
            for item in shard
            for entry in item.entries
        }
        index = {"metadata": {"total_size": sum(item.num_bytes for item in items)}, "weight_map": files}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(items: Sequence[Item], shard_bytes: int) -> list[list[Item]]:
    shards: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.num_bytes
    return shards


def _write_file(path: Path, items: Sequence[Item], advance: Callable[[int], object]) -> None:
    entries = [entry for item in items for entry in item.entries]
    header, places = _header(entries)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write(descriptor, memoryview(header), 0)
        for item in items:
            at = [len(header) + places[entry.name] for entry in item.entries]
            for number, piece in item.data():
                at[number] = _write(descriptor, _bytes(piece), at[number])
            ends = [len(header) + places[entry.name] + entry.num_bytes for entry in item.entries]
            assert at == ends, f"{item.entries[0].name}: {at}, not {ends}"
            advance(item.num_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(entries: Sequence[Entry]) -> tuple[bytes, dict[str, int]]:
    """The header, and where each tensor begins behind it. Larger types come first, so that all values are aligned."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, at = {}, 0
    for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
        places[entry.name] = at
        described[entry.name] = {
            "dtype": TYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.num_bytes],
        }
        at += entry.num_bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, places


def _bytes(piece: Tensor) -> memoryview:
    return memoryview(piece.contiguous().flatten().view(torch.uint8).numpy())


def _write(descriptor: int, data: memoryview, offset: int) -> int:
    """The offset behind the data."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
    return offset
