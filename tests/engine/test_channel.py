"""Requests in, tokens out: a real engine server and real clients over real sockets, on a fake worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.engine.link import KeyPair
from raylm.errors import ConnectionLost, EngineDeadError, EngineStopped, Overloaded, RequestRejected
from tests.support.channel_fakes import OPTIONS, PacedExecutor, Served, collect, collect_all, step_until, until
from tests.support.fakes import FakeExecutor, expected_beams, expected_tokens


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(FakeExecutor(max_model_len=200, num_blocks=400))
    yield served
    served.stop()


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
    stream = client.generate(["a"], [1, 2, 3], SamplingParams(temperature=0, ignore_eos=True), OPTIONS)
    executor.permits.release(2)
    await anext(stream)
    await until(lambda: executor.num_steps == 2 and executor.is_waiting)  # From now on the engine reads nothing.
    assert served.engine.stats().running == 1
    await stream.aclose()
    await until(lambda: bool(served.server._socket.poll(0)))
    executor.permits.release(1)
    await until(lambda: served.engine.stats().running == 0)
    assert executor.num_steps == 3
    assert served.engine.stats().kv_usage == 0
    executor.permits.release(100)
    await client.close()
    served.stop()


async def test_a_client_that_vanishes_loses_its_requests():
    executor = PacedExecutor(max_model_len=10_000, num_blocks=4000)
    served = Served(executor)
    client = served.client()
    stream = client.generate(["a"], [1], SamplingParams(temperature=0, ignore_eos=True), OPTIONS)
    executor.permits.release(3)
    await anext(stream)
    await client.close()
    await step_until(executor, lambda: served.engine.stats().running == 0)
    await until(lambda: served.server.num_live == 0)
    with pytest.raises(ConnectionLost, match="closed"):
        while True:  # Tokens may have come before the end.
            await anext(stream)
    served.stop()


async def test_a_reader_that_is_behind_gets_merged_deltas():
    executor = PacedExecutor(max_model_len=200, num_blocks=400)
    served = Served(executor)
    client = served.client()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    stream = client.generate(["a"], [5], params, OPTIONS)
    executor.permits.release(1)
    first = await anext(stream)
    assert len(first.token_ids) == 1, "the first token is never held back"
    executor.permits.release(100)
    await until(lambda: client.num_live == 0)  # All of it has come here, and nobody has read.
    rest = await anext(stream)
    assert first.token_ids + rest.token_ids == expected_tokens([5], params, 200)[0]
    assert rest.finish_reason == "length"
    await client.close()
    served.stop()


async def test_the_sequences_of_a_group_share_one_submit(served):
    client = served.client()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    prompt = list(range(1, 12))
    whole = await collect_all(client, ["a", "b", "c"], prompt, params)
    assert list(sorted(whole)) == ["a", "b", "c"]
    tokens, reason = expected_tokens(prompt, params, 200)
    for delta in whole.values():
        assert (delta.token_ids, delta.finish_reason) == (tokens, reason)
        assert len(delta.logprobs.values) == 20 and max(delta.logprobs.values) < 0
    again = await collect_all(client, ["d"], prompt, params)
    assert again["d"].num_cached_tokens == 8, "the prompt's full blocks are in the cache"
    assert client.load.prefix_hits == 8 and client.load.prefix_queries >= 11 + 11
    assert client.load.num_generated == 4 * 20
    assert served.server.num_live == client.num_live == 0
    await client.close()


async def test_a_beam_search_delivers_its_best(served):
    client = served.client()
    params = SamplingParams(beam_width=3, n=2, max_tokens=5)
    whole = await collect_all(client, ["best", "second"], [1, 2, 3], params)
    found = [(whole[request_id].token_ids, whole[request_id].finish_reason) for request_id in ("best", "second")]
    assert found == expected_beams([1, 2, 3], params, 200)
    assert served.server.num_live == 0
    await client.close()


@pytest.mark.parametrize("beam_width", [0, 3])
async def test_closing_a_group_early_ends_what_is_left_of_it(beam_width):
    executor = PacedExecutor(max_model_len=200, num_blocks=400)
    served = Served(executor)
    client = served.client()
    params = SamplingParams(n=3, beam_width=beam_width, ignore_eos=True)
    group = client.generate(["a", "b", "c"], [1, 2, 3], params, OPTIONS)
    assert client.pressure == 3
    executor.permits.release(3)
    await until(lambda: served.server.num_live == 3 and executor.num_steps == 3)
    if not beam_width:
        group.end("b")
        group.end("b")
        assert client.pressure == 2
    await group.aclose()
    assert client.pressure == 0
    await step_until(executor, lambda: served.server.num_live == 0 and not served.engine.has_work)
    assert served.engine.stats().kv_usage == 0
    await client.close()
    served.stop()


async def test_ending_one_sequence_lets_the_others_go_on():
    executor = PacedExecutor(max_model_len=200, num_blocks=400)
    served = Served(executor)
    client = served.client()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    group = client.generate(["a", "b"], [1, 2, 3], params, OPTIONS)
    executor.permits.release(1)
    assert (await anext(group)).request_id == "a"
    group.end("a")
    executor.permits.release(100)
    rest = [delta async for delta in group]
    assert {delta.request_id for delta in rest} == {"b"}
    assert sum((delta.token_ids for delta in rest), []) == expected_tokens([1, 2, 3], params, 200)[0]
    await until(lambda: served.server.num_live == 0)
    await client.close()
    served.stop()


@pytest.mark.parametrize("ids", [["a", "a"], ["new", "live"]])
async def test_ids_in_use_are_refused_together(ids):
    executor = PacedExecutor(max_model_len=10_000, num_blocks=4000)
    served = Served(executor)
    client = served.client()
    live = client.generate(["live"], [1], SamplingParams(ignore_eos=True), OPTIONS)
    await until(lambda: served.server.num_live == 1)
    other = served.client()
    refused = asyncio.create_task(collect_all(other, ids, [1], SamplingParams()))
    while not refused.done():
        executor.permits.release(1)
        await asyncio.sleep(0.01)
    with pytest.raises(RequestRejected, match="already in use or given twice"):
        await refused
    assert other.num_live == 0
    assert served.server.num_live == 1
    await live.aclose()
    # A client that closes at once may take its Abort with it.
    await step_until(executor, lambda: served.server.num_live == 0)
    executor.permits.release(100)
    await other.close()
    await client.close()
    served.stop()


async def test_a_group_left_before_the_connection_is_up_does_not_run(served):
    client = served.client()
    assert not client.is_connected
    await client.generate(["a", "b"], [1], SamplingParams(ignore_eos=True), OPTIONS).aclose()
    assert (await collect(client, "c", [1], SamplingParams(max_tokens=1)))[1] is not None
    await until(lambda: served.server.num_live == 0 and not served.engine.has_work)
    await client.close()


async def test_time_limits_reach_the_engine():
    executor = PacedExecutor(max_model_len=200, num_blocks=400)
    served = Served(executor)
    client = served.client()
    options = RequestOptions(deadline_s=0.05)
    task = asyncio.create_task(collect_all(client, ["a", "b"], [1], SamplingParams(ignore_eos=True), options))
    await until(lambda: served.server.num_live == 2 or task.done())  # Its time may be over before its first step.
    await asyncio.sleep(0.1)
    executor.permits.release(100)
    for delta in (await task).values():
        assert delta.finish_reason == "deadline"
        assert "deadline_s 0.05" in delta.message
    assert served.server.num_live == 0
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
    served.hold_until(5)
    client = served.client()
    streams = [asyncio.create_task(collect(client, str(i), [1], SamplingParams(max_tokens=1))) for i in range(5)]
    executor.permits.release(100)
    results = await asyncio.gather(*streams, return_exceptions=True)
    refused = [result for result in results if isinstance(result, Overloaded)]
    assert len(refused) == 4 and all(error.retry_after > 0 for error in refused)
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


async def test_a_request_that_came_during_the_last_step_has_the_reason_too():
    executor = PacedExecutor(max_model_len=200, num_blocks=400)
    executor.fail_at = 3
    served = Served(executor)
    client = served.client()
    params = SamplingParams(temperature=0, ignore_eos=True)
    early = client.generate(["early"], [1], params, OPTIONS)
    executor.permits.release(1)
    await anext(early)
    await until(lambda: executor.is_waiting)  # From now on the engine reads nothing.
    late = client.generate(["late"], [2], params, OPTIONS)
    await until(lambda: bool(served.server._socket.poll(0)))
    executor.permits.release(5)
    for stream in (early, late):
        with pytest.raises(EngineDeadError, match="told to fail"):
            while True:
                await anext(stream)
    served.thread.join(60)
    await client.close()


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
    served.thread.join(60)
    assert isinstance(served.error, RuntimeError)
    await client.close()


async def test_garbage_does_not_stop_the_engine(served):
    client = served.client()
    client._link.send(b"\xff\x00garbage")
    client._link.send(b"")
    assert (await collect(client, "a", [1], SamplingParams(max_tokens=2)))[1] is not None
    await client.close()


async def test_a_request_is_admitted_before_its_first_token():
    executor = PacedExecutor(max_model_len=200, num_blocks=400)
    served = Served(executor, queue=2)
    served.hold_until(4)
    client = served.client()
    streams = [client.generate([str(i)], [1], SamplingParams(max_tokens=2, ignore_eos=True), OPTIONS) for i in range(4)]
    outcomes = await asyncio.gather(*(stream.admitted() for stream in streams), return_exceptions=True)
    assert executor.num_steps == 0, "no step is over, so no token has come"
    assert [type(outcome) for outcome in outcomes] == [type(None)] * 2 + [Overloaded] * 2
    executor.permits.release(100)
    for stream in streams[:2]:
        await stream.admitted()
        assert [delta async for delta in stream][-1].finish_reason == "length"
    with pytest.raises(Overloaded):
        await anext(streams[3])
    await client.close()
    served.stop()


async def test_a_request_that_is_refused_is_not_admitted(served):
    client = served.client()
    with pytest.raises(RequestRejected, match="250 tokens"):
        await client.generate(["a"], [1] * 250, SamplingParams(), OPTIONS).admitted()
    await client.close()


async def test_a_stopped_engine_says_why_it_ended_every_request():
    executor = PacedExecutor(max_model_len=200, num_blocks=400)
    served = Served(executor)
    client = served.client()
    early = client.generate(["early"], [1], SamplingParams(temperature=0, ignore_eos=True), OPTIONS)
    executor.permits.release(1)
    await anext(early)
    await until(lambda: executor.is_waiting)  # From now on the engine reads nothing.
    late = client.generate(["late"], [2], SamplingParams(), OPTIONS)
    await until(lambda: bool(served.server._socket.poll(0)))
    served.server.stop("the replica's drain is over")
    executor.permits.release(5)
    for stream in (early, late):
        with pytest.raises(EngineStopped, match="the replica's drain is over") as caught:
            while True:
                await anext(stream)
        assert caught.value.code == "engine_stopped"
    served.thread.join(60)
    await client.close()


async def test_a_client_with_nothing_to_do_lets_the_event_loop_rest():
    """What a socket has to tell must be taken, also of the connection for heartbeats, which nobody reads."""
    served = Served(FakeExecutor())
    client = served.client()
    loop, turns = asyncio.get_running_loop(), 0
    select = loop._selector.select

    def counted(timeout: float | None = None) -> list[object]:
        nonlocal turns
        turns += 1
        return select(timeout)

    try:
        await until(lambda: client.is_connected)
        await collect(client, "a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
        await asyncio.sleep(0.3)  # The second connection is made.
        loop._selector.select = counted
        await asyncio.sleep(1.0)
    finally:
        loop._selector.select = select
        await client.close()
        served.stop()
    assert turns < 100, "a loop that spins turns thousands of times"
