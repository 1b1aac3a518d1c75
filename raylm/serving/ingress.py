"""OpenAIIngress: the HTTP face as a Serve deployment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from ray import serve

from raylm import log
from raylm.api.metrics import HttpMetrics
from raylm.config.application import IngressConfig
from raylm.config.serving import HttpConfig
from raylm.grammar.compiler import GrammarCompiler, GrammarLimits
from raylm.model_files.source import locate
from raylm.serving.autoscaling import IngressDemand
from raylm.serving.catalog import LiveCatalog
from raylm.serving.directory import DirectoryClient, ModelEntry
from raylm.serving.identity.ledger import Claim, Reply
from raylm.serving.identity.shares import Exchange, Shares
from raylm.serving.metrics.exchange import MetricsExchange
from raylm.serving.metrics.ray_metrics import RayMetrics
from raylm.serving.metrics.route_counts import RouterCounts
from raylm.serving.observing.observers import observers
from raylm.serving.observing.throughput import Throughput
from raylm.serving.observing.watch import RequestWatch
from raylm.serving.replica_state import is_stopping
from raylm.text.processor import TextProcessor

_CATCH_UP_S = 30.0
_LOOK_EVERY_S = 1.0
_UNCHECKED_S = 3.0
"""Serve checks a replica once a second, until it asks it to stop."""


class OpenAIIngress:
    """Text, routing and HTTP. It finds engines through its endpoint's Directory and talks to them over their own
    channel, never through Serve handles."""

    async def __init__(self, config: IngressConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        log.configure(form=config.log.format)
        self._config = config
        directory = DirectoryClient(config.endpoint)
        self._catalog = LiveCatalog(directory, _load_text, partial(load_grammars, config.http), config.routing)
        self._replica = serve.get_replica_context().replica_id
        self._exchange = MetricsExchange(
            HttpMetrics(self._catalog),
            directory,
            self._replica.unique_id,
            vllm_names=config.metrics.vllm_names,
            elsewhere=RayMetrics(),
        )
        self._exchange.metrics.also(RouterCounts(self._catalog.routers))
        self._exchange.start()
        await self._catalog.caught_up(_CATCH_UP_S)
        self._checked = time.monotonic()
        self._asked_at, self._worked = time.monotonic(), time.thread_time()
        self._drain = asyncio.get_running_loop().create_task(self._watch_for_drain())
        if config.log.throughput_every_s:
            lines = Throughput(self._catalog.stats).run(config.log.throughput_every_s)
            self._throughput = asyncio.get_running_loop().create_task(lines)

    async def check_health(self) -> None:
        """An ingress is healthy without engines (it answers 503 until they are there), not without its catalog."""
        self._checked = time.monotonic()
        self._catalog.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What IngressPolicy scales by: open sequences, and how busy the event loop was since the last call."""
        now, worked = time.monotonic(), time.thread_time()
        busy = (worked - self._worked) / max(now - self._asked_at, 1e-3)
        self._asked_at, self._worked = now, worked
        return IngressDemand(self._catalog.num_open, busy).stats()

    def __serve_build_asgi_app__(self) -> Any:
        from raylm.serving.http import build_http_app

        config = self._config
        shares = Shares(directory_exchange(config.endpoint))
        app = build_http_app(self._catalog, config.http, config.responses, config.mcp, shares, self._exchange)
        watching = observers(config.log, config.tracing)
        return RequestWatch(app, watching) if watching else app

    async def _watch_for_drain(self) -> None:
        """End the requests that outlive the drain with an error. Serve tells a replica nothing of its drain: it only
        stops to check its health, which a controller that is away does too."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            unchecked = time.monotonic() - self._checked
            if unchecked > _UNCHECKED_S and await asyncio.to_thread(is_stopping, self._replica):
                break
        limit = self._config.drain_timeout_s
        await asyncio.sleep(max(0.0, limit - unchecked))
        self._catalog.close(f"the ingress is being stopped, and its drain of {limit:g} s is over")


def directory_exchange(endpoint: str) -> Exchange:
    """The ledger of all ingresses, which the endpoint's Directory keeps."""
    directory, own_name = DirectoryClient(endpoint), uuid4().hex

    async def exchange(claims: Sequence[Claim], all_of_them: bool) -> Reply:
        return await directory.ask(lambda actor: actor.share.remote(own_name, list(claims), all_of_them))

    return exchange


def load_grammars(http: HttpConfig, path: str) -> GrammarCompiler:
    """The compiler of a model's structured output, with the limits of the HTTP face."""
    limits = GrammarLimits(
        seconds=http.structure_timeout_s,
        memory_bytes=int(http.structure_memory_gib * 2**30),
        schema_bytes=http.max_structure_bytes,
        processes=http.structure_processes,
    )
    compiler = GrammarCompiler(locate(path), limits=limits)
    if http.structures_ahead:
        compiler.warm()
    return compiler


def _load_text(model: ModelEntry) -> TextProcessor:
    return TextProcessor.load(locate(model.path), model.chat)
