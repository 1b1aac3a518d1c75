"""The step channel: plans from the engine to a worker of its node, results back.

A ZeroMQ pair over a Unix socket in a folder that only this user can enter. Messages are msgpack; a worker's failure
comes back as a message of its own.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from raylm.core.step import StepPlan, StepResult
from raylm.errors import EngineDeadError
from raylm.executor.base import StepOnItsWay

_NAP_S = 20e-6
"""Between looks for a plan or a result while a device computes."""


class _Failure(msgspec.Struct, tag="failure", array_like=True):
    message: str


class _Done(msgspec.Struct, tag="done", array_like=True):
    result: StepResult


class PlanSender:
    """The engine's end. One thread at a time."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="raylm-steps-"))
        self.address = f"ipc://{self._folder}/steps"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[_Done | _Failure] = msgspec.msgpack.Decoder(_Done | _Failure)

    def send(self, plan: StepPlan) -> None:
        self._socket.send(self._encoder.encode(plan))

    def receive(self, timeout_ms: int) -> StepResult | None:
        """The next result, or None after `timeout_ms`. Raises EngineDeadError with what the worker said."""
        if not self._socket.poll(timeout_ms):
            return None
        message = self._decoder.decode(self._socket.recv())
        if isinstance(message, _Failure):
            raise EngineDeadError(f"a worker failed in a step: {message.message}")
        return message.result

    def close(self) -> None:
        """Close the channel; the worker's loop ends with the empty message that goes first."""
        if not self._socket.closed:
            if self._socket.poll(0, zmq.POLLOUT):
                self._socket.send(b"", zmq.NOBLOCK)
            self._socket.close(linger=100)
            self._context.term()
            shutil.rmtree(self._folder, ignore_errors=True)


class PlanReceiver:
    """The worker's end."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepPlan)

    def receive(self) -> StepPlan | None:
        """Wait for the next plan; None when the engine has closed the channel."""
        message = self._socket.recv()
        return self._decoder.decode(message) if message else None

    def has_plan(self) -> bool:
        """Whether `receive` returns at once."""
        return bool(self._socket.poll(0))

    def send(self, result: StepResult) -> None:
        self._socket.send(self._encoder.encode(_Done(result)))

    def fail(self, error: Exception) -> None:
        """Tell the engine why no more results will come."""
        self._socket.send(self._encoder.encode(_Failure(f"{type(error).__name__}: {error}")))

    def close(self) -> None:
        self._socket.close(linger=1000)
        self._context.term()


def serve(channel: PlanReceiver, submit: Callable[[StepPlan], StepOnItsWay]) -> None:
    """Run plans until the engine closes the channel: each is submitted when it comes, while earlier ones compute, and
    results go back in order."""
    steps: deque[StepOnItsWay] = deque()
    while True:
        if steps and steps[0].done:
            channel.send(steps.popleft().result())
        elif not steps or channel.has_plan():
            plan = channel.receive()
            if plan is None:
                return
            steps.append(submit(plan))
        else:
            time.sleep(_NAP_S)
