"""Weights of TorchAO in safetensors files: each is an object, whose tensors have names of their own in the file, and
whose class and other attributes are JSON in the file's metadata.

The weight "q_proj.weight" of class Int8Tensor is "q_proj._weight_qdata", "q_proj._weight_scale" and so on. The metadata
has "q_proj.weight": {"_type": "Int8Tensor", "_data": {"block_size": [1, 64], ...}, "_tensor_data_names": ["qdata",
"scale"]}. Tensors as they are have the type Tensor. A file of a checkpoint in several files has the metadata of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from raylm.errors import ConfigError
from raylm.models.fields import Fields
from raylm.models.quantised.fields import MOST_COLUMNS
from raylm.models.quantised.scheme import Scheme, Zero
from raylm.models.quantised.torchao import AGAIN, int4_scheme, integer_bits, is_symmetric
from raylm.models.safetensors import file_metadata

if TYPE_CHECKING:
    from raylm.models.checkpoint import CheckpointTensor

_ALL = "tensor_names"
"""The key of the list of all tensors, which no other program's metadata has."""
_BEGIN, _CODES = "_weight_", "qdata"
_FACTOR = "act_pre_scale"
PARTS = {
    f"{_BEGIN}{_CODES}": "weight",
    **{f"{_BEGIN}{name}": f"weight_{name}" for name in ("scale", "zero_point", "scale_and_zero", _FACTOR)},
}
"""End of a tensor's name -> which part of a weight it is."""
UNUSED = tuple(f"{_BEGIN}{name}" for name in ("act_quant_scale", "act_quant_zero_point"))
"""The same of stored scales of activations, which are not used: each token has its own."""
_MATRIX = 2


class Told(NamedTuple):
    """What a file says of a weight."""

    scheme: Scheme
    shape: tuple[int, int]


def read_told(tensors: Iterable[CheckpointTensor]) -> dict[str, Told]:
    """Module -> how its weight is stored, for all modules of which a part is there.

    Raises ConfigError where the metadata is missing, names a class that raylm does not read, or names parts that are
    not there.
    """
    modules: dict[str, dict[str, CheckpointTensor]] = {}
    paths: dict[Path, None] = {}
    for tensor in tensors:
        paths[tensor.path] = None
        module, _, end = tensor.name.rpartition(".")
        if end in PARTS or end in UNUSED:
            modules.setdefault(module, {})[end] = tensor
    found = {}
    for name, (path, fields) in _metadata(paths).items():
        module, _, parameter = name.rpartition(".")
        if fields.get("_type") == "Tensor":
            continue
        if parameter != "weight":
            raise ConfigError(
                f"{path}: tensor {name} is stored as {fields.get('_type')!r:.100}; allowed: Tensor, as it is no "
                "module's weight"
            )
        if module in modules:
            found[module] = _told(module, modules[module], fields)
    return found


def _metadata(paths: Iterable[Path]) -> dict[str, tuple[Path, Fields]]:
    """A tensor's name before it was flattened -> the file that says it, and what it says."""
    found = {}
    for path in paths:
        metadata = file_metadata(path)
        for name in _names(metadata.get(_ALL, "[]"), path):
            found[name] = path, Fields(_json(metadata.get(name), path, name), f"{path}: metadata of {name}")
    if not found:
        raise ConfigError(
            f"{next(iter(paths), 'the checkpoint')}: has no metadata of TorchAO's tensors ({_ALL}), which says how "
            "they are stored; allowed: files as transformers writes them"
        )
    return found


def _names(text: str, path: Path) -> list[str]:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: metadata {_ALL} is {text!r:.100}; allowed: a list of tensors' names")
    return names


def _json(text: str | None, path: Path, name: str) -> Mapping[str, object]:
    try:
        values = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: metadata of {name} is {text!r:.100}; allowed: a JSON object")
    return values


