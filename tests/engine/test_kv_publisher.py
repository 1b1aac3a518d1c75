"""KV events in vLLM's form, read by a subscriber that knows nothing of raylm: as vLLM's own example reads them."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest
import zmq
from pydantic import ValidationError

from raylm.config.engine import EngineConfig
from raylm.config.kv_events import KVEventsConfig
from raylm.core.block_hash import HASHES
from raylm.core.events import BlockEvent, EventBatch, EventLog
from raylm.core.kv_cache import KVCacheManager
from raylm.core.options import RequestOptions
from raylm.core.request import Request
from raylm.core.sampling import SamplingParams
from raylm.core.step import CacheLayout
from raylm.engine.kv_publisher import KVPublisher
from raylm.errors import ConfigError

BLOCK = 4


class EventBatchOf(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatchOf):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def replay_of(dealer: zmq.Socket[bytes], first: int) -> list[tuple[int, bytes]]:
    """The messages from number `first` on that have been published."""
    dealer.send_multipart((b"", first.to_bytes(8, "big")))
    found: list[tuple[int, bytes]] = []
    while True:
        assert dealer.poll(60_000)
        empty, number, payload = dealer.recv_multipart()
        assert empty == b""
        if not payload:
            assert number == b"\xff" * 8
            return found
        found.append((int.from_bytes(number, "big"), payload))


def wait_until_published(address: str, number: int) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(address)
        deadline = time.monotonic() + 60
        while not replay_of(dealer, number):
            assert time.monotonic() < deadline


class Subscriber:
    """A REQ socket, as vLLM's example has, would read but the first message of a replay; a DEALER reads all. It asks
    for what it missed where a number is left out, and keeps the tokens of every block that is there."""

    def __init__(self, addresses: tuple[str, str], topic: str) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.sub.connect(addresses[0])
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(addresses[1])
        self.last = -1
        self.replayed: list[int] = []
        self.prompts: dict[int, list[int]] = {}
        self.media: set[str | None] = set()

    def read(self) -> None:
        """One message, and before it what was missed."""
        assert self.sub.poll(60_000), "nothing came"
        topic, number, payload = self.sub.recv_multipart()
        assert topic == b"kv@pod@model"
        sequence = int.from_bytes(number, "big")
        if sequence > self.last + 1:
            self.catch_up(sequence)
        self.take(sequence, payload)

    def catch_up(self, until: int) -> None:
        for sequence, payload in replay_of(self.replay, self.last + 1):
            if self.last < sequence < until:
                self.replayed.append(sequence)
                self.take(sequence, payload)

    def take(self, sequence: int, payload: bytes) -> None:
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert abs(batch.ts - time.time()) < 60 and batch.data_parallel_rank == 0
        for event in batch.events:
            if isinstance(event, BlockStored):
                before = [] if event.parent_block_hash is None else self.prompts[event.parent_block_hash]
                assert event.block_size == len(event.token_ids) == BLOCK and event.lora_id is None
                self.prompts[event.block_hashes[0]] = [*before, *event.token_ids]
                self.media.add(event.medium)
            elif isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    del self.prompts[each]
            else:
                self.prompts.clear()
        self.last = sequence

    def close(self) -> None:
        self.context.destroy(linger=0)


class Cache:
    def __init__(self) -> None:
        self.log = EventLog(with_tokens=True)
        self.cache = KVCacheManager(
            CacheLayout(BLOCK, [0]), num_blocks=6, hash_of=HASHES["xxhash"], model="m", events=self.log
        )

    def serve(self, prompt: list[int]) -> None:
        request = Request(
            "r", prompt, SamplingParams(), seed=0, stop_ids=frozenset(), max_len=99, options=RequestOptions()
        )
        request.block_ids = [[]]
        self.cache.attach_prefix(request)
        assert self.cache.allocate(request, len(prompt) - request.num_computed) is not None
        request.num_computed = len(prompt)
        self.cache.store_full(request)
        self.cache.free(request)


def publisher_of(**fields: Any) -> KVPublisher:
    config = KVEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", **fields)
    return KVPublisher(config, medium="CPU", block_size=BLOCK, num_groups=1)


def test_a_subscriber_of_vllm_sees_the_cache_and_gets_what_it_missed() -> None:
    publisher, cache = publisher_of(topic="kv@pod@model"), Cache()
    prompts = [list(range(9)), [*range(4), 50, 51, 52, 53], [90, 91, 92, 93, 94, 95, 96, 97]]
    subscriber = None
    try:
        # The first step is over before anybody listens, and so are some without events until it does.
        cache.serve(prompts[0])
        publisher.publish(cache.log.take(), cache.log.take_tokens())
        wait_until_published(publisher.addresses[1], 0)
        subscriber = Subscriber(publisher.addresses, "kv@")
        while not subscriber.sub.poll(50):
            publisher.publish(EventBatch(0, []), [])
        subscriber.read()
        missed = list(range(subscriber.last))
        assert subscriber.replayed == missed and missed[0] == 0
        for prompt in prompts[1:]:
            cache.serve(prompt)
            publisher.publish(cache.log.take(), cache.log.take_tokens())
        while subscriber.last < publisher._next - 1:
            subscriber.read()
        assert subscriber.replayed == missed and subscriber.media == {"CPU"}
        there = {tuple(prompt) for prompt in subscriber.prompts.values()}
        assert {tuple(prompts[2]), tuple(prompts[2][:4]), (0, 1, 2, 3)} <= there
        assert len(there) == len(cache.log.snapshot().stored) == 5
        cache.cache.forget_prefixes()
        publisher.publish(cache.log.take(), cache.log.take_tokens())
        subscriber.read()
        assert subscriber.prompts == {} and subscriber.replayed == missed
    finally:
        publisher.close()
        if subscriber is not None:
            subscriber.close()


def sent(publisher: KVPublisher) -> list[tuple[int, bytes]]:
    """What was published in all, with its numbers."""
    publisher.close()
    publisher._thread.join(60)
    assert not publisher._thread.is_alive()
    return [(int.from_bytes(number, "big"), payload) for number, payload in publisher._sent]


def test_what_cannot_be_queued_leaves_its_number_out_and_delays_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, gate = publisher_of(max_queued=1), threading.Event()
    written = publisher._written
    monkeypatch.setattr(publisher, "_written", lambda step: (gate.wait(60), written(step))[1])
    cleared = EventBatch(0, [BlockEvent("cleared", b"", b"", 0, 0)])
    # The publisher's thread does not get on meanwhile: whoever waited for it would wait for ever.
    for _ in range(3000):
        publisher.publish(cleared, [])
    assert publisher._next == 3000
    gate.set()
    numbers = [number for number, _ in sent(publisher)]
    assert numbers[0] == 0 and len(numbers) <= 2, "one in the thread's hands, one in the queue"
    assert numbers == sorted(numbers)


def test_events_as_maps() -> None:
    publisher, cache = publisher_of(form="map"), Cache()
    cache.serve(list(range(5)))
    publisher.publish(cache.log.take(), cache.log.take_tokens())
    [(_, payload)] = sent(publisher)
    [event] = msgspec.msgpack.decode(payload)["events"]
    assert event.pop("block_hashes")[0] > 0
    assert event == {
        "type": "BlockStored",
        "parent_block_hash": None,
        "token_ids": [0, 1, 2, 3],
        "block_size": 4,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
    }


def test_what_cannot_be_published_is_said_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"kv_events: tcp://\*:port cannot be used"):
        KVPublisher(KVEventsConfig(endpoint="tcp://*:port"), medium="CPU", block_size=4, num_groups=1)
    with pytest.raises(ValidationError, match=r"kv_events.endpoint wants cache.events"):
        EngineConfig.model_validate(
            {"model": {"path": "x"}, "cache": {"events": False}, "kv_events": {"endpoint": "tcp://*:5557"}}
        )
