"""Names of checkpoints' tensors as transformers' modules have them, and the experts' as raylm has them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from raylm.models.checkpoint import CheckpointTensor, FileTensor
from raylm.models.families.through_transformers import transformers_config

_OF_AN_EXPERT = re.compile(r"(\.experts\.\d+)\.(w1|w2|w3)\.weight$")
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_DIMS_OF_ALL = 3
_MIXTRALS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def renamed(tensors: Sequence[FileTensor], config: str) -> list[FileTensor]:
    """The tensors of a checkpoint by the names of the modules that `config`, a config.json, describes; of experts, each
    projection of each by itself."""
    known = get_checkpoint_conversion_mapping(transformers_config(config).model_type) or []
    names = [step for step in known if isinstance(step, WeightRenaming)]
    found: list[FileTensor] = []
    for tensor in tensors:
        # transformers joins single experts into one tensor of 3 dimensions. A file that has it joined already needs
        # that step's name too; of single experts only the renamings apply.
        steps = known if len(tensor.shape) == _DIMS_OF_ALL else names
        name = tensor.name
        for step in steps:
            name = step.rename_source_key(name)[0]
        name = _OF_AN_EXPERT.sub(lambda match: f"{match[1]}.{_MIXTRALS[match[2]]}.weight", name)
        found += _by_experts(replace(tensor, name=name))
    return found


def _by_experts(tensor: FileTensor) -> Iterator[FileTensor]:
    layer, of_all, projection = tensor.name.rpartition(".experts.")
    parts = _PROJECTIONS.get(projection.removesuffix(".weight"))
    if not of_all or parts is None or not isinstance(tensor, CheckpointTensor) or len(tensor.shape) != _DIMS_OF_ALL:
        yield tensor
        return
    size = tensor.shape[1] // len(parts)
    for expert in range(tensor.shape[0]):
        own = tensor.item(expert)
        for number, part in enumerate(parts):
            yield replace(own.rows(number * size, size), name=f"{layer}.experts.{expert}.{part}.weight")
