"""Requests in, tokens out: a real engine server and real clients over real sockets, on a fake worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import zmq
from fakes import FakeExecutor, expected_tokens

from raylm.config.engine import EngineConfig, ModelConfig, SchedulerConfig
from raylm.core.sampling import SamplingParams
from raylm.engine.client import EngineClient, KeyPair
from raylm.engine.engine import Engine
from raylm.engine.server import EngineServer
from raylm.errors import EngineDeadError, Overloaded, RequestRejected


class Served:
    """An engine server in a thread."""

    def __init__(self, executor: FakeExecutor, *, queue: int = 1024) -> None:
        config = EngineConfig(model=ModelConfig(path="fake"), scheduler=SchedulerConfig(max_queued_requests=queue))
        config = config.model_copy(
            update={"cache": config.cache.model_copy(update={"block_size": executor.block_size})}
        )
        self.executor = executor
        self.engine = Engine(config, executor, plans_in_flight=2)
        self.server = EngineServer(self.engine, host="127.0.0.1")
        self.keys = KeyPair(*zmq.curve_keypair())
        self.server.clients.allow(self.keys.public)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except Exception as error:
            self.error = error

    def client(self, keys: KeyPair | None = None) -> EngineClient:
        return EngineClient(self.server.address, server_key=self.server.public_key, keys=keys or self.keys)

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()


class PacedExecutor(FakeExecutor):
    """Waits for a permit before each step, so that a test decides how far the engine goes."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.permits = threading.Semaphore(0)

    def result(self):
        self.permits.acquire()
        return super().result()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(FakeExecutor(max_model_len=200, num_blocks=400))
    yield served
    served.stop()


async def collect(client: EngineClient, request_id: str, prompt: list[int], params: SamplingParams):
    tokens: list[int] = []
    reason = None
    async for delta in client.generate(request_id, prompt, params):
        tokens += delta.token_ids
        reason = delta.finish_reason
    return tokens, reason


async def until(condition) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true")


async def test_many_clients_get_their_own_tokens(served):
    clients = [served.client() for _ in range(3)]
    params = SamplingParams(temperature=0, max_tokens=40)
    jobs = {(c, i): [c + 1, i + 1] for c in range(3) for i in range(10)}
    results = await asyncio.gather(
        *(collect(clients[c], f"{c}-{i}", prompt, params) for (c, i), prompt in jobs.items())
    )
    for prompt, result in zip(jobs.values(), results, strict=True):
        assert result == expected_tokens(prompt, params, 200)
    assert served.server.num_live == 0
    for client in clients:
        await client.close()


async def test_closing_a_stream_frees_its_blocks_within_a_step():
    executor = PacedExecutor(max_model_len=200, num_blocks=400)
    served = Served(executor)
    client = served.client()
    stream = client.generate("a", [1, 2, 3], SamplingParams(temperature=0, ignore_eos=True))
    executor.permits.release(2)
    await anext(stream)
    assert served.engine.stats().running == 1
    await stream.aclose()
    await asyncio.sleep(0.1)
    steps = executor.num_steps
    executor.permits.release(1)
    await until(lambda: served.engine.stats().running == 0)
    assert executor.num_steps <= steps + 1
    assert served.engine.stats().kv_usage == 0
    executor.permits.release(100)
    await client.close()
    served.stop()


async def test_a_client_that_vanishes_loses_its_requests():
    executor = PacedExecutor(max_model_len=10_000, num_blocks=4000)
    served = Served(executor)
    client = served.client()
    stream = client.generate("a", [1], SamplingParams(temperature=0, ignore_eos=True))
    executor.permits.release(3)
    await anext(stream)
    await client.close()
    executor.permits.release(1000)
    await until(lambda: served.engine.stats().running == 0)
    assert served.server.num_live == 0
    with pytest.raises(EngineDeadError, match="closed"):
        await anext(stream)
    served.stop()


async def test_a_reader_that_is_behind_gets_merged_deltas():
    executor = PacedExecutor(max_model_len=200, num_blocks=400)
    served = Served(executor)
    client = served.client()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    stream = client.generate("a", [5], params)
    executor.permits.release(1)
    first = await anext(stream)
    assert len(first.token_ids) == 1, "the first token is never held back"
    executor.permits.release(100)
    await until(lambda: served.server.num_live == 0)
    await asyncio.sleep(0.1)
    rest = await anext(stream)
    assert first.token_ids + rest.token_ids == expected_tokens([5], params, 200)[0]
    assert rest.finish_reason == "length"
    await client.close()
    served.stop()


async def test_refusals_name_their_reason(served):
    client = served.client()
    with pytest.raises(RequestRejected, match="250 tokens.*takes 200") as caught:
        await collect(client, "a", [1] * 250, SamplingParams())
    assert caught.value.code == "context_length_exceeded"
    assert (await collect(client, "a", [1], SamplingParams(max_tokens=2)))[1] is not None
    await client.close()


async def test_a_full_queue_refuses_with_a_time():
    executor = PacedExecutor(max_model_len=200, num_blocks=400)
    served = Served(executor, queue=1)
    client = served.client()
    streams = [asyncio.create_task(collect(client, str(i), [1], SamplingParams(max_tokens=1))) for i in range(5)]
    await asyncio.sleep(0.2)
    executor.permits.release(100)
    results = await asyncio.gather(*streams, return_exceptions=True)
    refused = [result for result in results if isinstance(result, Overloaded)]
    assert refused and all(error.retry_after > 0 for error in refused)
    assert len(refused) < 5
    await client.close()
    served.stop()


async def test_a_stranger_cannot_connect(served):
    stranger = served.client(KeyPair(*zmq.curve_keypair()))
    friend = served.client()
    assert (await collect(friend, "a", [1], SamplingParams(max_tokens=1)))[1] is not None
    with pytest.raises((Overloaded, TimeoutError)):
        await asyncio.wait_for(collect(stranger, "b", [1], SamplingParams(max_tokens=1)), 1)
    assert not stranger.is_connected
    assert served.server.num_live == 0
    await stranger.close()
    await friend.close()


async def test_a_client_that_comes_before_its_key_is_let_in_later(served):
    keys = KeyPair(*zmq.curve_keypair())
    early = served.client(keys)
    await asyncio.sleep(0.3)
    assert not early.is_connected
    served.server.clients.allow(keys.public)
    await until(lambda: early.is_connected)
    assert (await collect(early, "a", [1], SamplingParams(max_tokens=1)))[1] is not None
    await early.close()


async def test_a_dead_engine_fails_every_request_with_its_reason():
    executor = FakeExecutor(max_model_len=200, num_blocks=400)
    executor.fail_at = 5
    served = Served(executor)
    client = served.client()
    params = SamplingParams(temperature=0, ignore_eos=True)
    results = await asyncio.gather(
        *(collect(client, str(i), [i + 1], params) for i in range(4)), return_exceptions=True
    )
    assert all(isinstance(result, EngineDeadError) for result in results), results
    assert "told to fail" in str(results[0])
    await until(lambda: not client.is_connected)
    served.thread.join(10)
    assert isinstance(served.error, RuntimeError)
    await client.close()


async def test_garbage_does_not_stop_the_engine(served):
    client = served.client()
    await client._socket.send(b"\xff\x00garbage")
    await client._socket.send(b"")
    assert (await collect(client, "a", [1], SamplingParams(max_tokens=2)))[1] is not None
    await client.close()
