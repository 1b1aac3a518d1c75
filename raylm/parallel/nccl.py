"""NCCL communicators made at run time, between processes that share no process group.

One process makes an id and hands it to the others by whatever way it has; each of them then connects with its number.
cupy's binding is used, an optional dependency: torch can only make communicators inside of its process groups.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raylm.errors import TransferError

if TYPE_CHECKING:
    from cupy.cuda.nccl import NcclCommunicator

_POLL_S = 0.001
_LOOK_S = 0.1


def missing(device: torch.device) -> str | None:
    """Why this process can make no communicator for `device`; None when it can.

    The first call imports cupy, which takes half a second.
    """
    if device.type != "cuda":
        return f"NCCL copies between GPUs, and this worker's device is {device}"
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        repair = "in raylm's repository, pip install -e '.[cuda]'"
        return f"cupy, which NCCL is called through, cannot be imported ({error}): {repair}"
    return None if nccl.available else "cupy finds no NCCL library here"


def make_id() -> bytes:
    """What the processes that will connect to each other have in common. The process that makes it must live until
    they have. Raises TransferError."""
    from cupy.cuda import nccl

    with _translated():
        unique_id: bytes = nccl.get_unique_id()
    return unique_id


class Communicator:
    """One process's end. One thread at a time may use it, but for `close`.

    Work is queued on a stream of its own, `stream`, behind what the caller's current stream has been given by then.
    What is received may be read once `wait` has returned, or behind `stream`. Tensors must live until then.
    """

    def __init__(self, comm: NcclCommunicator, *, rank: int, size: int, device: torch.device) -> None:
        """`connect` makes one."""
        import cupy

        self.rank = rank
        self.size = size
        self._comm = comm
        self._device = device
        # Not one of torch's streams: those come from a small pool, and another user of the same one may capture it.
        self._own_stream = cupy.cuda.Stream(non_blocking=True)
        self.stream = torch.cuda.ExternalStream(self._own_stream.ptr, device=device)

    @classmethod
    def connect(
        cls,
        unique_id: bytes,
        *,
        rank: int,
        size: int,
        device: torch.device,
        limit_s: float,
        look: Callable[[], None] = lambda: None,
    ) -> Communicator:
        """Meet the other ranks and say a byte to each, which makes all connections: nothing that is queued later waits
        for another process on the host. `device` is a GPU with its index.

        `look` is called ten times a second meanwhile; what it raises ends the wait. Raises TransferError, after
        `limit_s` at the latest.
        """
        attempt = _Attempt(lambda: cls._connected(unique_id, rank, size, device), cls._greet)
        thread = threading.Thread(target=attempt.run, name="raylm-nccl-connect", daemon=True)
        thread.start()
        return attempt.wait(limit_s, look)

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Queue the contiguous `tensors` of this device for rank `to`, which receives as many of equal sizes."""
        self._exchange([(self._comm.send, x, to) for x in tensors])

    def receive(self, tensors: Sequence[Tensor], source: int) -> None:
        """Queue that the contiguous `tensors` of this device are filled with what rank `source` sends."""
        self._exchange([(self._comm.recv, x, source) for x in tensors])

    def wait(self, limit_s: float, look: Callable[[], None] = lambda: None) -> None:
        """Wait for all that is queued. `look` as in `connect`. Raises TransferError; the communicator is no more then,
        and tensors hold some of what they should."""
        done = torch.cuda.Event()
        done.record(self.stream)
        deadline, next_look = time.monotonic() + limit_s, 0.0
        try:
            while not done.query():
                now = time.monotonic()
                if now > deadline:
                    raise TransferError(f"NCCL had not copied everything after {limit_s:.1f} s")
                if now > next_look:
                    next_look = now + _LOOK_S
                    look()
                    with _translated():
                        self._comm.check_async_error()
                time.sleep(_POLL_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give everything back at once, from any thread; calls and kernels that wait for another rank end. Others may
        still read what this rank has sent out of its memory: close only once they are known to have received it."""
        # NCCL's other way, to destroy a communicator, returns only when all ranks of the host do so.
        self._comm.abort()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def _connected(cls, unique_id: bytes, rank: int, size: int, device: torch.device) -> Communicator:
        from cupy.cuda.nccl import NcclCommunicator

        with torch.cuda.device(device), _translated():
            return cls(NcclCommunicator(size, unique_id, rank), rank=rank, size=size, device=device)

    def _greet(self) -> None:
        with torch.cuda.device(self._device), _translated():
            said, heard = torch.zeros(2, self.size, dtype=torch.uint8, device=self._device)
            others = [rank for rank in range(self.size) if rank != self.rank]
            self._exchange(
                [(self._comm.send, said[rank : rank + 1], rank) for rank in others]
                + [(self._comm.recv, heard[rank : rank + 1], rank) for rank in others]
            )
            done = torch.cuda.Event()
            done.record(self.stream)
            while not done.query():
                time.sleep(_POLL_S)

    def _exchange(self, calls: Sequence[tuple[Callable[[int, int, int, int, int], None], Tensor, int]]) -> None:
        from cupy.cuda import nccl

        for _, x, _ in calls:
            if not x.is_contiguous() or x.device != self._device:
                raise ValueError(f"a tensor {tuple(x.shape)} on {x.device} is not contiguous on {self._device}")
        with torch.cuda.device(self._device), _translated():
            self.stream.wait_stream(torch.cuda.current_stream())
            nccl.groupStart()
            try:
                for call, x, rank in calls:
                    if x.nbytes:
                        call(x.data_ptr(), x.nbytes, nccl.NCCL_UINT8, rank, self.stream.cuda_stream)
            finally:
                nccl.groupEnd()


class _Attempt:
    """Connecting, in a thread of its own: until a communicator is there, NCCL waits for the others for ever, and
    nothing can end that."""

    def __init__(self, connect: Callable[[], Communicator], greet: Callable[[Communicator], None]) -> None:
        self._connect = connect
        self._greet = greet
        self._made: Communicator | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._future: Future[Communicator] = Future()

    def run(self) -> None:
        try:
            made = self._connect()
            with self._lock:
                self._made = made
                if self._given_up:
                    made.close()
                    return
            self._greet(made)
            self._future.set_result(made)
        except BaseException as error:
            self._future.set_exception(error)

    def wait(self, limit_s: float, look: Callable[[], None]) -> Communicator:
        deadline = time.monotonic() + limit_s
        try:
            while not futures.wait([self._future], timeout=_LOOK_S).done:
                look()
                if time.monotonic() > deadline:
                    raise TransferError(f"the other process had not connected over NCCL after {limit_s:.1f} s")
            return self._future.result()
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        with self._lock:
            self._given_up = True
            if self._made is not None:
                self._made.close()


@contextmanager
def _translated() -> Iterator[None]:
    """NCCL's errors as TransferErrors. cupy has no text for some of NCCL's codes, and raises KeyError then."""
    try:
        yield
    except (RuntimeError, KeyError) as error:
        raise TransferError(f"NCCL failed: {error}") from error
