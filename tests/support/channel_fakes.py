"""An engine server in a thread, on a fake worker, and what tests ask of its clients."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import zmq

from raylm.config.engine import CacheConfig, EngineConfig, ModelConfig, RuntimeConfig, SchedulerConfig
from raylm.config.resolve import resolve
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.step import Sampled, StepPlan, TokenDelta, join_logprobs
from raylm.engine.client import EngineClient
from raylm.engine.engine import Engine
from raylm.engine.link import KeyPair
from raylm.engine.messages import ToEngine
from raylm.engine.server import EngineServer
from tests.support.fakes import FakeExecutor

OPTIONS = RequestOptions()


class Served:
    """An engine server in a thread."""

    def __init__(
        self,
        executor: FakeExecutor,
        *,
        queue: int = 1024,
        events: bool = False,
        profile_folder: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(path="fake"),
            cache=CacheConfig(block_size=executor.block_size, events=events),
            scheduler=SchedulerConfig(max_queued_requests=queue),
            runtime=RuntimeConfig(profile_folder=profile_folder),
        )
        self.executor = executor
        self.engine = Engine(resolve(config, "cpu"), executor, plans_in_flight=2, clock=clock)
        self.server = EngineServer(self.engine, host="127.0.0.1")
        self.keys = KeyPair(*zmq.curve_keypair())
        self.server.clients.allow(self.keys.public)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except Exception as error:
            self.error = error

    def client(self, keys: KeyPair | None = None) -> EngineClient:
        return EngineClient(self.server.address, server_key=self.server.public_key, keys=keys or self.keys)

    def hold_until(self, count: int) -> None:
        """The server reads nothing more before so many messages are there, and then all of them: how many requests
        come between two steps is a matter of chance otherwise."""
        kept: list[tuple[bytes, ToEngine]] = []
        unread = self.server._unread

        def together() -> Iterator[tuple[bytes, ToEngine]]:
            kept.extend(unread())
            if len(kept) >= count:
                self.server._unread = unread
                yield from kept

        self.server._unread = together

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


class PacedExecutor(FakeExecutor):
    """Waits for a permit before each step, so that a test decides how far the engine goes."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.permits = threading.Semaphore(0)
        self.is_waiting = False

    def result(self):
        self.is_waiting = True
        self.permits.acquire()
        self.is_waiting = False
        return super().result()


async def collect(client: EngineClient, request_id: str, prompt: list[int], params: SamplingParams):
    """Tokens and finish reason of one sequence."""
    (delta,) = (await collect_all(client, [request_id], prompt, params)).values()
    return delta.token_ids, delta.finish_reason


async def collect_all(
    client: EngineClient,
    ids: list[str],
    prompt: list[int],
    params: SamplingParams,
    options: RequestOptions = OPTIONS,
) -> dict[str, TokenDelta]:
    """Each sequence as one delta."""
    whole: dict[str, TokenDelta] = {}
    async for delta in client.generate(ids, prompt, params, options):
        before = whole.get(delta.request_id, TokenDelta(delta.request_id, []))
        whole[delta.request_id] = delta._replace(
            token_ids=before.token_ids + delta.token_ids,
            logprobs=join_logprobs([before.logprobs, delta.logprobs]),
            num_cached_tokens=before.num_cached_tokens + delta.num_cached_tokens,
        )
    return whole


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true")


async def step_until(executor: PacedExecutor, condition: Callable[[], bool]) -> None:
    """A step a look, for as many as it takes: what a client has sent may reach the engine after any number of steps."""

    def is_true() -> bool:
        executor.permits.release()
        return condition()

    await until(is_true)


class CountingExecutor(FakeExecutor):
    """Samples how long each row is, so that a step costs next to nothing; `pause_s` is the least time of a step. With
    `permits` each step waits for one."""

    def __init__(self, *, pause_s: float = 0.0, permits: threading.Semaphore | None = None, **options) -> None:
        super().__init__(**options)
        self.pause_s = pause_s
        self.permits = permits
        self._lengths: dict[int, tuple[int, int]] = {}

    def _execute(self, plan: StepPlan) -> Sampled:
        time.sleep(self.pause_s)
        if self.permits is not None:
            self.permits.acquire()
        for new in plan.new_rows:
            self._lengths[new.row] = (len(new.token_ids), new.num_computed)
        tokens = []
        for row, count in zip(plan.rows, plan.num_tokens, strict=True):
            known, computed = self._lengths[row]
            computed += count
            if computed == known:
                tokens.append(known % 60 + 1)
                known += 1
            self._lengths[row] = (known, computed)
        return Sampled(plan.step, tokens)
