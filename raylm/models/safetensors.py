"""The tensors of a folder of safetensors files. Format: https://huggingface.co/docs/safetensors

The header is read here and not by the safetensors package because that package hands out whole tensors of a mapped
file; see raylm.models.checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from raylm.errors import ConfigError
from raylm.model_files.source import ModelSource
from raylm.model_files.weight_files import weight_files
from raylm.models.checkpoint import CheckpointTensor, plain
from raylm.models.names import BLOCKS, SCALES

_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 8
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_BYTES = {"U8": torch.uint8}
_PACKED = (f"_{BLOCKS}", f"_{SCALES}")
_INTEGERS = {"I64": torch.int64, "BOOL": torch.bool}
_QUANTISED = {
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64},
}
"""What quantised weights are stored as."""
_METADATA = "__metadata__"
TYPE_NAMES = {dtype: name for name, dtype in {**_FLOATS, **_QUANTISED}.items()}
"""A type of torch -> what files call it."""


def folder_tensors(source: ModelSource, *, integers: bool = False) -> list[CheckpointTensor]:
    """Every tensor of the checkpoint in a folder: one file, or the files that an index names.

    Raises ConfigError when there is none, a file is missing or damaged, or a tensor's type is not a float (with
    `integers`: nor an int64 or bool).
    """
    files = weight_files(source, "safetensors")
    return [tensor for path in files.paths for tensor in file_tensors(path, integers=integers)]


def file_tensors(
    path: Path,
    *,
    integers: bool = False,
    packed: bool = False,
    quantised: bool = False,
    ignored: Callable[[str], bool] = lambda name: False,
) -> list[CheckpointTensor]:
    """Every tensor of one safetensors file but those whose names are `ignored`, which may be of any type. Raises
    ConfigError. With `packed`, tensors that are called as MXFP4's are must have its type, U8; with `quantised`, tensors
    may have any type that quantised weights are stored as."""
    usual = {**_FLOATS, **(_INTEGERS if integers else {}), **(_QUANTISED if quantised else {})}
    header, begin = _read_header(path)
    size = path.stat().st_size
    tensors = []
    for name, info in header.items():
        if name == _METADATA or ignored(name):
            continue
        dtype, shape, start, stop = _entry(info, path, name)
        if len(shape) > _MAX_DIMS:
            raise ConfigError(f"{path}: tensor {name} has {len(shape)} dimensions; allowed: at most {_MAX_DIMS}")
        dtypes = _BYTES if packed and name.endswith(_PACKED) else usual
        if dtype not in dtypes:
            raise ConfigError(f"{path}: tensor {name} has type {dtype}; allowed: {', '.join(dtypes)}")
        tensor = CheckpointTensor(name, shape, path, begin + start, plain(dtypes[dtype]))
        if tensor.num_bytes != stop - start:
            raise ConfigError(f"{path}: tensor {name} of shape {shape} cannot have {stop - start} bytes")
        if begin + stop > size:
            raise ConfigError(
                f"{path}: tensor {name} ends at byte {begin + stop}, but the file has {size}: it is cut short"
            )
        tensors.append(tensor)
    return tensors


def file_metadata(path: Path) -> dict[str, str]:
    """What the program that wrote a file has put into its header. Raises ConfigError where the file has none."""
    metadata = _read_header(path)[0].get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ConfigError(f"{path}: the header's {_METADATA} is damaged")
    return metadata


def _entry(info: object, path: Path, name: str) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, and where the bytes begin and end, counted from the end of the header. A number is a row of one."""
    fields = info if isinstance(info, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    is_sound = isinstance(dtype, str) and _is_sizes(shape) and _is_sizes(offsets) and len(offsets) == 2
    if not is_sound:
        raise ConfigError(f"{path}: the header's entry for tensor {name} is damaged")
    return dtype, tuple(shape) or (1,), offsets[0], offsets[1]


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _read_header(path: Path) -> tuple[dict[str, object], int]:
    """The header, and where the tensors' bytes begin."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= _MAX_HEADER_BYTES:
            raise ConfigError(f"{path}: not a safetensors file: its header would have {size} bytes")
        try:
            header = json.loads(file.read(size))
        except (ValueError, RecursionError):
            raise ConfigError(f"{path}: not a safetensors file: its header is no JSON") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: not a safetensors file: its header is no JSON object")
    return header, 8 + size
