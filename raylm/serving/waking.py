"""Models that sleep, and what wakes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ray import serve

from raylm.log import get_logger

logger = get_logger(__name__)

_TELL_AGAIN_S = 60.0
"""For how long the log does not say once more that an application is woken."""


class Waker:
    """Asks Serve for a replica of a model that has none. One call is under way for an application, however many
    requests wait."""

    def __init__(self, call: Callable[[str], Awaitable[None]] | None = None) -> None:
        """`call` returns when a replica of the application is there."""
        self._call = call or call_replica
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._told: dict[str, float] = {}

    def wake(self, application: str) -> None:
        task = self._calls.get(application)
        if task is None or task.done():
            self._calls[application] = asyncio.get_running_loop().create_task(self._wake(application))

    async def _wake(self, application: str) -> None:
        # A replica that is there but takes no request (a model with another path) is asked for four times a second.
        now = asyncio.get_running_loop().time()
        if now - self._told.get(application, -_TELL_AGAIN_S) >= _TELL_AGAIN_S:
            self._told[application] = now
            logger.info("application %s is woken: a request waits for its model", application)
        try:
            await self._call(application)
        except Exception as error:  # Serve's own and Ray's: whoever waits asks again in a moment.
            logger.warning("application %s could not be woken: %s: %s", application, type(error).__name__, error)


async def call_replica(application: str) -> None:
    """A call that waits in its Serve handle until a replica takes it: Serve's autoscaler counts such calls, and nothing
    else of a deployment without replicas."""
    handle = serve.get_deployment_handle("ModelReplica", app_name=application)
    await handle.awake.remote()
