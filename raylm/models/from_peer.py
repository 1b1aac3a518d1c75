"""Weights from a live worker of the same rank in place of files: parameter by parameter, GPU to GPU.

Both sides hold the same model as raylm builds it, so that what a loader does (fusing, splitting, offsets, conversion)
has been done. Each says what it has, a Manifest; nothing is sent unless the two are equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

import raylm
from raylm.errors import TransferError
from raylm.layers.dtypes import dtype_name
from raylm.log import get_logger
from raylm.models.decoder import DecoderModel
from raylm.parallel import nccl
from raylm.parallel.nccl import Communicator

logger = get_logger(__name__)

_SENDER, _RECEIVER = 0, 1


class Parameter(NamedTuple):
    """One tensor of a manifest. A list of shape, for it travels."""

    name: str
    shape: list[int]
    dtype: str


class Manifest(NamedTuple):
    """What a rank's weights are, in the order in which they are sent."""

    version: str
    """Of raylm: another one may lay parameters out in another way."""
    checkpoint: str
    """A digest: two checkpoints may have the same shapes."""
    rank: list[int]
    """Tensor rank and size, pipeline rank and size."""
    parameters: list[Parameter]

    @classmethod
    def of(cls, model: DecoderModel, checkpoint: str) -> Manifest:
        context = model.context
        return cls(
            version=raylm.__version__,
            checkpoint=checkpoint,
            rank=[context.tensor_rank, context.tensor_size, context.pipeline_rank, context.pipeline_size],
            parameters=[Parameter(name, list(x.shape), dtype_name(x.dtype)) for name, x in model.named_parameters()],
        )

    def difference(self, other: Manifest) -> str | None:
        """The first thing in which a peer's manifest, `other`, is not this one; None where they are equal."""
        if self.version != other.version:
            return f"the peer runs raylm {other.version}, this worker {self.version}"
        if self.rank != other.rank:
            return f"the peer is {_place(other.rank)}, this worker {_place(self.rank)}"
        if self.checkpoint != other.checkpoint:
            return "the peer has loaded another checkpoint than the one that is here"
        if len(self.parameters) != len(other.parameters):
            return f"the peer has {len(other.parameters)} parameters, this worker {len(self.parameters)}"
        for own, theirs in zip(self.parameters, other.parameters, strict=True):
            if own != theirs:
                return f"the peer has {_described(theirs)}, this worker {_described(own)}"
        return None


class Peer(Protocol):
    """A worker that holds the wanted weights, as the one that wants them sees it. All may raise TransferError."""

    def manifest(self, limit_s: float) -> Manifest:
        """What it has."""
        ...

    def start_sending(self, unique_id: bytes, limit_s: float) -> None:
        """Let it connect and send all its parameters; returns at once."""
        ...

    def check(self) -> None:
        """Raise TransferError when it has failed or died."""
        ...

    def wait_sent(self, limit_s: float) -> None:
        """Return when it knows that all has been received."""
        ...


class Link(AbstractContextManager["Link"], Protocol):
    """What a transfer needs of a Communicator."""

    def send(self, tensors: list[Tensor], to: int) -> None: ...

    def receive(self, tensors: list[Tensor], source: int) -> None: ...

    def wait(self, limit_s: float, look: Callable[[], None]) -> None: ...


class Connect(Protocol):
    """Communicator.connect."""

    def __call__(
        self,
        unique_id: bytes,
        *,
        rank: int,
        size: int,
        device: torch.device,
        limit_s: float,
        look: Callable[[], None],
    ) -> Link: ...


class Wires(NamedTuple):
    """How processes are connected: NCCL, or what a test puts in its place."""

    missing: Callable[[torch.device], str | None] = nccl.missing
    make_id: Callable[[], bytes] = nccl.make_id
    connect: Connect = Communicator.connect


NCCL = Wires()


class WeightSender:
    """The side that holds the weights. It only reads them, on a stream of its own, so steps may run meanwhile; but one
    kernel for all layers needs the whole GPU, and waits until nothing is being sent."""

    def __init__(self, model: DecoderModel, checkpoint: str, *, wires: Wires = NCCL) -> None:
        """`checkpoint` is the digest of what `model` was loaded from."""
        self.manifest = Manifest.of(model, checkpoint)
        self._parameters = [x.data for x in model.parameters()]
        # With its index, which the context's may lack.
        self._device = self._parameters[0].device
        self._wires = wires

    def send(self, unique_id: bytes, *, limit_s: float, look: Callable[[], None]) -> None:
        """Connect to the one that wants the weights, and send them. `look` raises when it has died.

        Raises TransferError after `limit_s` at the latest.
        """
        if (problem := self._wires.missing(self._device)) is not None:
            raise TransferError(problem)
        deadline = time.monotonic() + limit_s
        with self._wires.connect(
            unique_id, rank=_SENDER, size=2, device=self._device, limit_s=limit_s, look=look
        ) as link:
            receipt = _receipt(self._device)
            link.send(self._parameters, _RECEIVER)
            link.receive([receipt], _RECEIVER)
            link.wait(max(deadline - time.monotonic(), 0), look)


def receive_weights(
    model: DecoderModel,
    checkpoint: str,
    peer: Peer,
    *,
    limit_s: float,
    wires: Wires = NCCL,
) -> None:
    """Fill `model`, whose files have the digest `checkpoint`, with the weights of `peer`.

    Raises TransferError with the reason, after some `limit_s` at the latest; the model's weights are undefined then.
    """
    parameters = [x.data for x in model.parameters()]
    device = parameters[0].device
    if (problem := wires.missing(device)) is not None:
        raise TransferError(problem)
    began = time.monotonic()
    deadline = began + limit_s

    def left() -> float:
        return max(deadline - time.monotonic(), 0)

    difference = Manifest.of(model, checkpoint).difference(peer.manifest(left()))
    if difference is not None:
        raise TransferError(difference)
    unique_id = wires.make_id()
    peer.start_sending(unique_id, left())
    with wires.connect(unique_id, rank=_RECEIVER, size=2, device=device, limit_s=left(), look=peer.check) as link:
        connected = time.monotonic()
        receipt = _receipt(device)
        link.receive(parameters, _SENDER)
        link.send([receipt], _SENDER)
        link.wait(left(), peer.check)
        seconds = time.monotonic() - connected
        peer.wait_sent(left())
    size = sum(x.nbytes for x in parameters)
    logger.info(
        "weights: %.2f GB from a live peer: %.2f s to connect, %.3f s to copy (%.1f GB/s)",
        size / 1e9,
        connected - began,
        seconds,
        size / 1e9 / seconds,
    )


def _receipt(device: torch.device) -> Tensor:
    """What the receiver sends back once it has everything: the sender must not close its end before."""
    return torch.zeros(1, dtype=torch.uint8, device=device)


def _place(rank: list[int]) -> str:
    tensor_rank, tensor_size, stage, stages = rank
    return f"tensor rank {tensor_rank} of {tensor_size} in stage {stage} of {stages}"


def _described(parameter: Parameter) -> str:
    return f"{parameter.name} {tuple(parameter.shape)} in {parameter.dtype}"