def _told(module: str, parts: Mapping[str, CheckpointTensor], fields: Fields) -> Told:
    kind = fields.get("_type")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise fields.error("_type", kind, f"Tensor, {', '.join(_CLASSES)}; {AGAIN}")
    found = _CLASSES[kind]
    given = fields.get("_tensor_data_names")
    given = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    there = next(iter(parts.values()))
    for name in dict.fromkeys((_CODES, *found.parts, *given)):
        if f"{_BEGIN}{name}" not in parts:
            raise ConfigError(
                f"{there.path}: {there.name} is there, but {module}.{_BEGIN}{name} is missing, which a weight of class "
                f"{kind} needs"
            )
    if (factor := parts.get(f"{_BEGIN}{_FACTOR}")) is not None:
        raise ConfigError(
            f"{factor.path}: tensor {factor.name} multiplies activations (AWQ, SmoothQuant); allowed: none; {AGAIN}, "
            "without it"
        )
    codes = parts[f"{_BEGIN}{_CODES}"]
    data = fields.section("_data")
    zero: Zero = "stored" if f"{_BEGIN}zero_point" in parts else "none"
    shape = _shape(codes, data, kind)
    return Told(found.read(data, shape, zero), shape)


def _shape(codes: CheckpointTensor, data: Fields, kind: str) -> tuple[int, int]:
    """The weight's."""
    found: object = list(codes.shape) if kind in _WITHOUT_SHAPE else data.get("shape")
    if not isinstance(found, list) or len(found) != _MATRIX or any(type(size) is not int or size < 1 for size in found):
        raise ConfigError(f"{codes.path}: tensor {codes.name} is of a weight of shape {found}; allowed: a matrix")
    return found[0], found[1]


def _shared(data: Fields, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns that share a scale; 0: all."""
    block = data.get("block_size")
    if block is None or block == []:
        return 0, 0
    rows, columns = _pair(data, "block_size")
    return (0 if rows >= shape[0] > 1 else rows), (0 if columns >= shape[1] > 1 else columns)


def _pair(data: Fields, name: str) -> tuple[int, int]:
    value = data.get(name)
    is_pair = isinstance(value, list) and len(value) == _MATRIX
    if not is_pair or any(type(size) is not int or size < 1 for size in value):
        raise data.error(name, value, "two positive integers, rows and columns")
    return value[0], value[1]


def _int8(data: Fields, shape: tuple[int, int], zero: Zero) -> Scheme:
    return replace(_integers(data, shape, zero, 8), weights_only=not _rounds_activations(data))


def _rounds_activations(data: Fields) -> bool:
    """Whether products may round activations as they round weights, with a scale a token and no zero point."""
    if data.get("act_quant_kwargs") is None:
        return False
    return is_symmetric(data.section("act_quant_kwargs").section("_data"), "mapping_type")


def _intx(data: Fields, shape: tuple[int, int], zero: Zero) -> Scheme:
    return _integers(data, shape, zero, integer_bits(data, "target_dtype"))


def _integers(data: Fields, shape: tuple[int, int], zero: Zero, bits: int) -> Scheme:
    rows, columns = _shared(data, shape)
    return Scheme(layout="values", numbers="int", bits=bits, rows=rows, columns=columns, zero=zero, weights_only=True)


def _float8(data: Fields, shape: tuple[int, int], zero: Zero) -> Scheme:
    rows, columns = _shared(data, shape)
    alone = data.get("act_quant_kwargs") is None
    return Scheme(layout="values", numbers="float", bits=8, rows=rows, columns=columns, weights_only=alone)


def _int4(data: Fields, shape: tuple[int, int], zero: Zero) -> Scheme:
    return int4_scheme("signed_nibbles", _group(data))


def _tiles(data: Fields, shape: tuple[int, int], zero: Zero) -> Scheme:
    return int4_scheme("tiles", _group(data))


def _group(data: Fields) -> int:
    rows, columns = _pair(data, "block_size")
    if rows != 1 or columns > MOST_COLUMNS:
        allowed = f"one row, and 1 to {MOST_COLUMNS} columns that share a scale"
        raise data.error("block_size", [rows, columns], allowed)
    return columns


class _Class(NamedTuple):
    read: Callable[[Fields, tuple[int, int], Zero], Scheme]
    parts: tuple[str, ...]
    """What a weight must have beside its codes."""


_CLASSES = {
    "Int4Tensor": _Class(_int4, ("scale", "zero_point")),
    "Int4TilePackedTo4dTensor": _Class(_tiles, ("scale_and_zero",)),
    "Int8Tensor": _Class(_int8, ("scale",)),
    "IntxUnpackedToInt8Tensor": _Class(_intx, ("scale", "zero_point")),
    "Float8Tensor": _Class(_float8, ("scale",)),
}
"""Classes of tensors of TorchAO -> how such a weight is stored."""
_WITHOUT_SHAPE = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")
"""Their codes have the weight's shape."""
