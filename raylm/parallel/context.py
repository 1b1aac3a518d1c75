"""Where one process stands among those that share a model. Passed to whatever needs it; never fetched from a global."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from raylm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """One rank's place. Tensor ranks split every layer between them, pipeline ranks split the list of layers.

    `group` holds the tensor ranks of this pipeline rank; None at tensor_size 1, where no collective is needed.
    """

    rank: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    device: torch.device
    group: ProcessGroup | None = None

    @classmethod
    def single(cls, device: torch.device) -> ParallelContext:
        """The only process of a model."""
        return cls(rank=0, tensor_rank=0, tensor_size=1, pipeline_rank=0, pipeline_size=1, device=device)

    def split(self, size: int, what: str) -> int:
        """The share of each tensor rank. Raises ConfigError, naming `what`, when the ranks cannot share it evenly."""
        if size % self.tensor_size:
            raise ConfigError(f"{what} is {size}, which tensor parallelism over {self.tensor_size} ranks cannot divide")
        return size // self.tensor_size
