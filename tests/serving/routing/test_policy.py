"""What holds of every choice of an engine, whatever the engines are."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylm.config.routing import RoutingConfig
from raylm.core.block_hash import PrefixForm
from raylm.core.load import Load
from raylm.engine.backlog import Backlog
from raylm.serving.routing.policy import Candidate, Policy, Request
from raylm.serving.routing.selector import EngineView, Prompt, Selector

CONFIG = RoutingConfig()
FORM = PrefixForm("model", 16, "xxhash", 0)

candidates = st.lists(
    st.builds(Candidate, st.uuids().map(str), st.integers(0, 50_000), st.integers(0, 300), st.integers(0, 8_192)),
    min_size=2,
    max_size=6,
    unique_by=lambda each: each.engine_id,
)
requests = st.builds(Request, st.integers(8_192, 20_000), st.sampled_from(["", "one", "two"]), st.binary(max_size=8))


def idle(count: int) -> list[Candidate]:
    return [Candidate(f"engine-{number}", 0, 0) for number in range(count)]


@given(candidates, requests, st.sampled_from(["prefix", "load"]))
def test_no_overloaded_engine_gets_a_request_and_another_ingress_picks_alike(candidates, request, policy):
    config = RoutingConfig(policy=policy)
    picked = Policy(config).pick(candidates, request)
    chosen, count = candidates[picked.at], len(candidates)
    sequences = (1 + sum(each.num_sequences for each in candidates)) / count
    tokens = sum(each.num_tokens for each in candidates) / count
    fit = [
        each
        for each in candidates
        if each.num_sequences + 1 <= max(1.25 * sequences, sequences + config.slack_sequences)
        and each.num_tokens <= max(1.25 * tokens, tokens + config.slack_tokens)
    ]
    assert not fit or chosen in fit
    works = [Policy(config).work(each) for each in candidates]
    turned = candidates[::-1]
    again = Policy(config).pick(turned, request)
    if policy == "prefix" or picked.reason == "affinity" or works.count(min(works)) == 1:
        assert turned[again.at].engine_id == candidates[picked.at].engine_id


@given(candidates, requests)
def test_a_cached_prefix_is_worth_the_tokens_that_it_saves_as_often_as_configured(candidates, request):
    request = request._replace(session="")
    policy = Policy(CONFIG)
    picked = policy.pick(candidates, request)
    works = [policy.work(each) for each in candidates]
    worth = CONFIG.prefix_weight
    costs = [works[at] - worth * candidates[at].matched for at in policy.not_overloaded(candidates)]
    assert works[picked.at] - worth * candidates[picked.at].matched <= min(costs) + CONFIG.sequence_tokens / 2


def test_a_session_stays_where_it_is_until_that_engine_is_overloaded():
    engines = idle(4)
    policy = Policy(CONFIG)
    homes = {f"session-{n}": policy.pick(engines, Request(100, f"session-{n}")) for n in range(400)}
    assert {picked.reason for picked in homes.values()} == {"affinity"}
    spread = Counter(picked.at for picked in homes.values())
    assert len(spread) == 4 and max(spread.values()) < 140
    smaller = engines[:3]
    for session, picked in homes.items():
        if picked.at < 3:
            assert policy.pick(smaller, Request(100, session)).at == picked.at, "only those of the lost engine move"
    busy = [each._replace(num_sequences=100 if at == homes["session-0"].at else 0) for at, each in enumerate(engines)]
    away = policy.pick(busy, Request(100, "session-0"))
    assert away.at != homes["session-0"].at and away.reason == "load"


def test_new_prompts_spread_and_equal_ones_stay_together_while_nothing_is_known():
    policy = Policy(CONFIG)
    spread = Counter(policy.pick(idle(4), Request(100, part=str(n).encode())).at for n in range(400))
    assert len(spread) == 4 and max(spread.values()) < 140
    assert len({policy.pick(idle(4), Request(100, part=b"same")).at for _ in range(10)}) == 1


def test_round_robin_and_power_of_two():
    turns = Policy(RoutingConfig(policy="round_robin"))
    assert Counter(turns.pick(idle(4), Request(100)).at for _ in range(40)) == dict.fromkeys(range(4), 10)
    loaded = [Candidate(f"engine-{n}", 0, 10 * n) for n in range(4)]
    two = Policy(RoutingConfig(policy="power_of_two"))
    taken = Counter(two.pick(loaded, Request(100)).at for _ in range(600))
    assert taken[0] > taken[1] > taken[2] > taken[3] == 0


@given(st.lists(st.tuples(st.sampled_from(["send", "take", "drop", "report", "lose"]), st.integers(0, 5)), max_size=60))
def test_what_was_sent_counts_once_until_a_report_holds_it(steps):
    backlog, on_the_way, taken = Backlog(), {}, {}
    waiting = 0
    for number, (what, name) in enumerate(steps):
        if what == "send":
            if name in on_the_way or name in taken:
                continue
            backlog.send(str(name), 10 + number, 1)
            on_the_way[name] = 10 + number
        elif what == "take":
            backlog.take(str(name))
            if name in on_the_way:
                taken[name] = on_the_way.pop(name)
        elif what == "drop":
            backlog.drop(str(name))
            on_the_way.pop(name, None)
        elif what == "report":
            waiting = 100 * number
            backlog.report(Load(1, number, 0.5, waiting_tokens=waiting))
            taken.clear()
        else:
            backlog.lose()
            on_the_way.clear()
            taken.clear()
        assert backlog.num_tokens == waiting + sum(on_the_way.values()) + sum(taken.values())
        assert backlog.num_sequences == backlog.load.running + backlog.load.waiting + len(on_the_way) + len(taken)


def views(count: int, form: PrefixForm | None = FORM) -> list[EngineView]:
    return [EngineView(f"engine-{number}", Backlog(), form, CONFIG) for number in range(count)]


def test_requests_with_one_new_prefix_go_together_before_any_engine_says_a_word():
    config = RoutingConfig(slack_sequences=8)
    engines, selector = views(4), Selector(config, clock=lambda: 0.0)
    chosen = []
    for number in range(3):
        selected = selector.select(engines, Prompt([7] * 4000 + [100 + number] * 40))
        engines[selected.at].backlog.send(str(number), 4040 - selected.matched_tokens, 1)
        chosen.append(selected)
    assert len({each.at for each in chosen}) == 1
    assert [each.matched_tokens for each in chosen] == [0, 3072, 4000]
    assert selector.counts.by_reason == {"load": 1, "prefix": 2}
    assert selector.counts.matched_tokens == 7072 and selector.counts.prompt_tokens == 3 * 4040


def test_salts_share_nothing():
    engines, selector = views(4), Selector(CONFIG, clock=lambda: 0.0)
    selector.select(engines, Prompt([7] * 4000, salt="mine"))
    assert selector.select(engines, Prompt([7] * 4000, salt="mine")).matched_tokens
    assert not selector.select(engines, Prompt([7] * 4000, salt="theirs")).matched_tokens
    assert not selector.select(engines, Prompt([7] * 4000, salt="mine", adapter="other")).matched_tokens


@pytest.mark.parametrize("form", [None, FORM])
def test_one_engine_is_no_choice_and_engines_that_tell_nothing_are_chosen_by_load(form):
    engines, selector = views(3, form), Selector(CONFIG, clock=lambda: 0.0)
    assert selector.select(engines[:1], Prompt([7] * 4000)) == (0, "only", 0)
    engines[0].backlog.report(Load(30, 0, 0.5))
    engines[2].backlog.report(Load(30, 0, 0.5))
    assert selector.select(engines, Prompt([7] * 4000)) == (1, "load", 0)
