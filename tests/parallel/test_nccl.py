"""Connecting is bounded: the other side may never come, or come late. tests/gpu/test_from_peer.py has real ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from raylm.errors import TransferError
from raylm.parallel import nccl
from raylm.parallel.nccl import Communicator

CUDA = torch.device("cuda", 0)


class Fake(Communicator):
    """Connects when it is told that the other side has come."""

    came: ClassVar[threading.Event]
    closed: ClassVar[threading.Event]
    error: ClassVar[Exception | None]
    greeted: ClassVar[bool]

    def __init__(self) -> None:
        """Has nothing of a real one."""

    @classmethod
    def _connected(cls, unique_id: bytes, rank: int, size: int, device: torch.device) -> Fake:
        if cls.error is not None:
            raise cls.error
        assert cls.came.wait(60)
        return cls()

    def _greet(self) -> None:
        type(self).greeted = True

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def fake() -> Iterator[type[Fake]]:
    Fake.came, Fake.closed, Fake.error, Fake.greeted = threading.Event(), threading.Event(), None, False
    yield Fake
    Fake.came.set()


def connect(fake: type[Fake], *, limit_s: float = 60.0, look=lambda: None) -> Communicator:
    return fake.connect(b"id", rank=0, size=2, device=CUDA, limit_s=limit_s, look=look)


def test_the_other_side_comes(fake: type[Fake]) -> None:
    fake.came.set()
    assert isinstance(connect(fake), Fake)
    assert fake.greeted
    assert not fake.closed.is_set()


def test_the_other_side_comes_too_late(fake: type[Fake]) -> None:
    with pytest.raises(TransferError, match="the other process had not connected over NCCL after 0.2 s"):
        connect(fake, limit_s=0.2)
    assert not fake.closed.is_set()
    fake.came.set()
    assert fake.closed.wait(60), "a communicator that nobody waits for is given back"
    assert not fake.greeted


def test_who_looks_may_end_the_wait(fake: type[Fake]) -> None:
    def look() -> None:
        raise TransferError("the peer is dead")

    with pytest.raises(TransferError, match="the peer is dead"):
        connect(fake, look=look)


def test_an_error_of_nccl_is_the_caller_s(fake: type[Fake]) -> None:
    fake.error = TransferError("NCCL failed: unhandled cuda error")
    with pytest.raises(TransferError, match="unhandled cuda error"):
        connect(fake)


def test_codes_that_cupy_has_no_text_for() -> None:
    for error in (KeyError(6), RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")):
        with pytest.raises(TransferError, match="NCCL failed: (6|NCCL_ERROR_SYSTEM_ERROR)"), nccl._translated():
            raise error


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl.missing(torch.device("cpu")) == "NCCL copies between GPUs, and this worker's device is cpu"
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    reason = nccl.missing(CUDA)
    assert reason is not None and "cupy" in reason and reason.endswith("pip install -e '.[cuda]'")
