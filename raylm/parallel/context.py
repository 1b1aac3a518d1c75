"""Where one process stands among those that share a model. Passed to whatever needs it; never fetched from a global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from raylm.errors import ConfigError

if TYPE_CHECKING:
    from raylm.ops import PeerCells
    from raylm.parallel.stages import StageLinks


class Reducer(Protocol):
    """Sums tensors of a tensor group faster than the group's own collective, alone or as part of the norm behind, and
    gathers them.

    Of a residual that its norm adds to, each rank may keep some rows alone up to date: those that it norms, the same in
    every norm of as many rows."""

    @property
    def cells(self) -> PeerCells | None:
        """Windows in which ops.few_layers sums over the ranks; None where there are none."""

    def takes(self, x: Tensor) -> bool: ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def takes_gather(self, x: Tensor) -> bool: ...

    def gather(self, x: Tensor, *, split: bool) -> Tensor: ...

    def takes_norm(self, x: Tensor, residual: Tensor) -> bool: ...

    def add_rms_norm(self, x: Tensor | Sent, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def sends(self, rows: int, row_bytes: int) -> bool: ...

    def send(self, product: Callable[[slice], Tensor], rows: int) -> Sent: ...


def rows_of_rank(num_rows: int, rank: int, ranks: int) -> slice:
    """A tensor rank's share of the rows, where ranks share them as evenly as they can."""
    return slice(num_rows * rank // ranks, num_rows * (rank + 1) // ranks)


@dataclass(frozen=True, slots=True)
class Sent:
    """This rank's part of a sum of [T, H] over the tensor ranks, on its way to the ranks that norm its rows."""

    own: Tensor
    """The rows that this rank norms: [T / ranks, H], about."""
    number: int
    """The sum's number, counted from 1 on every rank alike (ops.peer_send_rows)."""
    others: tuple[Tensor, ...]
    """The other ranks' rows, kept in memory until the norm is queued, which waits for their copies."""


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """One rank's place. Tensor ranks split every layer between them, pipeline ranks (stages) split the list of layers.

    Ranks count through the tensor ranks of the first stage, then those of the second. `group` holds the tensor ranks of
    this stage, `world` all ranks; each is None where it would hold one rank alone. `stage_layers` says how many layers
    each stage has; None shares them evenly.

    With `deterministic` (runtime.deterministic), what is computed for a row does not depend on the other rows of a
    step: layers call operators whose sums have one order.
    """

    rank: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    device: torch.device
    group: ProcessGroup | None = None
    world: ProcessGroup | None = None
    reducer: Reducer | None = None
    links: StageLinks | None = None
    stage_layers: tuple[int, ...] | None = None
    deterministic: bool = False

    @classmethod
    def single(cls, device: torch.device, *, deterministic: bool = False) -> ParallelContext:
        """The only process of a model."""
        return cls(
            rank=0,
            tensor_rank=0,
            tensor_size=1,
            pipeline_rank=0,
            pipeline_size=1,
            device=device,
            deterministic=deterministic,
        )

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def answers(self) -> bool:
        """Whether this rank's results go to the engine: those of all tensor ranks of the last stage are the same."""
        return self.is_last_stage and self.tensor_rank == 0

    def split(self, size: int, what: str) -> int:
        """The share of each tensor rank. Raises ConfigError, naming `what`, when the ranks cannot share it evenly."""
        if size % self.tensor_size:
            raise ConfigError(f"{what} is {size}, which parallel.tensor {self.tensor_size} cannot divide")
        return size // self.tensor_size

    def shares(self, size: int, what: str, unit: int = 1) -> list[range]:
        """The part of each tensor rank: whole units but for the last one's, and none has more than the first; evenly
        where there are fewer units than ranks. Raises ConfigError as `split` does."""
        even = self.split(size, what)
        unit = even if size <= unit * (self.tensor_size - 1) else unit
        units = -(-size // unit)
        ends = [min(size, -(-rank * units // self.tensor_size) * unit) for rank in range(self.tensor_size + 1)]
        return [range(first, last) for first, last in pairwise(ends)]

    def share(self, size: int, what: str, unit: int = 1) -> range:
        """This rank's of the `shares`."""
        return self.shares(size, what, unit)[self.tensor_rank]

    def layers(self, num_layers: int) -> range:
        """The layers of this stage. Raises ConfigError when the stages cannot share so many."""
        sizes = self._stage_sizes(num_layers)
        first = sum(sizes[: self.pipeline_rank])
        return range(first, first + sizes[self.pipeline_rank])

    def _stage_sizes(self, num_layers: int) -> tuple[int, ...]:
        if self.stage_layers is not None:
            if sum(self.stage_layers) != num_layers:
                raise ConfigError(
                    f"parallel.stage_layers {list(self.stage_layers)} has {sum(self.stage_layers)} layers in all, "
                    f"the model {num_layers}"
                )
            return self.stage_layers
        if num_layers < self.pipeline_size:
            raise ConfigError(f"parallel.pipeline is {self.pipeline_size}, but the model has {num_layers} layers only")
        even, more = divmod(num_layers, self.pipeline_size)
        # The last stage has the head as well, the first the embedding: what is over goes to those between, then to the
        # first.
        order = [*range(1, self.pipeline_size - 1), 0, self.pipeline_size - 1]
        return tuple(even + (stage in order[:more]) for stage in range(self.pipeline_size))
