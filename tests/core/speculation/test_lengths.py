"""Draft lengths on simulated devices: never slower than plain decoding, near the best fixed length where it helps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylm.core.drafting import Proposal
from raylm.core.speculation import DraftLengths, Drafts, Speculation
from raylm.core.speculation.costs import StepCosts
from raylm.core.speculation.speculation import Decoding

Cost = Callable[[int, int], float]
"""Seconds of a step of (rows, tokens)."""


def flat(rows: int, tokens: int) -> float:
    return 0.005


def gpu(rows: int, tokens: int) -> float:
    return 0.005 + 20e-6 * rows + max(0, tokens - 256) * 22e-6


def linear(rows: int, tokens: int) -> float:
    return 0.002 + 0.004 * tokens


def without_graphs(rows: int, tokens: int) -> float:
    return gpu(rows, tokens) + (0.006 if tokens > rows else 0)


def staircase(rows: int, tokens: int) -> float:
    return 0.005 * -(-tokens // 8)


DEVICES = {"flat": flat, "gpu": gpu, "linear": linear, "without graphs": without_graphs, "staircase": staircase}


class _Oracle:
    """Drafts of which the device knows which are right: token 1 is, token 0 is not."""

    index_budget = 0

    def __init__(self, probabilities: dict[str, float], random: Random) -> None:
        self._probabilities = probabilities
        self._random = random
        self._tokens: dict[str, list[int]] = {}

    def begin(self, key: str, token_ids: list[int], space: str) -> None:
        self._tokens[key] = token_ids

    def prepare(self, key: str, limit: int) -> int:
        return 0

    def propose(self, key: str, count: int) -> Drafts:
        p = self._probabilities[key]
        return Drafts([int(self._random.random() < p) for _ in range(count)], 3)

    def end(self, key: str) -> None:
        del self._tokens[key]


class Device:
    """Runs rows for a number of steps; returns tokens a second over plain decoding's."""

    def __init__(self, cost: Cost, probabilities: list[float], *, noise: float = 0.0, seed: int = 0) -> None:
        self.cost = cost
        self.random = Random(seed)
        self.noise = noise
        self.keys = {str(i): p for i, p in enumerate(probabilities)}
        self.seconds = self.plain_seconds = 0.0
        self.num_verifying = 0
        self.num_asked = 0
        self.speculation = Speculation(_Oracle(self.keys, Random(seed + 1)), 7)
        self.tokens: dict[str, list[int]] = {key: [] for key in self.keys}
        for key, tokens in self.tokens.items():
            self.speculation.added(key, tokens)

    def run(self, steps: int, length: int | None = None) -> float:
        """With `length` every row verifies so many drafts, whatever they are worth."""
        before = self.seconds, self.plain_seconds
        for _ in range(steps):
            self._step(length)
        return (self.plain_seconds - before[1]) / (self.seconds - before[0])

    def _step(self, length: int | None) -> None:
        rows = len(self.keys)
        if length is not None:
            counts = {key: self._accepted(key, length) for key in self.keys}
            planned = {key: Proposal(length, []) for key in self.keys}
        else:
            planned = {}
            if self.speculation.is_on(rows):
                self.num_asked += 1
                planned = self.speculation.plan([Decoding(key, 0, 7) for key in self.keys])
            counts = {key: [*proposal.token_ids, 0].index(0) for key, proposal in planned.items()}
        tokens = rows + sum(proposal.num_drafts for proposal in planned.values())
        seconds = self.cost(rows, tokens) * (1 + self.noise * self.random.random())
        sampled = rows + sum(counts.values())
        self.seconds += seconds
        self.plain_seconds += self.cost(rows, rows) * (1 + self.noise / 2) * sampled / rows
        self.num_verifying += bool(planned)
        for key in self.keys:
            known = self.tokens[key]
            known += [1] * (counts.get(key, 0)) + [int(self.random.random() < self.keys[key])]
        if length is None:
            for key, proposal in planned.items():
                self.speculation.settled(key, proposal, counts[key])
            self.speculation.observe(rows, tokens, sampled, seconds)

    def _accepted(self, key: str, length: int) -> int:
        count = 0
        while count < length and self.random.random() < self.keys[key]:
            count += 1
        return count


