"""KV events in vLLM's form over ZeroMQ, with replay, for routers that are not raylm's."""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import zmq

from raylm.config.kv_events import KVEventsConfig
from raylm.core.events import BlockEvent, EventBatch, StoredTokens
from raylm.errors import ConfigError
from raylm.log import get_logger

logger = get_logger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_UNREAD = 100_000
"""Messages that libzmq keeps for a subscriber that does not read."""
_LOOK_S = 0.05
"""How often it is looked whether somebody asks for a replay."""
_LAST_WORDS_S = 1.0
_HASH_MASK = 2**64 - 1


class _Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """In vLLM's order of fields, which is part of the form."""


class BlockStored(_Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class _Step(NamedTuple):
    number: int
    at: float
    events: list[BlockEvent]
    tokens: list[StoredTokens]


class KVPublisher:
    """Publishes what steps do to the cached blocks, from a thread of its own: the engine's only appends to a queue.

    Messages are numbered without a gap. One that could not be queued leaves its number out, so that subscribers see
    that they miss something.
    """

    def __init__(self, config: KVEventsConfig, *, medium: str, block_size: int, num_groups: int) -> None:
        """`medium`: where the blocks are: "GPU" or "CPU". Raises ConfigError where an endpoint cannot be had."""
        self._config = config
        self._medium = medium
        self._block_size = block_size
        self._num_groups = num_groups
        self._next = 0
        self._is_closing = False
        self._queue: queue.Queue[_Step] = queue.Queue(config.max_queued)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publish_at, self._replay_at = self._sockets()
        self.addresses = (_address(self._publish_at), "" if self._replay_at is None else _address(self._replay_at))
        """Where it publishes and where it replays, with the ports that the system chose; "" without a replay."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._thread = threading.Thread(target=self._run, name="raylm-kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: EventBatch | None, tokens: list[StoredTokens]) -> None:
        """Queue what a step did; `tokens` are those of its stored blocks, in order. None: nothing happened."""
        if batch is None:
            return
        number, self._next = self._next, self._next + 1
        try:
            self._queue.put_nowait(_Step(number, time.time(), batch.events, tokens))
        except queue.Full:
            logger.warning("KV events %d are not published: %d batches wait", number, self._config.max_queued)

    def close(self) -> None:
        """Publish what is queued, for a second at most, and stop."""
        self._is_closing = True
        self._thread.join(_LAST_WORDS_S)

    def _sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes] | None]:
        config = self._config
        publish_at = self._context.socket(zmq.PUB)
        publish_at.setsockopt(zmq.SNDHWM, _UNREAD)
        replay_at = None
        endpoint = config.endpoint or ""
        try:
            if "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://"):
                publish_at.bind(endpoint)
            else:
                publish_at.connect(endpoint)
            if config.replay_endpoint is not None:
                endpoint = config.replay_endpoint
                replay_at = self._context.socket(zmq.ROUTER)
                replay_at.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"kv_events: {endpoint} cannot be used: {error}") from error
        return publish_at, replay_at

    def _run(self) -> None:
        """The sockets are this thread's alone, to their end."""
        try:
            self._serve()
        finally:
            self._context.destroy(linger=round(1000 * _LAST_WORDS_S))

    def _serve(self) -> None:
        topic = self._config.topic.encode()
        while not (self._is_closing and self._queue.empty()):
            if self._replay_at is not None and self._replay_at.poll(0):
                self._replay(self._replay_at)
            try:
                step = self._queue.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            number, payload = step.number.to_bytes(8, "big"), self._written(step)
            self._publish_at.send_multipart((topic, number, payload))
            self._sent.append((number, payload))

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answer one request, a number: what is kept from that one on, then an end."""
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning(
                "a request for a replay of KV events has %d parts, not an empty one and a number", len(frames)
            )
            return
        client, _, first = frames
        for number, payload in self._sent:
            if number >= first:
                socket.send_multipart((client, b"", number, payload))
        socket.send_multipart((client, b"", _END, b""))

    def _written(self, step: _Step) -> bytes:
        tokens = iter(step.tokens)
        events = [self._event(event, tokens_of=tokens) for event in step.events]
        batch = KVEventBatch(step.at, events, 0)
        if self._config.form == "array":
            return self._encode(batch)
        return self._encode({"ts": batch.ts, "events": [_as_map(event) for event in events], "data_parallel_rank": 0})

    def _event(
        self, event: BlockEvent, *, tokens_of: Iterator[StoredTokens]
    ) -> BlockStored | BlockRemoved | AllBlocksCleared:
        group = event.group if self._num_groups > 1 else None
        if event.kind == "cleared":
            return AllBlocksCleared()
        if event.kind == "removed":
            return BlockRemoved([_number(event.block_hash)], self._medium, group)
        stored = next(tokens_of)
        parent = None if stored.is_first else _number(event.parent_hash)
        token_ids = array("I", stored.data).tolist()
        return BlockStored(
            [_number(event.block_hash)], parent, token_ids, self._block_size, None, self._medium, None, group_idx=group
        )


def _number(block_hash: bytes) -> int:
    """A hash as vLLM tells it: its last eight bytes."""
    return int.from_bytes(block_hash, "big") & _HASH_MASK


def _as_map(event: BlockStored | BlockRemoved | AllBlocksCleared) -> dict[str, object]:
    fields: dict[str, object] = {"type": type(event).__name__}
    for field in msgspec.structs.fields(event):
        value = getattr(event, field.name)
        if field.required or value != field.default:
            fields[field.name] = value
    return fields


def _address(socket: zmq.Socket[bytes]) -> str:
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
