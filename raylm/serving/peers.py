"""Where a new replica's weights may come from: the workers of one that already serves the model."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import ray

from raylm.log import get_logger
from raylm.serving.directory import NAMESPACE, DirectoryClient, EngineEntry, Snapshot

logger = get_logger(__name__)


def engine_name(engine_id: str) -> str:
    """The name of an engine's actor, under which other replicas find it."""
    return f"engine:{engine_id}"


async def find_peers(directory: DirectoryClient, model: str, *, limit_s: float) -> list[Any]:
    """Handles of the workers, by rank, of the least busy engine that is ready to serve `model`.

    Empty where the directory knows none, or none has answered after `limit_s`; the log says which.
    """
    try:
        return await asyncio.wait_for(_find(directory, model), limit_s)
    except TimeoutError:
        logger.warning("load.from_peer: no replica of %s has answered within %g s", model, limit_s)
    except ray.exceptions.RayError as error:
        logger.warning("load.from_peer: the directory did not answer: %s", error)
    return []


async def _find(directory: DirectoryClient, model: str) -> list[Any]:
    snapshot: Snapshot = await directory.ask(lambda actor: actor.watch.remote(0))
    ready = [entry for entry in snapshot.entries if entry.model.name == model and entry.state == "ready"]
    for entry in sorted(ready, key=_busy):
        try:
            # In a thread: Ray waits here while the cluster's head does not answer.
            engine = await asyncio.to_thread(ray.get_actor, engine_name(entry.engine_id), namespace=NAMESPACE)
            workers: list[Any] = await engine.workers.remote()
            return workers
        except (ray.exceptions.RayError, ValueError) as error:
            logger.warning("load.from_peer: engine %s has just ended: %s", entry.engine_id, error)
    logger.info("load.from_peer: no other replica serves %s", model)
    return []


def _busy(entry: EngineEntry) -> tuple[int, float]:
    # Those that are equally busy share the work of replicas that start together.
    return entry.load.waiting + entry.load.running, random.random()
