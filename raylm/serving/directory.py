"""Directory: which engines serve which model, where, and how busy they are.

A small Ray actor, found by its name. Replicas report their engine once a second; an entry that is not renewed expires.
Ingresses hold a long poll on it and keep their copy when it is away. It is made by whoever asks first, and it ends by
itself when nobody has spoken to it for a while, so it outlives any replica and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Literal, NamedTuple

import ray
import zmq

from raylm.engine.link import KeyPair
from raylm.engine.messages import Load

REPORT_EVERY_S = 1.0
EXPIRE_AFTER_S = 10.0
_LONELY_AFTER_S = 60.0
_POLL_S = 1.0
NAMESPACE = "raylm"
_HEAD = "node:__internal_head__"
"""A resource that Ray's head node has. The Directory lives there: elsewhere it would hold up a node that drains, and in
a replica's placement group it would end with the replica."""


class EngineEntry(NamedTuple):
    """One engine. `address` and `public_key` are those of its request channel."""

    engine_id: str
    model: str
    node_id: str
    address: str
    public_key: bytes
    max_model_len: int
    vocab_size: int
    state: Literal["ready", "draining"]
    load: Load


class Snapshot(NamedTuple):
    """All engines at one version, and the keys with which clients connect to them."""

    version: int
    entries: list[EngineEntry]
    client_keys: KeyPair


class Directory:
    """The actor's class."""

    def __init__(self) -> None:
        self._keys = KeyPair(*zmq.curve_keypair())
        self._entries: dict[str, EngineEntry] = {}
        self._seen: dict[str, float] = {}
        # Versions start at the clock, so that a copy kept from an earlier life is never taken for the newest.
        self._version = time.time_ns()
        self._changed = asyncio.Event()
        self._last_call = time.monotonic()
        self._expiry = asyncio.get_running_loop().create_task(self._expire())

    async def client_key(self) -> bytes:
        """The public key that clients will show: an engine lets it in before it reports itself."""
        return self._keys.public

    async def report(self, entry: EngineEntry) -> None:
        """Add or renew an engine."""
        self._last_call = self._seen[entry.engine_id] = time.monotonic()
        known = self._entries.get(entry.engine_id)
        self._entries[entry.engine_id] = entry
        if known is None or known.state != entry.state or known.address != entry.address:
            self._publish()

    async def remove(self, engine_id: str) -> None:
        """Forget an engine; no error when it is not known."""
        self._seen.pop(engine_id, None)
        if self._entries.pop(engine_id, None) is not None:
            self._publish()

    async def watch(self, version: int) -> Snapshot:
        """The engines, as soon as they differ from `version`, or after a while the same again with new loads."""
        self._last_call = time.monotonic()
        if version == self._version:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_S)
        return Snapshot(self._version, list(self._entries.values()), self._keys)

    def _publish(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _expire(self) -> None:
        while time.monotonic() - self._last_call < _LONELY_AFTER_S:
            await asyncio.sleep(REPORT_EVERY_S)
            limit = time.monotonic() - EXPIRE_AFTER_S
            for engine_id in [engine_id for engine_id, seen in self._seen.items() if seen < limit]:
                await self.remove(engine_id)
        ray.actor.exit_actor()


def find_directory(name: str) -> Any:
    """A handle to the application's Directory, made when there is none. Raises RayError when there is none to have."""
    name = f"directory:{name}"
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    place = {"num_cpus": 0, "resources": {_HEAD: 0.001}, "scheduling_strategy": "DEFAULT"}
    try:
        return ray.remote(Directory).options(max_concurrency=1000, **options, **place).remote()
    except ValueError:
        # Another process has made it between Ray's look and its own try.
        return ray.get_actor(name, namespace=NAMESPACE)
