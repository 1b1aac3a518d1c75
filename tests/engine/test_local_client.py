"""LocalClient: an engine of this process behind the channel's interface, fed only as its queue has room."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.step import Sampled
from raylm.engine.local_client import LocalClient
from raylm.errors import EngineDeadError, RequestRejected
from tests.support.engines import make_engine
from tests.support.fakes import FakeExecutor, expected_tokens

OPTIONS = RequestOptions()


@asynccontextmanager
async def client(executor: FakeExecutor | None = None, *, queue: int = 2) -> AsyncIterator[LocalClient]:
    made = LocalClient(make_engine(executor or FakeExecutor(), queue=queue))
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


async def collect(local: LocalClient, name: str, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """The tokens of every delta."""
    return [delta.token_ids async for delta in local.generate([name], prompt, params, OPTIONS)]


async def test_much_more_than_the_queue_holds_is_generated_and_each_comes_as_one_delta():
    params = SamplingParams(max_tokens=9)
    prompts = [[1 + number % 40, 2, 3] for number in range(60)]
    async with client() as local:
        jobs = [collect(local, str(number), prompt, params) for number, prompt in enumerate(prompts)]
        found = await asyncio.gather(*jobs)
    assert found == [[expected_tokens(prompt, params, 64)[0]] for prompt in prompts]


class Paused(FakeExecutor):
    """Gives as many results as it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)

    def result(self) -> Sampled:
        self.allowed.acquire()
        return super().result()


async def test_with_stop_strings_tokens_come_as_they_are_made_and_the_reader_may_leave():
    executor = Paused()
    async with client(executor) as local:
        sequences = local.generate(["a"], [1, 2], SamplingParams(max_tokens=60, stop=("x",), ignore_eos=True), OPTIONS)
        executor.allowed.release()
        first = await anext(sequences)
        assert (len(first.token_ids), first.finish_reason) == (1, None)
        sequences.end("a")
        executor.allowed.release(20)
        found = await collect(local, "b", [3], SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(found[0]) == 2
        assert executor.num_steps < 10


async def test_what_is_still_waiting_here_can_be_left_too():
    async with client(queue=1) as local:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        many = [local.generate([str(number)], [1], params, OPTIONS) for number in range(30)]
        for sequences in many[1:]:
            await sequences.aclose()
        assert len((await anext(many[0])).token_ids) == 20
        assert await collect(local, "next", [2], params)


async def test_requests_are_admitted_with_one_call_of_the_loop_a_step(monkeypatch):
    executor = Paused()
    async with client(executor, queue=8) as local:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        first = local.generate(["first"], [1], params, OPTIONS)
        await first.admitted()
        calls: list[object] = []
        call = local._call
        monkeypatch.setattr(local, "_call", lambda function, *given: (calls.append(function), call(function, *given)))
        many = [local.generate([str(number)], [number + 1], params, OPTIONS) for number in range(6)]
        executor.allowed.release()
        await asyncio.gather(*(sequences.admitted() for sequences in many))
        assert calls == [local._admit]
        with pytest.raises(RequestRejected):
            executor.allowed.release(100)
            await local.generate(["bad"], [1] * 64, params, OPTIONS).admitted()


async def test_a_refusal_reaches_its_reader_alone():
    async with client() as local:
        good = collect(local, "good", [1], SamplingParams(max_tokens=2, ignore_eos=True))
        bad = collect(local, "bad", [1] * 64, SamplingParams())
        results = await asyncio.gather(good, bad, return_exceptions=True)
    assert isinstance(results[1], RequestRejected)
    assert len(results[0][0]) == 2


async def test_a_dead_engine_fails_all_that_live_and_all_that_come():
    executor = FakeExecutor()
    executor.fail_at = 3
    async with client(executor) as local:
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        jobs = [collect(local, str(number), [number + 1], params) for number in range(20)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert {type(result) for result in results} == {EngineDeadError}
        assert "told to fail" in str(results[0])
        with pytest.raises(EngineDeadError, match="told to fail"):
            local.generate(["late"], [1], params, OPTIONS)


async def test_sequences_that_are_ended_say_so_and_leave_the_engine():
    params = SamplingParams(max_tokens=50, n=2, ignore_eos=True)
    executor = Paused()
    async with client(executor) as local:
        sequences = local.generate(["a", "b"], [1, 2, 3], params, OPTIONS)
        await sequences.admitted()
        sequences.abort()
        executor.allowed.release(1000)
        found = {delta.request_id: delta.finish_reason async for delta in sequences}
        assert found == {"a": "abort", "b": "abort"}
        sequences.abort()
        # Whoever comes next has the engine.
        whole = SamplingParams(max_tokens=9)
        assert await collect(local, "c", [4, 5, 6], whole) == [expected_tokens([4, 5, 6], whole, 64)[0]]
