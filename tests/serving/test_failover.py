"""Requests that go on at another engine: the tokens are those of an undisturbed run, none twice and none missing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.config.routing import RoutingConfig
from raylm.config.sampling import SamplingDefaults
from raylm.core.load import Load
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.structure import StructuredOutput
from raylm.engine.backlog import Backlog
from raylm.engine.streams import Sequences
from raylm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    EngineDeadError,
    EngineStopped,
    GenerationFailed,
    Overloaded,
    RequestLost,
    RequestRejected,
    ServerStopped,
)
from raylm.serving.directory import ModelEntry, StartFailure
from raylm.serving.routing import failover
from raylm.serving.routing.choice import Ask, Choice
from raylm.serving.routing.failover import Journey
from raylm.serving.routing.router import ModelRouter
from raylm.serving.routing.selector import EngineView
from tests.support import fakes
from tests.support.channel_fakes import until
from tests.support.engines import make_engine
from tests.support.fakes import FakeExecutor, next_token

T = TypeVar("T")
PROMPT = [5, 6, 7, 8, 9]
OPTIONS = RequestOptions()
LOSSES = [EngineDeadError("it died"), EngineStopped("it was stopped"), ConnectionLost("it was cut off")]


class Host:
    """An engine on the fake worker as its client shows it; the test says when it steps and dies."""

    def __init__(self, name: str, **options) -> None:
        self.entry = SimpleNamespace(engine_id=name, state="ready")
        self.client = self
        self.is_usable = True
        self.engine = make_engine(FakeExecutor(num_blocks=256, max_model_len=128), **options)
        self.view = EngineView(name, Backlog(), None, RoutingConfig())
        self.sequences: dict[str, Sequences] = {}
        self.begun: list[list[int]] = []

    @property
    def pressure(self) -> int:
        return len(self.sequences)

    def generate(self, ids, prompt_ids, params, options, begun=(), *, num_cached=0) -> Sequences:
        sequences = Sequences(ids, self._release)
        self.sequences.update(dict.fromkeys(ids, sequences))
        self.view.backlog.report(Load(len(self.sequences), 0, 0.0))
        try:
            if begun:
                self.begun += [each.token_ids for each in begun]
                self.engine.resume(ids, prompt_ids, params, options, begun)
            else:
                self.engine.add(ids, prompt_ids, params, options)
        except (Overloaded, RequestRejected) as error:
            sequences.fail(error)
        else:
            sequences.admit()
        return sequences

    def _release(self, request_id: str, abort: bool) -> None:
        del self.sequences[request_id]
        self.view.backlog.report(Load(len(self.sequences), 0, 0.0))
        if abort:
            self.engine.abort(request_id)

    def step(self) -> None:
        for delta in self.engine.step():
            if (sequences := self.sequences.get(delta.request_id)) is not None:
                sequences.push(delta)

    def die(self, loss: RequestLost) -> None:
        """What was live is lost; another engine is at its place from here on."""
        self.engine.abort_all()
        self.engine._cache.forget_prefixes()
        for sequences in set(self.sequences.values()):
            sequences.fail(loss)


@pytest.fixture(autouse=True)
def tokens_by_seed(monkeypatch):
    """The fake worker's tokens differ by the row's seed, and by what of a row is the prompt. No pause of a busy machine
    is as long as an engine that was lost is avoided."""
    monkeypatch.setattr(failover, "_AVOID_S", 600.0)

    def sampled(row) -> int:
        output = row.output if row.sampling.params.structure is not None else None
        token = next_token(row.tokens, output)
        return token if output is not None else (token + row.sampling.seed + 3 * row.sampling.num_prompt) % fakes.VOCAB

    monkeypatch.setattr(fakes._Row, "next_token", sampled)


def router_of(hosts: list[Host], **config) -> ModelRouter:
    router = ModelRouter("m", RoutingConfig(**config))
    router.engines = {host.entry.engine_id: host for host in hosts}
    return router


async def read(journey: Journey) -> tuple[dict[str, list[int]], dict[str, str], int]:
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    cached = 0
    async for delta in journey:
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        # As usage counts them: those of the first sequence.
        cached += delta.num_cached_tokens * delta.request_id.endswith("-0")
        if delta.finish_reason is not None:
            assert delta.request_id not in reasons
            reasons[delta.request_id] = delta.finish_reason
    return tokens, reasons, cached


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, 120)


def undisturbed(params: SamplingParams) -> tuple[dict[str, list[int]], dict[str, str]]:
    async def run():
        host = Host("alone")
        reading = asyncio.create_task(read(router_of([host]).generate(ids_of(params), PROMPT, params, OPTIONS)))
        while not reading.done():
            host.step()
            await asyncio.sleep(0)
        return reading.result()

    tokens, reasons, _ = asyncio.run(run())
    return tokens, reasons


def ids_of(params: SamplingParams) -> list[str]:
    return [f"r-{index}" for index in range(params.n)]


WISHES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=30, seed=1, ignore_eos=True),
    "stops": SamplingParams(max_tokens=100, seed=3),
    "three": SamplingParams(max_tokens=20, seed=11, n=3, ignore_eos=True),
    "grammar": SamplingParams(max_tokens=25, seed=2, structure=StructuredOutput("grammar", 'root ::= "a"')),
    "beams": SamplingParams(max_tokens=8, seed=2, beam_width=3, n=2),
    "one": SamplingParams(max_tokens=1, seed=2, n=2),
    "highest seed": SamplingParams(max_tokens=9, seed=2**63 - 1, n=3, ignore_eos=True),
}


EVENTS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None] * 6 + LOSSES)), max_size=60)
"""Turns that the event loop has, then a step of all engines, or the loss of those that are busy."""


@pytest.mark.parametrize("wish", WISHES)
@settings(max_examples=25, deadline=None)
@given(events=EVENTS)
def test_whatever_is_lost_the_tokens_are_the_same(wish, events):
    params = WISHES[wish]

    async def run():
        hosts = [Host("a"), Host("b")]
        journey = router_of(hosts, max_engine_deaths=1000).generate(ids_of(params), PROMPT, params, OPTIONS)
        reading = asyncio.create_task(read(journey))
        for turns, loss in events:
            for _ in range(turns):
                await asyncio.sleep(0)
            for host in hosts:
                if loss is None:
                    host.step()
                elif host.sequences:
                    host.die(loss)
        while not reading.done():
            # Nobody waits for an engine that died a moment ago.
            journey._avoid.clear()
            for host in hosts:
                host.step()
            await asyncio.sleep(0)
        return reading.result()

    tokens, reasons, cached = asyncio.run(soon(run()))
    assert (tokens, reasons) == undisturbed(params)
    assert cached == 0, "nobody else had this prompt; what a resumed request finds is not told"


def test_an_engine_that_goes_on_gets_what_has_come_and_no_more():
    async def run():
        hosts = [Host("a"), Host("b")]
        router = router_of(hosts)
        params = replace(WISHES["greedy"], max_tokens=10)
        journey = router.generate(["r"], PROMPT, params, OPTIONS)
        reading = asyncio.create_task(read(journey))
        await asyncio.sleep(0)
        first = next(host for host in hosts if host.sequences)
        for _ in range(4):
            first.step()
        first.die(LOSSES[0])
        await until(lambda: any(host.sequences for host in hosts))
        second = next(host for host in hosts if host.sequences)
        assert second is not first
        assert [len(tokens) for tokens in second.begun] == [4]
        assert router.num_resumed == 1
        while not reading.done():
            second.step()
            await asyncio.sleep(0)
        return reading.result()

    tokens, reasons, _ = asyncio.run(soon(run()))
    assert len(tokens["r"]) == 10 and reasons == {"r": "length"}


def test_a_live_request_goes_past_a_full_queue_and_a_new_one_to_where_there_is_room():
    async def run():
        full, other = Host("full", queue=1, max_num_seqs=1), Host("other", queue=1, max_num_seqs=1)
        router = router_of([full, other])
        greedy = WISHES["greedy"]
        for host in (full, other):
            host.generate([f"{host.entry.engine_id}-1"], PROMPT, greedy, OPTIONS)
            host.step()
        full.generate(["full-2"], PROMPT, greedy, OPTIONS)
        new = router.generate(["new"], PROMPT, greedy, OPTIONS)
        await new.admitted()
        assert "new" in other.sequences
        refused = router.generate(["refused"], PROMPT, greedy, OPTIONS)
        with pytest.raises(Overloaded, match="requests are waiting"):
            await refused.admitted()
        other.die(LOSSES[0])
        reading = asyncio.create_task(read(new))
        await until(lambda: "new~1" in full.sequences)
        with pytest.raises(Overloaded, match="^1 requests are waiting"):
            full.engine.add(["more"], PROMPT, greedy, OPTIONS)
        reading.cancel()

    asyncio.run(soon(run()))


@contextmanager
def nobody(router: ModelRouter):
    hosts, router.engines = router.engines, {}
    yield
    router.engines = hosts


def test_requests_wait_for_an_engine():
    async def run():
        host = Host("a")
        router = router_of([host], hold_s=100, max_held_requests=1)
        greedy = WISHES["greedy"]
        with nobody(router):
            journey = router.generate(["r"], PROMPT, greedy, OPTIONS)
            waiting = asyncio.create_task(journey.admitted())
            await until(lambda: router.num_held == 1)
            assert not waiting.done()
            with pytest.raises(Overloaded, match="routing.max_held_requests allows 1"):
                await router.generate(["more"], PROMPT, greedy, OPTIONS).admitted()
        await waiting
        assert router.num_held == 0 and "r" in host.sequences
        # A live one waits too, beside those that are held.
        host.step()
        with nobody(router):
            host.die(LOSSES[1])
            reading = asyncio.create_task(read(journey))
            await asyncio.sleep(0.1)
            assert not reading.done() and router.num_held == 0
        journey._avoid.clear()  # It was lost by this very engine.
        while not reading.done():
            host.step()
            await asyncio.sleep(0)
        assert len(reading.result()[0]["r"]) == 30

    asyncio.run(soon(run()))


def test_who_has_waited_for_an_engine_waits_for_room_in_it(monkeypatch):
    monkeypatch.setattr(failover, "_FULL_S", 0.05)

    async def run():
        host = Host("a", queue=1, max_num_seqs=1)
        router = router_of([host])
        short = replace(WISHES["greedy"], max_tokens=3)
        with nobody(router):
            journeys = [router.generate([f"r{number}"], PROMPT, short, OPTIONS) for number in range(4)]
            reading = [asyncio.create_task(read(journey)) for journey in journeys]
            await until(lambda: router.num_held == 4)
        while not all(task.done() for task in reading):
            host.step()
            await asyncio.sleep(0.01)
        assert [len(tokens[f"r{number}"]) for number, (tokens, *_) in enumerate(t.result() for t in reading)] == [3] * 4

    asyncio.run(soon(run()))


def test_who_has_waited_and_finds_no_room_hears_that():
    async def run():
        host = Host("a", queue=1, max_num_seqs=1)
        for number in range(2):
            host.generate([f"other{number}"], PROMPT, WISHES["greedy"], OPTIONS)
            host.step()
        router = router_of([host], hold_s=100)
        with nobody(router):
            waiting = asyncio.create_task(router.generate(["r"], PROMPT, WISHES["greedy"], OPTIONS).admitted())
            await until(lambda: router.num_held == 1)
        router.config = RoutingConfig(hold_s=0)  # Its time is over when it finds the engine.
        with pytest.raises(Overloaded, match="requests are waiting, at most 1 may"):
            await waiting

    asyncio.run(soon(run()))


def test_new_and_live_requests_wake_a_model_that_has_gone_to_sleep():
    async def run():
        woken = []
        router = ModelRouter("m", RoutingConfig(), lambda: woken.append("m"))
        new = asyncio.create_task(router.generate(["new"], PROMPT, WISHES["greedy"], OPTIONS).admitted())
        await until(lambda: bool(woken))
        new.cancel()
        host = Host("a")
        router.engines = {"a": host}
        live = router.generate(["live"], PROMPT, WISHES["greedy"], OPTIONS)
        await live.admitted()
        # Its replica goes because nothing seemed to run, and its drain is shorter than the stream.
        host.entry.state = "draining"
        host.is_usable = False
        woken.clear()
        host.die(LOSSES[1])
        reading = asyncio.create_task(read(live))
        await until(lambda: bool(woken))
        assert not reading.done()
        reading.cancel()

    asyncio.run(soon(run()))


def test_who_wakes_a_model_waits_for_its_start_unless_that_fails():
    async def run():
        sleeper = ModelEntry("m", "app", "here", SamplingDefaults(), since=1.0, may_sleep=True)
        router = router_of([], hold_s=0.1, wake_s=100)
        # What failed before anybody asked says nothing of the next start.
        router.note(sleeper._replace(failure=StartFailure("no memory then", at=1.0)))
        waiting = router.generate(["r"], PROMPT, WISHES["greedy"], OPTIONS)
        task = asyncio.create_task(waiting.admitted())
        await asyncio.sleep(0.3)
        assert not task.done()
        router.note(sleeper._replace(failure=StartFailure("model.path is gone", at=2.0)))
        with pytest.raises(Overloaded, match="no engine serves 'm' at the moment; its last start failed: model.path"):
            await task
        with pytest.raises(Overloaded, match="no engine serves 'm' at the moment$"):
            router = router_of([], hold_s=0, wake_s=0.2)
            router.note(sleeper)
            await router.generate(["r"], PROMPT, WISHES["greedy"], OPTIONS).admitted()

    asyncio.run(soon(run()))


def test_nobody_waits_for_ever():
    async def run():
        greedy = WISHES["greedy"]
        router = router_of([], hold_s=0.2)
        with pytest.raises(Overloaded, match="no engine serves 'm'"):
            await router.generate(["r"], PROMPT, greedy, OPTIONS).admitted()
        with pytest.raises(Overloaded, match="no engine serves 'm'"):
            await router_of([], hold_s=0).generate(["r"], PROMPT, greedy, OPTIONS).admitted()
        with pytest.raises(DeadlineExceeded, match="deadline_s is 0.1"):
            await router.generate(["r"], PROMPT, greedy, RequestOptions(deadline_s=0.1)).admitted()
        for wait_s, message in ((0, "it died$"), (0.1, "it died; no other engine could go on within 0.1 s")):
            host = Host("a")
            router = router_of([host], failover_wait_s=wait_s)
            journey = router.generate(["r"], PROMPT, greedy, OPTIONS)
            await journey.admitted()
            host.step()
            router.engines.clear()
            host.die(LOSSES[0])
            with pytest.raises(EngineDeadError, match=message):
                await read(journey)

    asyncio.run(soon(run()))


def test_a_request_that_ends_engines_ends():
    async def run():
        hosts = [Host("a"), Host("b"), Host("c")]
        router = router_of(hosts, max_engine_deaths=2)
        reading = asyncio.create_task(read(router.generate(["r"], PROMPT, WISHES["greedy"], OPTIONS)))
        for _ in range(2):
            await until(lambda: any(host.sequences for host in hosts))
            next(host for host in hosts if host.sequences).die(LOSSES[0])
        with pytest.raises(GenerationFailed, match="was on 2 engines when they died"):
            await reading

    asyncio.run(soon(run()))


def test_a_server_that_stops_ends_those_who_wait():
    async def run():
        router = router_of([])
        journey = router.generate(["r"], PROMPT, WISHES["greedy"], OPTIONS)
        waiting = asyncio.create_task(journey.admitted())
        await asyncio.sleep(0.02)
        router.closed = "the server is shutting down"
        with pytest.raises(Overloaded, match="shutting down"):
            await waiting
        host = Host("a")
        router = router_of([host])
        journey = router.generate(["r"], PROMPT, WISHES["greedy"], OPTIONS)
        await journey.admitted()
        router.closed = "the server is shutting down"
        host.die(LOSSES[1])
        with pytest.raises(ServerStopped):
            await read(journey)

    asyncio.run(soon(run()))


def test_a_request_that_waits_can_be_aborted():
    async def run():
        router = router_of([])
        params = WISHES["three"]
        journey = router.generate(ids_of(params), PROMPT, params, OPTIONS)
        waiting = asyncio.create_task(journey.admitted())
        await asyncio.sleep(0.02)
        journey.abort()
        await waiting
        _, reasons, _ = await read(journey)
        assert reasons == dict.fromkeys(ids_of(params), "abort")

    asyncio.run(soon(run()))


def test_the_choice_is_the_least_busy_engine():
    hosts = [Host("a"), Host("b")]
    router = router_of(hosts)
    hosts[0].generate(["x"], PROMPT, WISHES["greedy"], OPTIONS)
    assert router.choose(Ask(PROMPT, OPTIONS)) == Choice(hosts[1], "load", 0)
    assert router.choose(Ask(PROMPT, OPTIONS), avoid={"b"}) == Choice(hosts[0], "only", 0)
    assert router.choose(Ask(PROMPT, OPTIONS), avoid={"a", "b"}) is None
