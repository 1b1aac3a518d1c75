"""Logits to tokens: the settings of a step's rows go to the device together, and the operator does the rest."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from raylm import ops


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row of the logits samples; every array is [num_rows] on the host."""

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    position: np.ndarray

    def to(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The arrays on the device, by name, moved in one copy; on a CPU they share the arrays' memory."""
        arrays = {field.name: np.ascontiguousarray(getattr(self, field.name)) for field in fields(self)}
        if device.type == "cpu":
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        # Eight bytes an element first, so that each array starts at a multiple of its element's size.
        order = sorted(arrays, key=lambda name: -arrays[name].itemsize)
        packed = torch.from_numpy(np.concatenate([arrays[name].view(np.uint8) for name in order]))
        moved = packed.pin_memory().to(device, non_blocking=True)
        parts = moved.split([arrays[name].nbytes for name in order])
        kinds = [torch.from_numpy(arrays[name]).dtype for name in order]
        return {name: part.view(kind) for name, part, kind in zip(order, parts, kinds, strict=True)}


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Draw one token a row. logits: [num_rows, vocab] float32. Returns [num_rows] int64 on the same device."""
    return ops.sample(logits, **batch.to(logits.device))
