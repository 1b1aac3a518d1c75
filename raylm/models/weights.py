"""WeightLoader: from the tensors of a checkpoint to the parameters of a model, every one exactly once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

import torch

from raylm.errors import ConfigError
from raylm.layers.slots import Slot, SlotName
from raylm.models.arch import ArchConfig
from raylm.models.checkpoint import CheckpointTensor
from raylm.models.filling import fill
from raylm.models.names import TensorNames, WeightTable, slot_name
from raylm.models.read_gguf import ROPE_FACTORS
from raylm.parallel.context import ParallelContext

_MAX_NAMES = 8
"""Names that one error lists."""
_DUMMY_STD = 0.02


class Fillable(Protocol):
    """A model as loading sees it; DecoderModel says what each part means."""

    @property
    def arch(self) -> ArchConfig: ...

    @property
    def context(self) -> ParallelContext: ...

    def slots(self) -> dict[SlotName, Slot]: ...

    def is_elsewhere(self, parameter: str) -> bool: ...


class WeightLoader:
    """Fills one model. Which tensor goes where is settled, and proved complete, before any data is read."""

    def __init__(self, model: Fillable, names: TensorNames, *, progress: bool, filled: tuple[str, ...] = ()) -> None:
        """`filled`: parameters that have their values already."""
        self._model = model
        self._names = names
        self._progress = progress
        self._filled = filled

    def load(self, tensors: Iterable[CheckpointTensor], table: WeightTable) -> None:
        """Read a checkpoint into the model.

        Raises ConfigError naming tensors that are missing, have no place, come twice or have another shape.
        """
        fill(self._assign(tensors, table), progress=self._progress)

    def _assign(self, tensors: Iterable[CheckpointTensor], table: WeightTable) -> list[tuple[CheckpointTensor, Slot]]:
        slots = {name: slot for name, slot in self._model.slots().items() if name[0] not in self._filled}
        found: defaultdict[SlotName, list[CheckpointTensor]] = defaultdict(list)
        for tensor in tensors:
            if not self._is_ignored(tensor.name):
                found[slot_name(tensor.name, table, self._names.prefixes)].append(tensor)
        _split_fused(found, slots)
        if self._model.arch.tie_embeddings:
            # Some checkpoints carry the tied head as well; it is the embedding once more.
            found.pop(("lm_head.weight", None), None)
        for name in [name for name in found if name not in slots and self._model.is_elsewhere(name[0])]:
            del found[name]
        problems = {
            "missing": [_label(name) for name in slots if name not in found],
            "without a place in this model": [t.name for name, ts in found.items() if name not in slots for t in ts],
            "there twice": [t.name for ts in found.values() if len(ts) > 1 for t in ts],
            "of another shape": [
                f"{tensor.name} {tensor.shape}, not {slots[name].shape}"
                for name, (tensor, *_) in found.items()
                if name in slots and tensor.shape != slots[name].shape
            ],
        }
        _raise(self._model.arch.architecture, problems)
        return [(found[name][0], slot) for name, slot in slots.items()]

    def _is_ignored(self, name: str) -> bool:
        # Old checkpoints carry the rotary frequencies, which follow from the configuration.
        is_rotary = name.endswith("rotary_emb.inv_freq") or name == ROPE_FACTORS
        return is_rotary or name.startswith(self._names.ignored)


def fill_dummy(model: Fillable, *, seed: int) -> None:
    """Random weights: norms 1, integers 0, everything else normal with a deviation of 0.02, the same for the same seed
    and rank."""
    context = model.context
    generator = torch.Generator(context.device).manual_seed(seed + context.rank)
    for (name, _), slot in model.slots().items():
        if name.endswith("norm.weight"):
            slot.destination.fill_(1.0)
        elif not slot.destination.is_floating_point():
            slot.destination.zero_()
        else:
            slot.destination.normal_(std=_DUMMY_STD, generator=generator)


def _split_fused(found: dict[SlotName, list[CheckpointTensor]], slots: dict[SlotName, Slot]) -> None:
    """A tensor of a whole parameter that is filled shard by shard holds the shards one behind the other."""
    for name in [name for name in found if name not in slots and name[1] is None]:
        shards = [shard for shard in slots if shard[0] == name[0]]
        sizes = [slots[shard].shape[0] for shard in shards]
        if not shards or any(tensor.shape[0] != sum(sizes) for tensor in found[name]):
            continue
        for tensor in found.pop(name):
            first = 0
            for shard, size in zip(shards, sizes, strict=True):
                found.setdefault(shard, []).append(tensor.rows(first, size))
                first += size


def _label(name: SlotName) -> str:
    parameter, shard = name
    return parameter if shard is None else f"{parameter} (shard {shard})"


def _raise(architecture: str, problems: dict[str, list[str]]) -> None:
    texts = []
    for what, names in problems.items():
        if names:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            texts.append(f"{len(names)} {what}: {', '.join(names[:_MAX_NAMES])}{more}")
    if texts:
        raise ConfigError(f"the checkpoint's tensors do not fit {architecture}: {'; '.join(texts)}")
