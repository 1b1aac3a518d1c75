"""Directory: which models an endpoint has, which engines serve them, where, and how busy they are.

A small Ray actor, found by its endpoint's name. Replicas report their model and their engine once a second; an engine
that is not reported expires. A model stays known without engines, while its replicas start or are replaced, until Serve
has deleted its application. Ingresses hold a long poll on the Directory and keep their copy when it is away. It is made
by whoever asks first, and it ends by itself when nobody has spoken to it for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, TypeVar

import ray
import zmq

from raylm.config.sampling import SamplingDefaults
from raylm.core.block_hash import PrefixForm
from raylm.core.load import Load
from raylm.engine.link import KeyPair
from raylm.generation.served_model import EngineStats
from raylm.log import get_logger
from raylm.serving.identity.ledger import Claim, Ledger, Reply
from raylm.serving.metrics.kept import KeptCounts, Scrape
from raylm.text.chat_settings import ChatSettings

logger = get_logger(__name__)

REPORT_EVERY_S = 1.0
EXPIRE_AFTER_S = 10.0
_LONELY_AFTER_S = 60.0
_QUIET_S = 3.0
"""A model that no replica has reported for this long may be deleted; one that starts is reported too."""
_POLL_S = 1.0
_TOLD_POLL_S = 0.02
NAMESPACE = "raylm"
_HEAD = "node:__internal_head__"
"""A resource that Ray's head node has. The Directory lives there: elsewhere it would hold up a node that drains, and in
a replica's placement group it would end with the replica."""


class ModelLimits(NamedTuple):
    """Tokens that a request may have in all, and that the model knows."""

    max_model_len: int
    vocab_size: int


class StartFailure(NamedTuple):
    """Why a replica did not start, and when, in seconds since the epoch."""

    reason: str
    at: float


class ModelEntry(NamedTuple):
    """One model of the endpoint: what an ingress must have before the first engine is up."""

    name: str
    application: str
    """Serve's name for the application that the model's replicas are in."""
    path: str
    """model.path, with its revision, for the tokenizer."""
    sampling: SamplingDefaults
    since: float
    """When the replica that says so began, in seconds since the epoch: of two that differ, as in an upgrade, the
    younger one counts."""
    chat: ChatSettings = ChatSettings()
    limits: ModelLimits | None = None
    """None until an engine of it has been up."""
    may_sleep: bool = False
    """It may have no replica while nobody asks: a request wakes it."""
    failure: StartFailure | None = None
    """Of the last replica that did not start, until one has."""
    aliases: tuple[str, ...] = ()
    """Other names under which clients find it."""


class EngineEntry(NamedTuple):
    """One engine, and the model that it serves: in an upgrade a name has two. `address` and `public_key` are those of
    its request channel."""

    engine_id: str
    model: ModelEntry
    node_id: str
    address: str
    public_key: bytes
    state: Literal["ready", "draining"]
    load: Load
    prefixes: PrefixForm | None = None
    """How it names its cached blocks; None where it does not tell of them."""


class Snapshot(NamedTuple):
    """All models and engines at one version, and the keys with which clients connect to the engines. A Directory
    that is younger than EXPIRE_AFTER_S (`settled` is false) may not have heard of all of them yet."""

    version: int
    models: list[ModelEntry]
    entries: list[EngineEntry]
    client_keys: KeyPair
    settled: bool
    closing: str | None
    """Why the endpoint takes no more requests, where it is being shut down."""


