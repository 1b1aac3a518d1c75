"""The step channel: plans from the engine to all its workers at once, results back from the one that answers; and,
between plans, what else workers are told, which each of them answers.

A ZeroMQ pair for each worker: over a Unix socket in a folder that only this user can enter for workers of the
engine's node, over TCP with CURVE keys for those of other nodes. Messages are msgpack, a plan is encoded once; a
worker's failure comes back as a message of its own, from any of them.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from raylm.core.control import StartProfile, StopProfile, WorkerControl
from raylm.core.step import Sampled, StepPlan
from raylm.errors import EngineDeadError
from raylm.executor.base import StepOnItsWay

_NAP_S = 20e-6
"""Between looks for a plan or a result while a device computes."""

_LAST_WORDS_MS = 5_000
"""How long an end that closes may take to send what it said last. It takes so long only where its threads are held, or
where the other end reads nothing and is full."""

_LOOK_MS = 100
"""Between looks for a worker that takes no plan."""


class _Failure(msgspec.Struct, tag="failure", array_like=True):
    message: str


class _Done(msgspec.Struct, tag="done", array_like=True):
    result: Sampled


class _Told(msgspec.Struct, tag="told", array_like=True):
    answer: str


_ToWorker = StepPlan | StartProfile | StopProfile
_FromWorker = _Done | _Failure | _Told


class StepAddress(NamedTuple):
    """Where one worker gets its plans. The keys are empty on a Unix socket."""

    address: str
    server_key: bytes = b""
    public_key: bytes = b""
    secret_key: bytes = b""


class PlanSender:
    """The engine's end. One thread at a time."""

    def __init__(self, hosts: Sequence[str | None] = (None,)) -> None:
        """One worker for each of `hosts`: None for one on this node, else the address of this node that it reaches."""
        self._folder = Path(tempfile.mkdtemp(prefix="raylm-steps-"))
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[_FromWorker] = msgspec.msgpack.Decoder(_FromWorker)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        self._results: deque[Sampled] = deque()
        """Those that came while an answer was waited for."""
        self._answers: dict[int, str] = {}
        """By rank, to what all workers were told last."""
        self.addresses = [self._bind(rank, host) for rank, host in enumerate(hosts)]

    def wait_for_workers(self, *, look: Callable[[], None], deadline: float) -> None:
        """Return once every worker has connected. Until then `look` is called again and again: it raises when a worker
        has gone. From then on the channel has nothing in the file system that a killed engine could leave behind.

        Raises EngineDeadError at `deadline` (time.monotonic()).
        """
        for rank, socket in enumerate(self._sockets):
            while not socket.poll(_LOOK_MS, zmq.POLLOUT):
                look()
                if time.monotonic() > deadline:
                    raise EngineDeadError(f"worker {rank} has loaded the model, but cannot reach the engine")
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, plan: StepPlan, *, look: Callable[[], None] = lambda: None) -> None:
        """Send a plan to every worker. While one takes none, `look` is called again and again: it raises when the
        worker has gone, for then there is nobody who ever will."""
        self._send(self._encoder.encode(plan), look)

    def tell(self, op: WorkerControl, *, look: Callable[[], None], deadline: float) -> list[str]:
        """Have every worker do it between the plans sent before and those sent later. Returns their answers, by rank;
        until then `look` is called again and again. Raises EngineDeadError at `deadline` (time.monotonic())."""
        self._answers.clear()
        self._send(self._encoder.encode(op), look)
        while len(self._answers) < len(self._sockets):
            self._read(_LOOK_MS)
            look()
            if time.monotonic() > deadline:
                silent = sorted(set(range(len(self._sockets))) - self._answers.keys())
                raise EngineDeadError(f"the workers {silent} hang: {type(op).__name__} was not done in time")
        return [answer for _, answer in sorted(self._answers.items())]

    def _send(self, message: bytes, look: Callable[[], None]) -> None:
        for socket in self._sockets:
            while not _sent(socket, message):
                look()
                socket.poll(_LOOK_MS, zmq.POLLOUT)

    def receive(self, timeout_ms: int) -> Sampled | None:
        """The next result, or None after `timeout_ms`. Raises EngineDeadError with what a worker said."""
        if not self._results:
            self._read(timeout_ms)
        return self._results.popleft() if self._results else None

    def has_result(self) -> bool:
        """Whether `receive` returns, or raises, at once."""
        return bool(self._results or self._poller.poll(0))

    def _read(self, timeout_ms: int) -> None:
        """Take in one message, if one comes within `timeout_ms`."""
        for socket, _ in self._poller.poll(timeout_ms):
            message = self._decoder.decode(socket.recv())
            rank = self._sockets.index(socket)
            if isinstance(message, _Failure):
                raise EngineDeadError(f"worker {rank} of {len(self._sockets)} failed in a step: {message.message}")
            if isinstance(message, _Told):
                self._answers[rank] = message.answer
            else:
                self._results.append(message.result)
            return

    def close(self) -> None:
        """Close the channel; the workers' loops end with the empty message that goes first."""
        if self._context.closed:
            return
        for socket in self._sockets:
            _sent(socket, b"")
            socket.close(linger=_LAST_WORDS_MS)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _bind(self, rank: int, host: str | None) -> StepAddress:
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        self._sockets.append(socket)
        self._poller.register(socket, zmq.POLLIN)
        if host is None:
            address = f"ipc://{self._folder}/{rank}"
            socket.bind(address)
            return StepAddress(address)
        # The keys prove the engine to the worker, and the worker's come from the engine: without an authenticator
        # libzmq takes any client that has the server's key, which no one else is told.
        server_public, server_secret = zmq.curve_keypair()
        public, secret = zmq.curve_keypair()
        socket.curve_server = True
        socket.curve_secretkey = server_secret
        socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        port = socket.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
        return StepAddress(f"tcp://{host}:{port}", server_public, public, secret)


