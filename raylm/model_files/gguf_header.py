"""The header of a GGUF file: its metadata and where its tensors lie.

A reader of our own, because the vocabulary's arrays have some 100,000 strings: made an object a string, they cost
seconds at every start. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raylm.errors import ConfigError

GGUFScalar = int | float | bool | str
GGUFValue = GGUFScalar | list[int] | list[float] | list[bool] | list[str]

_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_NUMPY_TYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_UINT64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """One tensor of the file. `shape` is in torch's order (rows first), `type` a ggml type number,
    `offset` the bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of one file; nothing of it stays open."""

    path: Path
    metadata: dict[str, GGUFValue]
    tensors: list[GGUFTensorInfo]


def read_gguf(path: str | Path) -> GGUFFile:
    """Read a GGUF header (versions 2 and 3, little-endian).

    Raises ConfigError when the file is missing, no GGUF, of another version, or cut short.
    """
    path = Path(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(data))
    except (struct.error, EOFError):
        raise ConfigError(f"{path}: this GGUF file is cut short or damaged") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: a string of this GGUF file is not UTF-8: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read this GGUF file: {error}") from None


def _read(path: Path, cursor: _Cursor) -> GGUFFile:
    if cursor.take(4) != b"GGUF":
        raise ConfigError(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
    (version,) = struct.unpack("<I", cursor.take(4))
    if version not in _SUPPORTED_VERSIONS:
        raise ConfigError(f"{path}: GGUF version {version} is not supported; allowed: 2, 3 (little-endian)")
    num_tensors, num_values = cursor.uint64(), cursor.uint64()
    metadata: dict[str, GGUFValue] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.uint32())
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ConfigError(f"{path}: general.alignment is {alignment!r}, it must be a positive integer")
    base = -(-cursor.position // alignment) * alignment
    tensors = [GGUFTensorInfo(name, shape, kind, base + offset) for name, shape, kind, offset in infos]
    return GGUFFile(path, metadata, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dims = cursor.uint32()
    if num_dims > _MAX_DIMS:
        raise EOFError
    shape = tuple(cursor.uint64() for _ in range(num_dims))
    return name, shape[::-1], cursor.uint32(), cursor.uint64()


class _Cursor:
    """Reads values one after another. Raises EOFError or struct.error past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        start = self.position
        if num_bytes > len(self._data) - start:
            raise EOFError
        self.position = start + num_bytes
        return self._data[start : self.position]

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        return self.take(self.uint64()).decode()

    def value(self, kind: int) -> GGUFValue:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.uint32(), self.uint64())
        scalar: GGUFScalar = self._numbers(kind, 1).item()
        return scalar

    def _array(self, kind: int, count: int) -> GGUFValue:
        if kind == _STRING:
            return self._strings(count)
        numbers: GGUFValue = self._numbers(kind, count).tolist()
        return numbers

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _NUMPY_TYPES:
            raise ValueError(f"a value of unknown type {kind}")
        dtype = np.dtype(_NUMPY_TYPES[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def _strings(self, count: int) -> list[str]:
        # The hot loop of a start: 100,000 strings, so locals instead of calls.
        data, position, length_at = self._data, self.position, _UINT64.unpack_from
        size = len(data)
        strings: list[str] = []
        append = strings.append
        for _ in range(count):
            start = position + 8
            position = start + length_at(data, position)[0]
            if position > size:
                raise EOFError
            append(data[start:position].decode())
        self.position = position
        return strings
