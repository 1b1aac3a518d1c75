"""The tensors of torch's own files (pytorch_model.bin): a ZIP archive of a pickle and of each storage's bytes.

The pickle is read with weights_only, which runs nothing of it, and makes tensors without data. Their bytes are read in
pieces, as those of every checkpoint (raylm.models.checkpoint).
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from raylm.errors import ConfigError
from raylm.models.checkpoint import CheckpointTensor, plain

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_QUANTISED = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
)
"""What quantised weights are stored as."""
_WAY_OUT = "load it where it comes from with transformers and write it with save_pretrained(FOLDER)"


def torch_file_tensors(
    path: Path, *, quantised: bool = False, ignored: Callable[[str], bool] = lambda name: False
) -> list[CheckpointTensor]:
    """Every tensor of one file but those whose names are `ignored`. Raises ConfigError where it holds anything else, or
    a type that is no float (with `quantised`: nor one that quantised weights are stored as)."""
    types = (*_FLOATS, *_QUANTISED) if quantised else _FLOATS
    found = _read(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds a {type(found).__name__}, not tensors by name; {_WAY_OUT}")
    size = path.stat().st_size
    return [_tensor(path, size, str(name), value, types) for name, value in found.items() if not ignored(str(name))]


def _read(path: Path) -> object:
    if not zipfile.is_zipfile(path):
        raise ConfigError(
            f"{path}: not a file of torch 1.6 or later (a ZIP archive), or cut short; read older ones with torch.load "
            "and write them with torch.save, or " + _WAY_OUT
        )
    try:
        with FakeTensorMode():
            found: object = torch.load(path, map_location="cpu", weights_only=True)
    # Whatever a hostile pickle or archive makes the reader trip over.
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line]
        reason = (lines or [str(error).split("\n")[0]])[0][:200]
        raise ConfigError(
            f"{path}: cannot be read as a file of tensors alone, and code in it is never run ({reason}); {_WAY_OUT}"
        ) from None
    return found


def _tensor(path: Path, size: int, name: str, value: object, types: tuple[torch.dtype, ...]) -> CheckpointTensor:
    if not isinstance(value, Tensor):
        raise ConfigError(f"{path}: {name!r:.100} is a {type(value).__name__}, not a tensor; {_WAY_OUT}")
    if value.dtype not in types:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in types)
        given = str(value.dtype).removeprefix("torch.")
        raise ConfigError(f"{path}: tensor {name} has type {given}; allowed: {allowed}")
    storage = value.untyped_storage()
    begin = getattr(storage, "_checkpoint_offset", None)
    if begin is None or value.is_sparse or not value.is_contiguous():
        raise ConfigError(f"{path}: tensor {name} does not lie row behind row; {_WAY_OUT}")
    skipped = int(value.storage_offset()) * value.element_size()
    tensor = CheckpointTensor(name, tuple(value.shape) or (1,), path, begin + skipped, plain(value.dtype))
    if skipped + tensor.num_bytes > storage.nbytes() or tensor.offset + tensor.num_bytes > size:
        raise ConfigError(f"{path}: tensor {name} of shape {tensor.shape} reaches past its data")
    return tensor