def best_fixed(cost: Cost, probabilities: list[float]) -> float:
    rows = len(probabilities)
    mean = sum(probabilities) / rows
    tokens = [sum(mean**i for i in range(length + 1)) for length in range(8)]
    return max(tokens[length] * cost(rows, rows) / cost(rows, rows * (length + 1)) for length in range(8))


STEPS = st.tuples(st.integers(1, 40), st.integers(0, 200), st.floats(1e-4, 1.0), st.integers(1, 5))


@given(st.lists(STEPS, max_size=60), st.integers(1, 40))
def test_costs_after_any_history_rise_with_the_tokens(steps, rows):
    costs = StepCosts()
    number = 0
    for num_rows, more, seconds, times in steps:
        own = costs.of(num_rows)
        for _ in range(times):
            number += 300
            if more and own.is_known:
                own.observe_verifying(number, num_rows + more, seconds)
            else:
                own.observe_plain(number, seconds)
    own = costs.of(rows)
    ratios = [own.ratio(size) for size in range(own.num_rows + 1, own.num_rows + 300)]
    # They may fall from the plain step's to those of the smallest size measured, and only there.
    falls = [index for index in range(1, len(ratios)) if ratios[index] < ratios[index - 1] - 1e-9]
    assert falls == list(range(1, len(falls) + 1))
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios)


