"""Which matrices of a model are computed with as their file stores them, and in what form."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from raylm import ops
from raylm.layers.slots import BlockForm
from raylm.layers.weight import PLAIN, BlockWeight, Forms
from raylm.models.arch import ArchConfig
from raylm.models.checkpoint import CheckpointTensor
from raylm.models.names import Stored, TensorNames, slot_name


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
    tensors: Iterable[CheckpointTensor], stored: Stored, names: TensorNames, arch: ArchConfig, device: torch.device
) -> Scheme:
    """What of a checkpoint the device has kernels for."""
    like = torch.empty(0, device=device)
    matrices: defaultdict[str, dict[str | None, BlockForm]] = defaultdict(dict)
    for tensor in tensors:
        form = tensor.encoding.form
        if form is None or len(tensor.shape) != 2 or not ops.block_kernels(like, form.kind):
            continue
        name, shard = slot_name(tensor.name, stored.table, names.prefixes)
        # The loader norms the rows of such a head.
        if not (arch.norm_head and name == "lm_head.weight"):
            matrices[name][shard] = form
    return Scheme(matrices)


def stored_forms(model: nn.Module) -> Counter[str]:
    """How many matrices of a model are stored in which form, by the forms' names."""
    found = (module.forms for module in model.modules() if isinstance(module, BlockWeight))
    return Counter(form.name for forms in found for form in forms)
