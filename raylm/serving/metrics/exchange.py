"""One scrape of any ingress shows all ingresses and all engines: they say their counts to the Directory, off every
request's path."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import ray

from raylm.api.engine_metrics import engine_metrics
from raylm.api.exposition import Family, families_of, labelled, packed, render, unpacked, without_gauges
from raylm.api.metrics import HttpMetrics
from raylm.log import get_logger
from raylm.serving.directory import REPORT_EVERY_S, DirectoryClient
from raylm.serving.metrics.kept import LIVE_S, Scrape

logger = get_logger(__name__)

_ANSWER_S = 1.0
"""How long a scrape waits for the Directory."""


class Shows(Protocol):
    """Shows families somewhere else too, as Ray's metrics do."""

    def show(self, families: list[Family]) -> None: ...


class MetricsExchange:
    """An ingress's part. What is shown of an ingress, this one too, is what the Directory knows of it, so that a count
    never falls from one scrape to the next, whichever ingress answers it. Without the Directory the last copy is shown
    for a while, then this process's counts alone."""

    def __init__(
        self,
        metrics: HttpMetrics,
        directory: DirectoryClient,
        ingress: str,
        *,
        vllm_names: bool = False,
        elsewhere: Shows | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ingress` names this process among the endpoint's; `clock` gives seconds."""
        self.metrics = metrics
        self._directory = directory
        self._ingress = ingress
        self._vllm_names = vllm_names
        self._elsewhere = elsewhere
        self._clock = clock
        self._copy: Scrape | None = None
        self._copied = 0.0
        self._is_heard = True
        self._asking: asyncio.Task[None] | None = None
        self._saying: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Say the counts once a second from now on."""
        self._saying = asyncio.create_task(self._keep_saying())

    async def stop(self) -> None:
        if self._saying is not None:
            self._saying.cancel()

    async def render(self) -> bytes:
        """All that is known, in Prometheus' text."""
        if self._asking is None:
            # One at a time: where Ray's head is away, each would hold a thread.
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._asked)
        await asyncio.wait({self._asking}, timeout=_ANSWER_S)
        known = self._copy if self._clock() - self._copied <= LIVE_S else None
        # Here, since the counts belong to this event loop.
        is_known = known is not None and any(each.ingress == self._ingress for each in known.ingresses)
        own = [] if is_known else labelled(self.metrics.own(), {"ingress": self._ingress})
        engines = self.metrics.engines() if known is None else families_of(engine_metrics(known.engines))
        return await asyncio.to_thread(self._written, own, engines, known)

    async def say(self) -> None:
        """Tell the Directory, and whoever else shows them, what this process has counted."""
        families = self.metrics.own()
        if self._elsewhere is not None:
            self._elsewhere.show(families)
        counts = packed(families)
        try:
            await self._directory.ask(lambda directory: directory.count.remote(self._ingress, counts))
        except (ray.exceptions.RayError, ValueError) as error:
            if self._is_heard:
                logger.warning("the directory is away, /metrics shows less for now: %s", error)
            self._is_heard = False
        else:
            self._is_heard = True

    async def _keep_saying(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            try:
                await self.say()
            except Exception:
                logger.exception("this ingress's counts could not be told")

    async def _ask(self) -> None:
        # What this process counted just now is in what it shows.
        await self.say()
        self._copy = await self._directory.ask(lambda directory: directory.scrape.remote())
        self._copied = self._clock()

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("the directory does not say what others have counted: %s", error)

    def _written(self, own: list[Family], engines: list[Family], known: Scrape | None) -> bytes:
        families = [*own, *(family for each in self._others(known) for family in each), *engines]
        return render(families, vllm_names=self._vllm_names)

    def _others(self, known: Scrape | None) -> Iterator[list[Family]]:
        for each in known.ingresses if known is not None else []:
            families = unpacked(each.counts)
            yield labelled(families if each.is_live else without_gauges(families), {"ingress": each.ingress})
