"""Limits that several ingresses keep together: windows, the ledger, shares."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylm.serving.identity.ledger import Claim, Ledger, Reply
from raylm.serving.identity.shares import Meter, Shares
from raylm.serving.identity.window import WINDOW_S, Level, Window


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Cluster:
    """Ingresses with one ledger, and all that they let through."""

    def __init__(self, num: int, limit: int, kind: str = "tokens") -> None:
        self.clock = Clock()
        self.ledger = Ledger(self.clock)
        self.limit = limit
        self.num_exchanges = 0
        self.is_away = False
        self.shares = [Shares(self._exchange(str(index)), clock=self.clock) for index in range(num)]
        self.meters = [shares.meter("t", kind, limit) for shares in self.shares]
        self.spent: list[tuple[float, int]] = []

    def _exchange(self, name: str):
        async def exchange(claims: Sequence[Claim], all_of_them: bool) -> Reply:
            self.num_exchanges += 1
            if self.is_away:
                raise ConnectionError("away")
            return self.ledger.exchange(name, claims, all_of_them=all_of_them)

        return exchange

    async def spend(self, index: int, amount: int) -> bool:
        if not await self.shares[index].spend(self.meters[index], amount):
            return False
        self.spent.append((self.clock.now, amount))
        return True

    def most_in_a_minute(self) -> int:
        return max(
            (sum(amount for at, amount in self.spent if start <= at < start + 60) for start, _ in self.spent), default=0
        )


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("spend"), st.integers(0, 2), st.integers(1, 40)),
        st.tuples(st.just("settle"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("wait"), st.just(0), st.sampled_from([0.1, 0.9, 1, 7.5, 30, 61])),
        st.tuples(st.just("refund"), st.integers(0, 2), st.integers(1, 40)),
    ),
    max_size=60,
)


@given(STEPS)
def test_no_minute_holds_more_than_the_limit(steps: list[tuple[str, int, float]]) -> None:
    async def play() -> None:
        cluster = Cluster(3, 100)
        for kind, index, value in steps:
            if kind == "spend":
                await cluster.spend(index, int(value))
            elif kind == "settle":
                await cluster.shares[index].settle()
            elif kind == "wait":
                cluster.clock.now += value
            elif cluster.spent and (at := cluster.spent[-1])[0] > cluster.clock.now - 50:
                # Its last one used less than it had reserved, wherever it came in.
                meter, amount = cluster.meters[index], min(int(value), at[1])
                second = int(at[0])
                if meter.used.total >= amount and any(slot == [second, at[1]] for slot in meter.used._slots):
                    meter.correct(second, at[1], at[1] - amount, int(cluster.clock.now))
                    cluster.spent[-1] = (at[0], at[1] - amount)
        assert cluster.most_in_a_minute() <= cluster.limit

    asyncio.run(play())


async def test_one_ingress_can_use_all_of_it() -> None:
    cluster = Cluster(2, 100)
    assert [await cluster.spend(0, 30) for _ in range(4)] == [True, True, True, False]
    assert not await cluster.spend(1, 30)
    for _ in range(4):
        cluster.clock.now += 1
        for shares in cluster.shares:
            await shares.settle()
    assert await cluster.spend(1, 10), "it does not stay with whom it is too little for"
    assert cluster.most_in_a_minute() == 100


async def test_what_is_held_and_not_needed_goes_to_who_needs_it() -> None:
    cluster = Cluster(2, 100)
    assert await cluster.spend(0, 60)
    await cluster.shares[0].settle()
    assert cluster.meters[0].held == 20, "as much as the last seconds used, but no more than its part of what is left"
    assert not await cluster.spend(1, 30)
    cluster.clock.now += 3
    await cluster.shares[0].settle()
    assert cluster.meters[0].held == 0 and await cluster.spend(1, 30)


async def test_steady_use_asks_once_a_second() -> None:
    cluster = Cluster(2, 6000)
    for second in range(6):
        if second == 3:
            cluster.num_exchanges = 0
        for shares in cluster.shares:
            await shares.settle()
        for _ in range(20):
            for index in range(2):
                assert await cluster.spend(index, 1)
            cluster.clock.now += 0.05
    assert cluster.num_exchanges == 2 * 3


async def test_requests_that_wait_together_ask_together() -> None:
    cluster = Cluster(1, 100)
    answers = await asyncio.gather(*(cluster.spend(0, 10) for _ in range(20)))
    assert (answers.count(True), cluster.num_exchanges) == (10, 1)
    assert not await cluster.spend(0, 10)
    assert cluster.num_exchanges == 1, "it is known for a moment that there is nothing"


async def test_without_the_ledger_each_has_its_part(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(4, 100)
    for shares in cluster.shares * 2:
        await shares.settle()
    cluster.is_away = True
    cluster.clock.now += 70
    await cluster.shares[0].settle()
    answers = [await cluster.spend(index, 10) for index in range(4) for _ in range(4)]
    assert answers.count(True) == 4 * 2 and cluster.most_in_a_minute() <= 100
    assert "kept by each ingress for itself" in caplog.text


async def test_a_ledger_that_hangs_holds_up_nobody_for_long() -> None:
    async def never(claims: Sequence[Claim], all_of_them: bool) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError("it hangs")

    shares = Shares(never)
    meter = shares.meter("t", "requests", 2)
    async with asyncio.timeout(60):
        assert [await shares.spend(meter, 1) for _ in range(3)] == [True, True, False]


async def test_an_ingress_that_dies_counts_for_a_minute() -> None:
    cluster = Cluster(2, 100)
    assert await cluster.spend(0, 100)
    cluster.clock.now += 50
    assert not await cluster.spend(1, 1)
    cluster.clock.now += 20
    assert await cluster.spend(1, 100)


async def test_running_requests_free_their_places() -> None:
    cluster = Cluster(2, 2, "running")
    assert await cluster.spend(0, 1) and await cluster.spend(1, 1) and not await cluster.spend(0, 1)
    cluster.meters[1].correct(0, 1, 0, 0)
    cluster.clock.now += 0.3
    assert await cluster.spend(1, 1)
    cluster.meters[1].correct(0, 1, 0, 0)
    await cluster.shares[1].settle()
    cluster.clock.now += 0.3
    assert await cluster.spend(0, 1)


def test_a_lower_limit_holds_at_once() -> None:
    shares = Shares()
    meter = shares.meter("t", "requests", 10)
    meter.held = 9
    assert shares.meter("t", "requests", 5) is meter and meter.held == 0 and meter.limit == 5


def test_a_window_forgets_after_a_minute() -> None:
    window = Window()
    for second, amount in ((0, 5), (0, 1), (30, 4)):
        window.add(second, amount)
    assert (window.total, window.soon(31), window.wait_for(6, 31), window.wait_for(7, 31)) == (10, 4, 30, 60)
    assert window.take_back(30, 3) == 3 and window.take_back(7, 1) == 0
    window.move(WINDOW_S)
    assert window.total == 7
    window.move(WINDOW_S + 1)
    assert (window.total, window.until_free(WINDOW_S + 1)) == (1, 30)


def test_how_long_to_wait() -> None:
    meter = Meter("t", "tokens", 100)
    meter.used.add(0, 50)
    meter.used.add(20, 30)
    assert meter.wait_s(60, 30) == 31, "20 are free, 50 more after a minute from second 0"
    meter.others = 20
    assert meter.wait_s(90, 30) == 51
    assert Level().wait_for(3, 0) == 1
