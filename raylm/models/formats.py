"""The tensors of a checkpoint, in whichever format it is, and what each format calls them."""

from __future__ import annotations

from raylm.model_files.source import ModelSource
from raylm.model_files.weight_files import weight_files
from raylm.models.arch import ArchConfig
from raylm.models.checkpoint import CheckpointTensor
from raylm.models.names import WeightTable
from raylm.models.registry import family_of
from raylm.models.rotary_order import from_neighbours

_MISTRAL_PAIRS = {"wq", "wk"}


def read_checkpoint(
    source: ModelSource, arch: ArchConfig, load_format: str
) -> tuple[list[CheckpointTensor], WeightTable]:
    """Every tensor, unread, and the table from its name to its place. Weights of a remote model are brought here first.
    Raises ConfigError where a file is missing or damaged."""
    names = family_of(arch.architecture).names
    if source.kind == "gguf":
        # Imported here, as all readers are: each may need packages that the others do not.
        from raylm.models.gguf import gguf_tensors

        return gguf_tensors(source, paired_head_dim=arch.head_dim if names.gguf_pairs else 0), names.gguf
    files = weight_files(source, load_format)
    if files.format == "pt":
        from raylm.models.torch_files import torch_file_tensors

        return [tensor for path in files.paths for tensor in torch_file_tensors(path)], names.folder
    from raylm.models.safetensors import file_tensors

    tensors = [tensor for path in files.paths for tensor in file_tensors(path)]
    if files.format == "mistral":
        return [_in_our_order(tensor, arch.head_dim) for tensor in tensors], names.mistral
    return tensors, names.folder


def _in_our_order(tensor: CheckpointTensor, head_dim: int) -> CheckpointTensor:
    is_paired = bool(_MISTRAL_PAIRS & set(tensor.name.split(".")))
    return from_neighbours(tensor, head_dim) if is_paired else tensor
