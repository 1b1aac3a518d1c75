"""Slots: the places of a layer that a checkpoint fills.

A layer lists its slots, each named by a parameter and, where several checkpoint tensors are fused into one parameter, a
shard. A model is loaded when every slot has been filled exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

SlotName = tuple[str, str | None]
"""A parameter's name and the shard of it, or None where the slot is the whole parameter."""


class BlockForm(NamedTuple):
    """One of the types of GGUF files that store values in blocks of `values` values and `num_bytes` bytes."""

    kind: int
    """Its number in GGUF files, which operators know it by."""
    name: str
    values: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one checkpoint tensor goes: its elements start..start+length-1 along `dim` belong into `destination`.

    `shape` is that of the whole checkpoint tensor; `offset` is added to every element. A slot with a `form` takes the
    tensor's blocks as they are, as uint8: its elements are bytes.
    """

    destination: Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    offset: float = 0.0
    form: BlockForm | None = None

    @property
    def length(self) -> int:
        return self.destination.shape[self.dim]


@runtime_checkable
class Loadable(Protocol):
    """A layer with parameters."""

    def slots(self) -> dict[SlotName, Slot]:
        """Every slot of this layer; together they cover its parameters."""
        ...


def slots_of(model: nn.Module) -> dict[SlotName, Slot]:
    """Every slot of a model's layers, by the full name of its parameter."""
    slots: dict[SlotName, Slot] = {}
    for path, module in model.named_modules():
        if module is not model and isinstance(module, Loadable):
            slots |= {(f"{path}.{name}", shard): slot for (name, shard), slot in module.slots().items()}
    return slots


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without values and without gradient: loading fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