def _sent(socket: zmq.Socket[bytes], message: bytes) -> bool:
    """Send it if the worker is there and takes it now. A look before would prove nothing: it may leave in between."""
    try:
        socket.send(message, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


class PlanReceiver:
    """A worker's end."""

    def __init__(self, address: StepAddress, *, answers: bool = True) -> None:
        """Only a worker that `answers` sends results; any says when it fails."""
        self._answers = answers
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        if address.server_key:
            self._socket.curve_serverkey = address.server_key
            self._socket.curve_publickey = address.public_key
            self._socket.curve_secretkey = address.secret_key
        self._socket.connect(address.address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[_ToWorker] = msgspec.msgpack.Decoder(_ToWorker)

    def receive(self) -> _ToWorker | None:
        """Wait for the next plan, or what else is to be done; None when the engine has closed the channel."""
        message = self._socket.recv()
        return self._decoder.decode(message) if message else None

    def has_message(self) -> bool:
        """Whether `receive` returns at once."""
        return bool(self._socket.poll(0))

    def send(self, result: Sampled) -> None:
        if self._answers:
            self._socket.send(self._encoder.encode(_Done(result)))

    def answer(self, text: str) -> None:
        """Say that what the workers were told is done."""
        self._socket.send(self._encoder.encode(_Told(text)))

    def fail(self, error: Exception) -> None:
        """Tell the engine why no more results will come."""
        self._socket.send(self._encoder.encode(_Failure(f"{type(error).__name__}: {error}")))

    def close(self) -> None:
        self._socket.close(linger=_LAST_WORDS_MS)
        self._context.term()


def serve(
    channel: PlanReceiver, submit: Callable[[StepPlan], StepOnItsWay], control: Callable[[WorkerControl], str]
) -> None:
    """Run plans until the engine closes the channel: each is submitted when it comes, while earlier ones compute, and
    results go back in order. What else comes is done when no step is under way."""
    steps: deque[StepOnItsWay] = deque()
    while True:
        if steps and steps[0].done:
            channel.send(steps.popleft().result())
        elif not steps or channel.has_message():
            message = channel.receive()
            if message is None:
                return
            if isinstance(message, StepPlan):
                steps.append(submit(message))
                continue
            while steps:
                channel.send(steps.popleft().result())
            channel.answer(control(message))
        else:
            time.sleep(_NAP_S)
