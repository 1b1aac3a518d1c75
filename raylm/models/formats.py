"""The tensors of a checkpoint, in whichever format it is, and what each format calls them."""

from __future__ import annotations

from raylm.errors import ConfigError
from raylm.model_files.source import ModelSource
from raylm.model_files.weight_files import weight_files
from raylm.models.arch import ArchConfig
from raylm.models.checkpoint import CheckpointTensor, FileTensor
from raylm.models.names import Stored
from raylm.models.quantised.torchao import CONVERT
from raylm.models.registry import family_of


def read_checkpoint(source: ModelSource, arch: ArchConfig, load_format: str) -> tuple[list[FileTensor], Stored]:
    """Every tensor, unread, and how the files have them. Parts of quantised weights are joined. Weights of a remote
    model are brought here first.
    Raises ConfigError where a file is missing or damaged."""
    tensors, stored = own_tensors(source, arch, load_format)
    if arch.transformers_config:
        from raylm.models.transformers_names import renamed

        tensors = renamed(tensors, arch.transformers_config)
    return tensors, stored


def raw_tensors(source: ModelSource, arch: ArchConfig, load_format: str) -> list[CheckpointTensor]:
    """Every tensor by the name that the files have, parts of quantised weights and scales among them."""
    return _read(source, arch, load_format)[0]


def own_tensors(source: ModelSource, arch: ArchConfig, load_format: str) -> tuple[list[FileTensor], Stored]:
    """The same by the names that the files have, whatever the modules are called."""
    read, stored = _read(source, arch, load_format)
    if (quantisation := arch.quantisation) is not None and quantisation.has_parts:
        from raylm.models.quantised.join import join

        return join(read, quantisation), stored
    return [*read], stored


def _read(source: ModelSource, arch: ArchConfig, load_format: str) -> tuple[list[CheckpointTensor], Stored]:
    names = family_of(arch.architecture).names
    if source.kind == "gguf":
        # Imported here, as all readers are: each may need packages that the others do not.
        from raylm.models.gguf import gguf_tensors

        return gguf_tensors(source), Stored(names.gguf, names.gguf_pairs)
    files = weight_files(source, load_format)
    quantised = arch.quantisation is not None and arch.quantisation.has_parts
    if files.format == "pt":
        if arch.quantisation is not None and arch.quantisation.in_files:
            raise ConfigError(
                f"{files.paths[0]}: its tensors are objects of TorchAO's classes, which are not read from a pickle; "
                f"allowed: safetensors; {CONVERT}"
            )
        from raylm.models.torch_files import torch_file_tensors

        tensors = [
            tensor
            for path in files.paths
            for tensor in torch_file_tensors(path, quantised=quantised, ignored=names.is_ignored)
        ]
        return tensors, Stored(names.folder, names.pairs)
    from raylm.models.safetensors import file_tensors

    packed = names.packed and not quantised
    tensors = [
        tensor
        for path in files.paths
        for tensor in file_tensors(path, packed=packed, quantised=quantised, ignored=names.is_ignored)
    ]
    if files.format == "mistral":
        return tensors, Stored(names.mistral, pairs=True)
    return tensors, Stored(names.folder, names.pairs)
