"""What every process of an endpoint does now, from Ray's actors: each answers in a thread or loop of its own, so one
whose work hangs tells where."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Sequence
from typing import Any

import ray

from raylm.serving.directory import NAMESPACE, EngineEntry
from raylm.serving.peers import engine_name
from raylm.stacks import ProcessStacks, stacks_here

LIMIT_S = 5.0
"""What a process gets to answer."""
_SERVE = "serve"
_REPLICA = "SERVE_REPLICA::"
_INGRESS = "#OpenAIIngress#"


async def find_stacks(entries: Sequence[EngineEntry], *, limit_s: float = LIMIT_S) -> list[ProcessStacks]:
    """Of all ingresses, and of the replicas, engines and workers behind `entries`. Who does not answer in time is in
    it too, with that as the error."""
    applications = {entry.model.application for entry in entries}
    try:
        actors = await asyncio.wait_for(asyncio.to_thread(_replicas, applications), limit_s)
    except (ray.exceptions.RayError, RuntimeError, TimeoutError) as error:
        actors = []
        missing = [_silent("Serve's replicas", f"Ray does not say which there are: {error}")]
    else:
        missing = []
    asked: list[Awaitable[list[ProcessStacks]]] = [_of_replica(name, limit_s) for name in actors]
    asked += [_of_engine(entry, limit_s) for entry in entries]
    return missing + [each for found in await asyncio.gather(*asked) for each in found]


def dump(actor: object, process: str) -> ProcessStacks:
    """Called in an actor."""
    return stacks_here(process)


def _replicas(applications: Collection[str]) -> list[str]:
    """Names of the actors of Serve's replicas: of ingresses, and of models' in these applications."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in named if each["namespace"] == _SERVE and each["name"].startswith(_REPLICA)]
    mine = tuple(f"{_REPLICA}{application}#" for application in applications)
    return sorted(name for name in names if _INGRESS in name or name.startswith(mine or (" ",)))


async def _of_replica(name: str, limit_s: float) -> list[ProcessStacks]:
    process = name.removeprefix(_REPLICA)

    async def ask() -> list[ProcessStacks]:
        actor = await asyncio.to_thread(ray.get_actor, name, namespace=_SERVE)
        found: ProcessStacks = await actor.__ray_call__.remote(dump, process)
        return [found]

    return await _answered(process, ask(), limit_s)


async def _of_engine(entry: EngineEntry, limit_s: float) -> list[ProcessStacks]:
    process = f"engine {entry.engine_id} of {entry.model.name}"

    async def ask() -> list[ProcessStacks]:
        # In a thread: Ray waits here while the cluster's head does not answer.
        actor: Any = await asyncio.to_thread(ray.get_actor, engine_name(entry.engine_id), namespace=NAMESPACE)
        found: list[ProcessStacks] = await actor.stacks.remote(process, limit_s)
        return found

    # The engine waits that long for its workers.
    return await _answered(process, ask(), 2 * limit_s)


async def _answered(process: str, asking: Awaitable[list[ProcessStacks]], limit_s: float) -> list[ProcessStacks]:
    try:
        return await asyncio.wait_for(asking, limit_s)
    except TimeoutError:
        return [_silent(process, f"it has not answered within {limit_s:g} s: it is stopped, or its node is away")]
    except (ray.exceptions.RayError, ValueError) as error:
        return [_silent(process, f"it has gone: {error}")]


def _silent(process: str, error: str) -> ProcessStacks:
    return ProcessStacks(process, "", 0, "", error)
