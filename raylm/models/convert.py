"""A checkpoint written once more: its linear layers quantised, or the weights of a quantised one decoded."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from raylm.config.engine import ParallelConfig
from raylm.errors import ConfigError
from raylm.layers.dtypes import dtype_name
from raylm.log import get_logger
from raylm.model_files.aside import written_aside
from raylm.model_files.source import ModelSource
from raylm.model_files.weight_files import weight_files
from raylm.models.arch import ArchConfig
from raylm.models.checkpoint import CheckpointTensor, FileTensor
from raylm.models.formats import own_tensors
from raylm.models.names import Stored, TensorNames, slot_name
from raylm.models.outline import outline
from raylm.models.quantised.encode import Encoder, Method
from raylm.models.quantised.read_config import FIELD, FILES, OLD_FIELD
from raylm.models.read_json import read_json
from raylm.models.registry import family_of
from raylm.models.write_safetensors import Entry, Item, write_items

logger = get_logger(__name__)

SHARD_BYTES = 5_000_000_000
_LINEAR = {
    *("qkv_proj", "o_proj", "gate_up_proj", "up_proj", "down_proj"),
    *("q_proj", "k_proj", "v_proj", "gate_proj", "out_proj", "fc1", "fc2", "w1", "w2", "w3"),
}
"""Modules of layers whose matrices are quantised: as raylm's families call them, and as models do that run through
transformers' modules. Embeddings, the head, routers and everything unknown stay."""
_WEIGHT = ".weight"
_CONFIG = "config.json"
_NOT_COPIED = {
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz", ".tensors"),
}
_NOT_COPIED_ENDS = (".index.json",)
_NOT_COPIED_NAMES = {_CONFIG, "params.json", *FILES}
_TEMPLATES = "additional_chat_templates"


class Converted(NamedTuple):
    """What was written."""

    num_quantised: int
    num_kept: int
    read_bytes: int
    written_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Plan:
    items: list[Item]
    num_quantised: int
    ignored: list[str]
    """Modules whose matrices stay as they are."""