@given(st.lists(STEPS, max_size=60), st.lists(st.lists(st.floats(0, 1), max_size=7), max_size=40))
def test_lengths_after_any_history_are_within_what_is_proposed(steps, values):
    lengths = DraftLengths()
    for num_rows, more, seconds, times in steps:
        for _ in range(times):
            lengths.observe(num_rows, num_rows + more, num_rows + more // 2, seconds)
    values = [sorted(chain, reverse=True) for chain in values]
    chosen = lengths.choose(values)
    assert all(0 <= length <= len(chain) for length, chain in zip(chosen, values, strict=True))


def loads(probabilities: list[float], numbers: list[int]) -> Iterator[object]:
    """Each device meets each probability and each number of rows; the rest of the product is nightly."""
    for i, name in enumerate(DEVICES):
        for j, probability in enumerate(probabilities):
            for k, rows in enumerate(numbers):
                is_chosen = (i + j + k) % len(numbers) == 0
                yield pytest.param(name, probability, rows, marks=[] if is_chosen else [pytest.mark.nightly])


@pytest.mark.parametrize(("name", "probability", "rows"), [*loads([0.0, 0.1, 0.3, 0.5, 0.8, 0.95], numbers=[1, 3, 16])])
def test_speculation_is_not_slower_than_plain_decoding(name, probability, rows):
    device = Device(DEVICES[name], [probability] * rows, noise=0.1)
    assert device.run(1200) > 0.97


@pytest.mark.parametrize("probability", [0.1, 0.6])
@pytest.mark.parametrize("name", DEVICES)
def test_nor_is_it_with_many_rows(name, probability):
    device = Device(DEVICES[name], [probability] * 100, noise=0.1)
    assert device.run(900) > 0.97


@pytest.mark.parametrize(("name", "probability", "rows"), [*loads([0.6, 0.8, 0.95], numbers=[1, 12])])
def test_speculation_comes_near_the_best_fixed_length(name, probability, rows):
    device = Device(DEVICES[name], [probability] * rows)
    device.run(300)
    assert device.run(2000 if rows == 1 else 600) > 0.9 * best_fixed(DEVICES[name], [probability] * rows)


def test_requests_with_better_drafts_get_more_of_them():
    device = Device(lambda rows, tokens: 0.005 + 0.0003 * tokens, [0.95] * 4 + [0.05] * 12)
    device.run(200)
    assert device.run(800) > 1.2
    planned = device.speculation.plan([Decoding(key, 0, 7) for key in device.keys])
    assert sum(planned[str(i)].num_drafts for i in range(4)) > 12
    assert sum(proposal.num_drafts for proposal in planned.values()) < 36


def test_a_large_batch_on_a_device_at_its_limit_asks_for_no_drafts():
    device = Device(lambda rows, tokens: 0.001 * tokens, [0.7] * 128)
    device.run(300)
    verified, asked = device.num_verifying, device.num_asked
    device.run(640)
    assert device.num_verifying - verified < 10
    assert device.num_asked - asked <= 50


def test_drafts_come_back_when_verification_becomes_cheap():
    device = Device(without_graphs, [0.4] * 8)
    assert device.run(1000) > 0.97
    device.cost = gpu
    device.run(2000)
    assert device.run(500) > 1.25


def test_drafts_come_back_when_they_become_right():
    device = Device(linear, [0.1] * 2)
    device.run(1000)
    device.cost = gpu
    for key in device.keys:
        device.keys[key] = 0.9
    device.run(1500)
    assert device.run(500) > 2.5


def test_drafts_go_when_verification_becomes_dear():
    device = Device(gpu, [0.7] * 8)
    assert device.run(500) > 2
    device.cost = linear
    assert device.run(1500) > 0.97


def test_a_slow_first_step_of_each_size_does_not_end_it():
    seen: dict[tuple[int, int], int] = {}

    def warming(rows: int, tokens: int) -> float:
        seen[rows, tokens] = times = seen.get((rows, tokens), 0) + 1
        return gpu(rows, tokens) + (0.012 if tokens > rows and times <= 2 else 0)

    device = Device(warming, [0.8])
    assert device.run(300) > 1.3
    assert device.run(1000) > 0.9 * best_fixed(gpu, [0.8])


def test_guesses_of_tokens_in_flight_come_first():
    device = Device(flat, [1.0] * 2)
    device.run(50)
    planned = device.speculation.plan([Decoding("0", 2, 7), Decoding("1", 0, 3)])
    assert (planned["0"].num_drafts, len(planned["0"].token_ids)) == (7, 9)
    assert (planned["1"].num_drafts, len(planned["1"].token_ids)) == (3, 3)


def test_rows_that_may_not_have_drafts_get_none():
    device = Device(flat, [1.0] * 2)
    device.run(50)
    device.speculation.ended("1")
    device.speculation.ended("1")
    planned = device.speculation.plan([Decoding("0", 0, 0), Decoding("1", 0, 7)])
    assert planned == {}


def test_a_number_of_rows_like_another_need_not_be_measured_first():
    device = Device(gpu, [0.8] * 16)
    device.run(200)
    for key in ("3", "9"):
        device.speculation.ended(key)
        del device.keys[key], device.tokens[key]
    assert device.run(8) > 1.5


@pytest.mark.parametrize("name", DEVICES)
def test_changing_numbers_of_rows_do_not_make_it_slower(name):
    device = Device(DEVICES[name], [0.5] * 24, noise=0.1)
    everyone = dict(device.keys)
    for rows in [24, 9, 16, 3, 12, 20, 1, 7] * 12:
        device.keys = dict(list(everyone.items())[:rows])
        device._step(None)
    before = device.seconds, device.plain_seconds
    for rows in [24, 9, 16, 3, 12, 20, 1, 7] * 120:
        device.keys = dict(list(everyone.items())[:rows])
        device._step(None)
    assert (device.plain_seconds - before[1]) / (device.seconds - before[0]) > 0.97


def test_counters_by_position():
    device = Device(flat, [0.5] * 4, seed=5)
    device.run(500)
    counters = device.speculation.counters
    by_position = counters.accepted_by_position
    assert counters.num_accepted_tokens == sum(by_position) > 0
    assert list(by_position) == sorted(by_position, reverse=True)
    assert 0.4 < by_position[0] / counters.num_drafts < 0.6


def test_the_same_history_gives_the_same_drafts():
    totals = set()
    for _ in range(2):
        device = Device(gpu, [0.3, 0.9, 0.6], noise=0.2, seed=11)
        device.run(400)
        totals.add((device.seconds, device.speculation.counters.num_draft_tokens))
    assert len(totals) == 1
