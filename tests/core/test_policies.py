"""The order of service: what each policy promises, and the fairness bound on a small machine of its own."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.config.engine import SchedulerConfig
from raylm.core.options import RequestOptions
from raylm.core.policies import (
    OUTPUT_TOKEN_COST,
    PROMPT_TOKEN_COST,
    FairPolicy,
    FCFSPolicy,
    PriorityPolicy,
    make_policy,
)
from raylm.core.request import Request
from raylm.core.sampling import SamplingParams

orders = count(1)


def make_request(
    tenant: str = "", *, priority: int = 0, prompt: int = 1, output: int = 1, arrived: float = 0.0
) -> Request:
    order = next(orders)
    request = Request(
        f"r{order}",
        [1] * prompt,
        SamplingParams(),
        seed=0,
        stop_ids=frozenset(),
        max_len=prompt + output,
        options=RequestOptions(tenant=tenant, priority=priority),
        arrived=arrived,
    )
    request.order = order
    return request


def add(policy, *requests: Request) -> None:
    for request in requests:
        policy.add(request)


def take(policy) -> Request:
    """Admit the first."""
    request = policy.first()
    policy.remove(request)
    return request


def take_all(policy) -> list[Request]:
    return [take(policy) for _ in range(len(policy))]


POLICIES = {"fcfs": FCFSPolicy, "priority": PriorityPolicy, "fair": FairPolicy}


@pytest.mark.parametrize("name", POLICIES)
def test_the_configuration_names_the_policy(name):
    assert type(make_policy(SchedulerConfig(policy=name))) is POLICIES[name]


# What every policy does.


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_every_policy_keeps_exactly_those_who_wait(name, data):
    """Random calls beside a plain set: nobody is lost, served twice or miscounted, and whoever waits is offered."""
    policy = make_policy(SchedulerConfig(policy=name))
    waiting: dict[Request, None] = {}
    out: list[Request] = []
    for now in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["add", "add", "admit", "abort", "put back", "serve"]))
        if action == "add":
            tenant, priority = data.draw(st.sampled_from("abc")), data.draw(st.integers(-2, 2))
            request = make_request(tenant, priority=priority, prompt=data.draw(st.integers(1, 9)), arrived=float(now))
            add(policy, request)
            waiting[request] = None
        elif action == "put back" and out:
            request = out.pop()
            policy.put_back(request)
            waiting[request] = None
        elif action == "serve" and out:
            policy.served(data.draw(st.sampled_from(out)), data.draw(st.integers(0, 9)), data.draw(st.integers(0, 2)))
        elif action in ("admit", "abort") and waiting:
            request = policy.first() if action == "admit" else data.draw(st.sampled_from(list(waiting)))
            policy.remove(request)
            del waiting[request]
            out.append(request)
        assert len(policy) == len(waiting)
        if data.draw(st.booleans()):
            first = policy.first()
            assert first in waiting if waiting else first is None
    assert set(take_all(policy)) == set(waiting)
    assert policy.first() is None


@pytest.mark.parametrize("name", POLICIES)
def test_who_does_not_wait_cannot_be_taken_out(name):
    policy = make_policy(SchedulerConfig(policy=name))
    request = make_request()
    add(policy, request)
    take(policy)
    with pytest.raises(KeyError):
        policy.remove(request)


@pytest.mark.parametrize("name", POLICIES)
def test_what_was_preempted_goes_before_newcomers_of_its_class(name):
    policy = make_policy(SchedulerConfig(policy=name))
    first, second, third = (make_request(arrived=float(i)) for i in range(3))
    add(policy, first, second)
    assert take(policy) is first
    add(policy, third)
    policy.put_back(first)
    assert take_all(policy) == [first, second, third]


# First come, first served.


def test_fcfs_serves_in_order_and_the_newest_gives_way():
    policy = FCFSPolicy()
    requests = [make_request() for _ in range(4)]
    add(policy, *requests)
    policy.remove(requests[1])
    assert take_all(policy) == [requests[0], requests[2], requests[3]]
    assert sorted(reversed(requests), key=policy.rank) == requests


# Priority.


def test_the_lowest_priority_goes_first_and_equals_in_their_order():
    policy = PriorityPolicy(ageing_s=10)
    late, urgent, early = make_request(priority=5), make_request(priority=-1), make_request(priority=0)
    later = make_request(priority=0)
    add(policy, late, urgent, early, later)
    assert take_all(policy) == [urgent, early, later, late]


def test_waiting_for_ageing_s_counts_as_one_priority():
    policy = PriorityPolicy(ageing_s=10)
    old = make_request(priority=3, arrived=0.0)
    just_before, just_after = make_request(priority=1, arrived=19.9), make_request(priority=1, arrived=20.1)
    add(policy, old, just_before, just_after)
    assert take_all(policy) == [just_before, old, just_after]


def test_ageing_ends_starvation():
    """One urgent newcomer for every admission would starve a patient one for ever without ageing."""
    policy = PriorityPolicy(ageing_s=2.0)
    patient = make_request(priority=4)
    add(policy, patient)
    for now in range(100):
        add(policy, make_request(priority=0, arrived=float(now)))
        if take(policy) is patient:
            break
    # Four priorities of two seconds each.
    assert now == 8


def test_the_newest_of_the_lowest_priority_gives_way_first():
    policy = PriorityPolicy(ageing_s=10)
    background, urgent, urgent_later = make_request(priority=9), make_request(priority=1), make_request(priority=1)
    background_later = make_request(priority=9)
    running = [background_later, urgent_later, background, urgent]
    assert sorted(running, key=policy.rank) == [urgent, urgent_later, background, background_later]


def test_the_heap_does_not_keep_requests_that_left():
    policy = PriorityPolicy(ageing_s=10)
    add(policy, make_request(priority=-5))
    for _ in range(1000):
        request = make_request()
        add(policy, request)
        policy.remove(request)
    assert len(policy._heap) < 100


# Fair.


class Machine:
    """A machine that runs up to `capacity` tokens of requests together, `budget` tokens a step with chunked prefill,
    for tenants that always have more to do. What tenants were given is counted here, not by the policy."""

    def __init__(
        self, policy: FairPolicy, tenants: str, *, capacity: int, budget: int, longest: int, seed: int
    ) -> None:
        self.policy = policy
        self.capacity, self.budget, self.longest = capacity, budget, longest
        self.random = random.Random(seed)
        self.running: list[Request] = []
        self.given: Counter[str] = Counter()
        for tenant in tenants:
            self.arrive(tenant)
            self.arrive(tenant)

    def arrive(self, tenant: str) -> None:
        # Tenants differ much in what they send: the first short prompts, the next long ones, and so on.
        prompt = self.random.randint(1, self.longest if ord(tenant) % 2 else max(1, self.longest // 8))
        add(self.policy, make_request(tenant, prompt=prompt, output=self.random.randint(1, self.longest)))

    def step(self) -> None:
        left = self.budget
        for request in self.running:
            left -= self.compute(request, left)
        while left > 0:
            request = self.policy.first()
            assert request is not None, "somebody waits"
            if sum(other.max_len for other in self.running) + request.max_len > self.capacity:
                break
            self.policy.remove(request)
            self.arrive(request.options.tenant)
            self.running.append(request)
            left -= self.compute(request, left)
        assert left < self.budget, "a step that does nothing"
        self.running = [request for request in self.running if request.num_known < request.max_len]

    def compute(self, request: Request, limit: int) -> int:
        num_tokens = min(request.num_known - request.num_computed, limit)
        num_prompt = min(num_tokens, max(0, request.num_prompt - request.num_computed))
        request.num_computed += num_tokens
        num_output = int(num_tokens > 0 and request.num_computed == request.num_known)
        request.num_known += num_output
        self.policy.served(request, num_prompt, num_output)
        self.given[request.options.tenant] += PROMPT_TOKEN_COST * num_prompt + OUTPUT_TOKEN_COST * num_output
        return num_tokens


@given(
    longest=st.integers(1, 40),
    room=st.integers(2, 8),
    budget=st.integers(1, 64),
    weight=st.sampled_from([1.0, 2.0, 5.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_the_fairness_bound_of_the_paper_holds(longest, room, budget, weight, seed):
    """Theorem 4.4: two backlogged tenants' service differs over any interval by 2 * max(w_p * L, w_q * M) at most; with
    weights, by that over the lesser weight. Its figure for L = 40 and M = 640: 2560, whatever the time."""
    policy = FairPolicy({"b": weight})
    capacity = room * 2 * longest
    machine = Machine(policy, "ab", capacity=capacity, budget=budget, longest=longest, seed=seed)
    bound = 2 * max(PROMPT_TOKEN_COST * longest, OUTPUT_TOKEN_COST * capacity) / min(1.0, weight)
    differences = [0.0]
    for _ in range(300):
        machine.step()
        differences.append(machine.given["a"] - machine.given["b"] / weight)
    # The greatest less the least is the greatest over all intervals.
    assert max(differences) - min(differences) <= bound


def test_a_machine_without_counters_breaks_the_bound():
    """The bound is no triviality: the same load first come, first served passes it."""
    policy = FCFSPolicy()
    machine = Machine(policy, "ab", capacity=160, budget=32, longest=40, seed=1)
    for _ in range(3000):
        machine.step()
    assert abs(machine.given["a"] - machine.given["b"]) > 2 * OUTPUT_TOKEN_COST * 160


def test_weights_are_respected():
    policy = FairPolicy({"b": 2.0})
    machine = Machine(policy, "abc", capacity=320, budget=32, longest=20, seed=3)
    for _ in range(3000):
        machine.step()
    assert machine.given["b"] / machine.given["a"] == pytest.approx(2, rel=0.05)
    assert machine.given["c"] / machine.given["a"] == pytest.approx(1, rel=0.05)


def test_a_requests_weight_is_its_tenants_from_then_on():
    policy = FairPolicy({"a": 4.0})
    a, b = make_request("a"), make_request("b")
    b.options = replace(b.options, weight=4.0)
    add(policy, a, b)
    for request, cost in ((a, 40), (b, 36)):
        policy.served(request, cost, 0)
    assert take(policy) is b
    again = make_request("a")
    again.options = replace(again.options, weight=0.1)
    add(policy, again)
    add(policy, later := make_request("b"))
    policy.served(again, 1, 0)
    assert take(policy) is later and take(policy) is a and take(policy) is again


def test_the_least_served_tenant_goes_first_and_its_requests_in_order():
    policy = FairPolicy({})
    a1, a2, b1, b2 = make_request("a"), make_request("a"), make_request("b"), make_request("b")
    add(policy, a1, a2, b1, b2)
    assert take(policy) is a1
    policy.served(a1, 10, 0)
    assert take(policy) is b1
    policy.served(b1, 4, 2)
    assert take(policy) is b2
    policy.served(b2, 4, 0)
    assert take(policy) is a2


def test_output_tokens_cost_twice():
    policy = FairPolicy({})
    a, b = make_request("a"), make_request("b")
    add(policy, a, b)
    policy.served(a, 0, 5)
    policy.served(b, 9, 0)
    assert policy.first() is b
    policy.served(b, 2, 0)
    assert policy.first() is a


def test_time_away_earns_no_credit():
    """`b` is away while `a` gets 1000; when it comes back they take turns, and `b` does not get 1000 first."""
    policy = FairPolicy({})
    turns = []
    add(policy, make_request("b"), make_request("a"))
    policy.served(take(policy), 1, 0)
    for _ in range(100):
        add(policy, make_request("a"))
        policy.served(take(policy), 10, 0)
    for _ in range(30):
        add(policy, make_request("a"), make_request("b"))
    for _ in range(20):
        request = take(policy)
        policy.served(request, 10, 0)
        turns.append(request.options.tenant)
    assert abs(turns.count("a") - turns.count("b")) <= 1


@pytest.mark.parametrize("known", [False, True])
def test_nobody_waiting_does_not_reset_the_count(known):
    """The queue runs empty for a moment after `a` got much; another starts from where `a` left, known or not."""
    policy = FairPolicy({})
    add(policy, *([make_request("other")] if known else []), make_request("a"))
    if known:
        policy.served(take(policy), 50, 0)
    policy.served(take(policy), 500, 0)
    assert policy.first() is None
    add(policy, *(make_request("other") for _ in range(50)), *(make_request("a") for _ in range(50)))
    turns = []
    for _ in range(20):
        request = take(policy)
        policy.served(request, 10, 0)
        turns.append(request.options.tenant)
    assert turns.count("a") == turns.count("other")


def test_who_took_more_than_others_is_not_forgiven_for_leaving():
    policy = FairPolicy({})
    add(policy, make_request("greedy"), make_request("a"))
    policy.served(take(policy), 1000, 0)
    add(policy, make_request("greedy"))
    assert policy.first().options.tenant == "a"


def test_tenants_that_left_are_forgotten():
    policy = FairPolicy({})
    for i in range(2000):
        add(policy, make_request(f"tenant {i}"))
        policy.served(take(policy), 5, 5)
        assert policy.num_tenants <= 3
    # Also those whose requests run on after they are forgotten.
    others = [make_request(f"other {i}") for i in range(50)]
    add(policy, *others)
    for _ in others:
        take(policy)
    for _ in range(10):
        for request in others:
            policy.served(request, 0, 1)
        add(policy, make_request("steady"))
        policy.served(take(policy), 100, 0)
    add(policy, make_request("steady"))
    policy.first()
    assert policy.num_tenants == 1


def test_a_tenant_that_is_forgotten_as_it_comes_back_is_served():
    """Its counter is the least of all just when its next request arrives."""
    policy = FairPolicy({})
    first, other, second = make_request("a"), make_request("b"), make_request("a")
    add(policy, first, other)
    policy.served(take(policy), 1, 0)
    assert policy.first() is other
    policy.served(other, 100, 0)
    add(policy, second)
    assert set(take_all(policy)) == {other, second}


def test_many_tenants_cost_a_step_no_more():
    """5000 tenants wait; a step that serves ten of them touches entries for ten of them, not for all."""
    policy = FairPolicy({})
    add(policy, *(make_request(f"tenant {i}") for i in range(5000)))
    running = [take(policy) for _ in range(10)]
    looks = CountingHeap(policy._heap)
    policy._heap = looks
    for request in running:
        policy.served(request, 1, 1)
    policy.first()
    assert looks.num_looks < 200


class CountingHeap(list):
    """Counts how often the front is looked at, which happens once for an entry brought up to date."""

    num_looks = 0

    def __getitem__(self, index):
        self.num_looks += 1
        return super().__getitem__(index)


def test_fair_ranks_by_admission():
    policy = FairPolicy({})
    first, second = make_request("a"), make_request("b")
    assert policy.rank(second) < policy.rank(first) < policy.rank(second)