def convert(
    source: ModelSource,
    out: Path,
    method: Method | None,
    *,
    group_size: int = 128,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> Converted:
    """Write the model in `source` into the new folder `out`, which appears whole or not at all. Linear layers are
    quantised by `method`, of int4 with a scale for each `group_size` columns. None: they stay, and quantised ones are
    decoded.

    With `dtype`, tensors that are not quantised are written in it, and config.json says it. Without, decoded ones are
    in the model's own type, and others keep theirs.
    Raises ConfigError naming what cannot be read, quantised or written.
    """
    began = time.monotonic()
    arch, tensors, stored = _read(source)
    model_dtype = dtype or getattr(torch, arch.dtype)
    encoder = None if method is None else Encoder(method, group_size, model_dtype)
    plan = _plan(tensors, stored, family_of(arch.architecture).names, encoder, dtype, model_dtype)
    if encoder is not None and not plan.num_quantised:
        raise ConfigError(f"{source.path}: holds no matrices of linear layers that {method} could quantise")
    size = sum(item.num_bytes for item in plan.items)
    config = _config(source.path, encoder, plan.ignored, dtype)
    with written_aside(out) as folder:
        if size > (free := shutil.disk_usage(folder).free):
            raise ConfigError(f"{out}: the model would have {size / 1e9:.2f} GB; the disk has {free / 1e9:.2f} GB left")
        _copy_others(source.path, folder)
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        bar = tqdm(total=size, desc="convert", unit="B", unit_scale=True, leave=False, disable=not progress)
        with bar, torch.inference_mode():
            write_items(folder, plan.items, shard_bytes=shard_bytes, advance=bar.update)
    read = sum(
        tensor.main.num_bytes if not isinstance(tensor, CheckpointTensor) else tensor.num_bytes for tensor in tensors
    )
    return Converted(plan.num_quantised, len(plan.items) - plan.num_quantised, read, size, time.monotonic() - began)


def _read(source: ModelSource) -> tuple[ArchConfig, list[FileTensor], Stored]:
    """Every tensor by its own name, those included that raylm does not load, such as an image encoder's."""
    if source.kind == "gguf":
        raise ConfigError(
            f"{source.path}: a GGUF file cannot be converted; allowed: a folder with config.json and weights as "
            "safetensors or pytorch_model.bin"
        )
    files = weight_files(source)
    if files.format == "mistral" or not (source.path / _CONFIG).is_file():
        raise ConfigError(
            f"{source.path}: Mistral's own format cannot be converted; allowed: config.json and weights as safetensors "
            "or pytorch_model.bin"
        )
    arch = ArchConfig.from_source(source)
    if arch.quantisation is not None and not arch.quantisation.has_parts:
        raise ConfigError(f"{source.path}: is stored as {arch.quantisation}, which cannot be converted")
    names = family_of(arch.architecture).names
    tensors, stored = own_tensors(source, arch, files.format)
    if arch.quantisation is not None:
        tensors = [*_without_zero_biases(tensors, arch, stored, names)]
    if files.format == "pt":
        from raylm.models.torch_files import torch_file_tensors as file_tensors
    else:
        from raylm.models.safetensors import file_tensors
    for path in files.paths:
        tensors += file_tensors(path, ignored=lambda name: not name.startswith(names.ignored))
    _check(source, tensors, names)
    return arch, tensors, stored


def _check(source: ModelSource, tensors: Sequence[FileTensor], names: TensorNames) -> None:
    found: set[str] = set()
    for tensor in tensors:
        if tensor.name in found:
            raise ConfigError(f"{tensor.path}: tensor {tensor.name} is there twice")
        found.add(tensor.name)
        if not isinstance(tensor, CheckpointTensor) and _is_turned(tensor.name, names):
            raise ConfigError(
                f"{source.path}: tensor {tensor.name} is quantised as [out, in], but this model has it as [in, out]; "
                "such a checkpoint cannot be converted"
            )


def _is_turned(name: str, names: TensorNames) -> bool:
    """Whether a plain checkpoint has the matrix as [in, out]."""
    return bool(set(name.split(".")) & set(names.transposed))


def _without_zero_biases(
    tensors: Iterable[FileTensor], arch: ArchConfig, stored: Stored, names: TensorNames
) -> Iterator[FileTensor]:
    """AutoGPTQ gave every layer a bias of zeros. The loader drops those only from quantised checkpoints."""
    if arch.transformers_config:
        from raylm.models.transformers_names import renamed

    (stage,) = outline(arch, ParallelConfig(), torch.bfloat16)
    known = {name for name, _ in stage.model.slots()}
    for tensor in tensors:
        is_zero = False
        if tensor.name.endswith(".bias"):
            module = renamed([tensor], arch.transformers_config)[0] if arch.transformers_config else tensor
            if slot_name(module.name, stored.table, names.prefixes)[0] not in known:
                is_zero = not any(bool(piece.count_nonzero()) for _, piece in tensor.pieces(0, tensor.shape[0]))
        if not is_zero:
            yield tensor


def _plan(
    tensors: Iterable[FileTensor],
    stored: Stored,
    names: TensorNames,
    encoder: Encoder | None,
    dtype: torch.dtype | None,
    model_dtype: torch.dtype,
) -> _Plan:
    """What is written, in the order of the files that are read."""
    items, ignored, num_quantised = [], ["lm_head"], 0
    for tensor in sorted(tensors, key=lambda tensor: (str(tensor.path), tensor.offset)):
        if encoder is not None and _is_linear(tensor, stored, names):
            items.append(_quantised(tensor, encoder))
            num_quantised += 1
            continue
        if len(tensor.shape) > 1:
            ignored.append(tensor.name.removesuffix(_WEIGHT))
        if isinstance(tensor, CheckpointTensor):
            own = tensor.encoding.dtype
            assert own is not None
        else:
            own = model_dtype
        items.append(_kept(tensor, dtype or own))
    return _Plan(items, num_quantised, list(dict.fromkeys(ignored)))


def _is_linear(tensor: FileTensor, stored: Stored, names: TensorNames) -> bool:
    """Whether it is the matrix [out, in] of a linear layer of a decoder layer, or of one expert."""
    is_matrix = len(tensor.shape) == 2 and 0 not in tensor.shape and tensor.name.endswith(_WEIGHT)
    if not is_matrix or tensor.name.startswith(names.ignored) or _is_turned(tensor.name, names):
        return False
    module = slot_name(tensor.name, stored.table, names.prefixes)[0].removesuffix(_WEIGHT).split(".")
    return module[-1] in _LINEAR and any(part.isdigit() for part in module)


def _quantised(tensor: FileTensor, encoder: Encoder) -> Item:
    encoder.check(tensor.name, tensor.shape)
    module = tensor.name.removesuffix(_WEIGHT)
    entries = tuple(Entry(f"{module}.{end}", dtype, shape) for end, dtype, shape in encoder.parts(tensor.shape))
    return Item(entries, lambda: encoder.encode(tensor.name, tensor.shape, tensor.pieces(0, tensor.shape[0])))


def _kept(tensor: FileTensor, dtype: torch.dtype) -> Item:
    return Item((Entry(tensor.name, dtype, tensor.shape),), partial(_in_type, tensor, dtype))


def _in_type(tensor: FileTensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Raises ConfigError for a number that the type cannot have."""
    for _, piece in tensor.pieces(0, tensor.shape[0]):
        found = piece.to(dtype)
        if found.dtype != piece.dtype and not bool(found.isfinite().all()):
            raise ConfigError(
                f"tensor {tensor.name} holds numbers that {dtype_name(dtype)} cannot have, or that are NaN or inf"
            )
        yield 0, found


def _config(
    folder: Path, encoder: Encoder | None, ignored: Sequence[str], dtype: torch.dtype | None
) -> dict[str, object]:
    """config.json, with the new quantisation in place of the old one."""
    config = read_json(folder / _CONFIG)
    sections = [config]
    if isinstance(text := config.get("text_config"), dict):
        sections.append(text)
    for section in sections:
        for name in (FIELD, OLD_FIELD):
            section.pop(name, None)
        if dtype is not None:
            for name in ("dtype", "torch_dtype"):
                if name in section:
                    section[name] = dtype_name(dtype)
    if dtype is not None and "dtype" not in config and "torch_dtype" not in config:
        config["torch_dtype"] = dtype_name(dtype)
    if encoder is not None:
        config[FIELD] = encoder.config(ignored)
    return config


def _copy_others(folder: Path, out: Path) -> None:
    """Tokenizer, chat templates, generation_config.json and whatever else holds no weights."""
    for path in sorted(folder.iterdir()):
        is_other = path.suffix not in _NOT_COPIED and not path.name.endswith(_NOT_COPIED_ENDS)
        if is_other and path.is_file() and path.name not in _NOT_COPIED_NAMES and not path.name.startswith("."):
            shutil.copyfile(path, out / path.name)
    if (folder / _TEMPLATES).is_dir():
        shutil.copytree(folder / _TEMPLATES, out / _TEMPLATES, copy_function=shutil.copyfile)
