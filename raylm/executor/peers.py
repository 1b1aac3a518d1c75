"""The workers of another engine, as a new engine's workers see them: a Peer of raylm.models.from_peer, over Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray

from raylm.errors import TransferError

if TYPE_CHECKING:
    from raylm.models.from_peer import Manifest

WEIGHTS = "weights"
"""The concurrency group, of one thread, in which a worker lends its weights while it serves steps in another."""


class PeerWorker:
    """A Peer behind the handle of a WorkerActor. To be used in a WorkerActor."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._sent: ray.ObjectRef[None] | None = None

    def manifest(self, limit_s: float) -> Manifest:
        found: Manifest = _get(ask(self._worker.manifest), limit_s)
        return found

    def start_sending(self, unique_id: bytes, limit_s: float) -> None:
        this_worker = ray.get_runtime_context().current_actor
        self._sent = ask(self._worker.send_weights, unique_id, limit_s, this_worker)

    def check(self) -> None:
        if self._sent is not None:
            watch(self._sent)()

    def wait_sent(self, limit_s: float) -> None:
        if self._sent is not None:
            _get(self._sent, limit_s)


def ask(method: Any, *args: object) -> ray.ObjectRef[Any]:
    """Call an actor's method in the thread for weights."""
    return method.options(concurrency_group=WEIGHTS).remote(*args)


def watch(ref: ray.ObjectRef[None]) -> Callable[[], None]:
    """A function that raises TransferError once the call behind `ref` has failed, or its actor has died."""

    def look() -> None:
        if ray.wait([ref], timeout=0)[0]:
            _get(ref, 0)

    return look


def _get(ref: ray.ObjectRef[Any], limit_s: float) -> Any:
    try:
        return ray.get(ref, timeout=limit_s)
    except ray.exceptions.GetTimeoutError:
        raise TransferError(f"the peer has not answered within {limit_s:.1f} s") from None
    except ray.exceptions.RayTaskError as error:
        raise TransferError(f"the peer says: {error.cause}") from None
    except ray.exceptions.RayError as error:
        raise TransferError(f"the peer is dead: {error}") from None
