"""Which matrices of a model are computed with as their file stores them, and in what form."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raylm import ops
from raylm.layers.dtypes import dtype_name
from raylm.layers.slots import BlockForm
from raylm.layers.weight import PLAIN, BlockWeight, Forms, PlainWeight
from raylm.models.arch import ArchConfig
from raylm.models.checkpoint import CheckpointTensor, FileTensor
from raylm.models.names import Stored, TensorNames, slot_name

if TYPE_CHECKING:
    from raylm.models.decoder import DecoderModel


_MATRIX_DIMS = 2


@dataclass(frozen=True, slots=True)
class Scheme:
    """The forms of matrices by their names in the model, such as "layers.0.mlp.down_proj.weight"."""

    matrices: Mapping[str, Forms]

    def forms(self, name: str) -> Forms:
        """A matrix's; PLAIN where it is decoded while loading."""
        return self.matrices.get(name, PLAIN)


AS_NUMBERS = Scheme({})
"""All matrices are plain."""


def read_scheme(
    tensors: Iterable[FileTensor],
    stored: Stored,
    names: TensorNames,
    arch: ArchConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> Scheme:
    """What of a checkpoint the device has kernels for that read it as it is, with activations of `dtype`."""
    like = torch.empty(0, dtype=dtype, device=device)
    matrices: defaultdict[str, dict[str | None, BlockForm | torch.dtype]] = defaultdict(dict)
    for tensor in tensors:
        if not isinstance(tensor, CheckpointTensor) or len(tensor.shape) != _MATRIX_DIMS:
            continue
        form = _form(tensor, like)
        name, shard = slot_name(tensor.name, stored.table, names.prefixes)
        # The loader norms the rows of such a head.
        if form is not None and not (arch.norm_head and name == "lm_head.weight"):
            matrices[name][shard] = form
    return Scheme(matrices)


def _form(tensor: CheckpointTensor, like: Tensor) -> BlockForm | torch.dtype | None:
    """What the tensor is kept as; None for the type of `like`."""
    encoding = tensor.encoding
    if encoding.form is not None:
        return encoding.form if ops.block_kernels(like, encoding.form.kind) else None
    is_half = encoding.dtype in (torch.bfloat16, torch.float16)
    return encoding.dtype if is_half and ops.takes_narrow_weights(like) else None


def stored_forms(model: DecoderModel) -> Counter[str]:
    """How many matrices of a model are kept in which form other than its dtype, by the forms' names."""
    found: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, BlockWeight):
            found.update(form.name for form in module.forms)
        elif isinstance(module, PlainWeight) and module.values.dtype != model.dtype:
            found[dtype_name(module.values.dtype)] += 1
    return found