class Directory:
    """The actor's class."""

    def __init__(self) -> None:
        self._keys = KeyPair(*zmq.curve_keypair())
        self._models: dict[str, ModelEntry] = {}
        self._heard: dict[str, float] = {}
        self._entries: dict[str, EngineEntry] = {}
        self._seen: dict[str, float] = {}
        self._counts = KeptCounts()
        # Versions start at the clock, so that a copy kept from an earlier life is never taken for the newest.
        self._version = time.time_ns()
        self._changed = asyncio.Event()
        self._closing: str | None = None
        self._ledger = Ledger()
        self._waiting = 0
        self._told = 0
        self._made = self._last_call = time.monotonic()
        self._expiry = asyncio.get_running_loop().create_task(self._expire())

    async def client_key(self) -> bytes:
        """The public key that clients will show: an engine lets it in before it reports itself."""
        return self._keys.public

    async def know(self, model: ModelEntry) -> None:
        """Add or renew a model whose engine is still starting."""
        self._last_call = self._heard[model.name] = time.monotonic()
        known = self._models.get(model.name)
        if known is not None and model.limits is None and known.path == model.path:
            # One that starts says neither.
            model = model._replace(limits=known.limits, failure=model.failure or known.failure)
        if known is None or known.since <= model.since:
            self._models[model.name] = model
            if known is None or known._replace(since=model.since) != model:
                self._publish()

    async def report(self, entry: EngineEntry, stats: EngineStats | None = None) -> None:
        """Add or renew an engine, and its model. `stats` are for /metrics."""
        if stats is not None:
            self._counts.measured(stats)
        await self.know(entry.model)
        self._seen[entry.engine_id] = time.monotonic()
        known = self._entries.get(entry.engine_id)
        self._entries[entry.engine_id] = entry
        if known is None or known.state != entry.state or known.address != entry.address:
            self._publish()

    async def remove(self, engine_id: str) -> None:
        """Forget an engine; no error when it is not known."""
        self._seen.pop(engine_id, None)
        self._counts.forget_engine(engine_id)
        if self._entries.pop(engine_id, None) is not None:
            self._publish()

    async def count(self, ingress: str, counts: bytes) -> None:
        """Take in what an ingress has counted."""
        self._counts.count(ingress, counts)

    async def scrape(self) -> Scrape:
        """What ingresses have counted and engines measured."""
        return self._counts.scrape()

    async def watch(self, version: int) -> Snapshot:
        """Models and engines, as soon as they differ from `version`, or after a while the same again with new loads."""
        self._last_call = time.monotonic()
        if version == self._version:
            self._told += self._closing is not None
            self._waiting += 1
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _POLL_S)
            finally:
                self._waiting -= 1
        settled = time.monotonic() - self._made > EXPIRE_AFTER_S
        models, entries = list(self._models.values()), list(self._entries.values())
        return Snapshot(self._version, models, entries, self._keys, settled, self._closing)

    async def share(self, ingress: str, claims: list[Claim], all_of_them: bool) -> Reply:
        """What an ingress has used of the tenants' limits, and what it may use."""
        return self._ledger.exchange(ingress, claims, all_of_them=all_of_them)

    async def close(self, reason: str, limit_s: float) -> None:
        """Have every ingress end its requests with `reason` and take no more. Returns when those that listen have done
        so, after `limit_s` seconds at most."""
        ingresses = self._waiting
        self._closing = reason
        self._publish()
        deadline = time.monotonic() + limit_s
        while self._told < ingresses and time.monotonic() < deadline:
            await asyncio.sleep(_TOLD_POLL_S)

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
            await self._forget_models()
        ray.actor.exit_actor()

    async def _forget_models(self) -> None:
        """Forget the models without replicas whose applications serve another model by now, or are deleted."""
        if not (quiet := self._quiet_models()):
            return
        serving = {model.application for model in self._models.values() if model not in quiet}
        left = await asyncio.to_thread(_applications)
        # What was reported meanwhile stays.
        for model in [model for model in quiet if model in self._quiet_models()]:
            if model.application in serving or (left is not None and model.application not in left):
                del self._models[model.name], self._heard[model.name]
                logger.info("model %s of application %s is no more", model.name, model.application)
                self._publish()

    def _quiet_models(self) -> list[ModelEntry]:
        served = {entry.model.name for entry in self._entries.values()}
        limit = time.monotonic() - _QUIET_S
        return [model for name, model in self._models.items() if name not in served and self._heard[name] < limit]


def _applications() -> set[str] | None:
    """The names of Serve's applications, without those that are being deleted; None where Serve does not say."""
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    try:
        applications = serve.status().applications
    except Exception as error:  # Serve's own and Ray's, whatever is away.
        logger.warning("Serve does not say which applications there are: %s", error)
        return None
    return {name for name, each in applications.items() if each.status != ApplicationStatus.DELETING}


Result = TypeVar("Result")


class DirectoryClient:
    """One endpoint's Directory, for an event loop: it is looked up in a thread, since Ray's look-up waits for as long
    as the cluster's head does not answer, and only where there is no handle or its actor has died."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._handle: Any = None

    async def ask(self, call: Callable[[Any], Awaitable[Result]]) -> Result:
        """The result of `call`, which gets the actor's handle. Raises RayError, also when the Directory has died; the
        next call then finds or makes another one."""
        if self._handle is None:
            self._handle = await asyncio.to_thread(find_directory, self._endpoint)
        try:
            return await call(self._handle)
        except ray.exceptions.RayActorError:
            self._handle = None
            raise


def close_endpoint(endpoint: str, reason: str, *, limit_s: float) -> None:
    """Have the ingresses of an endpoint end their requests with `reason`; nothing happens where it has no Directory."""
    try:
        directory = ray.get_actor(_actor_name(endpoint), namespace=NAMESPACE)
        ray.get(directory.close.remote(reason, limit_s), timeout=2 * limit_s)
    except (ray.exceptions.RayError, ValueError) as error:
        logger.warning("requests of endpoint %s are cut off without an error: %s", endpoint, error)


def _actor_name(endpoint: str) -> str:
    return f"directory:{endpoint}"


def find_directory(endpoint: str) -> Any:
    """A handle to the endpoint's Directory, made when there is none. Raises RayError when there is none to have."""
    name = _actor_name(endpoint)
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    place = {"num_cpus": 0, "resources": {_HEAD: 0.001}, "scheduling_strategy": "DEFAULT"}
    try:
        return ray.remote(Directory).options(max_concurrency=1000, **options, **place).remote()
    except ValueError:
        # Another process has made it between Ray's look and its own try.
        return ray.get_actor(name, namespace=NAMESPACE)
