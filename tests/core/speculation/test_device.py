"""Draft lengths where the workers draft: many for good drafts, none for useless ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from raylm.config.speculation import SpeculationConfig
from raylm.core.drafting import Drafter
from raylm.core.options import RequestOptions
from raylm.core.speculation import RequestDrafter, make_drafter

_STEPS = 400
_PLAIN_S, _VERIFYING_S = 0.005, 0.007


@dataclass(eq=False)
class _Request:
    """What a drafter reads of a request."""

    max_len: int = 10_000
    num_known: int = 10
    num_in_flight: int = 0
    token_ids: list[int] = field(default_factory=list)
    options: RequestOptions = field(default_factory=RequestOptions)

    @property
    def id(self) -> str:
        return str(id(self))

    def forced_tokens(self) -> list[int]:
        return []


def on_device(num_drafts: int) -> Drafter:
    drafter = make_drafter(SpeculationConfig(method="mtp", num_drafts=num_drafts))
    assert drafter is not None
    return drafter


def _run(drafter: Drafter, requests: list[_Request], probability: float) -> tuple[float, int]:
    """Steps in which each draft is right with a probability; tokens a second, and the steps that verified."""
    random, seconds, num_sampled, num_verifying = Random(0), 0.0, 0, 0
    for request in requests:
        drafter.begin(request)
    for _ in range(_STEPS):
        proposals = drafter.plan(requests) if drafter.is_on(len(requests)) else {}
        gave = 0
        for request in requests:
            proposal = proposals.get(request)
            accepted = 0
            if proposal is not None:
                assert not proposal.token_ids
                while accepted < proposal.num_drafts and random.random() < probability:
                    accepted += 1
                drafter.settle(request, proposal, accepted)
            gave += 1 + accepted
            request.num_known += 1 + accepted
        num_tokens = len(requests) + sum(proposal.num_drafts for proposal in proposals.values())
        took = _VERIFYING_S if proposals else _PLAIN_S
        drafter.observe(len(requests), num_tokens, gave, took)
        seconds, num_sampled, num_verifying = seconds + took, num_sampled + gave, num_verifying + bool(proposals)
    for request in requests:
        drafter.end(request)
    return num_sampled / seconds, num_verifying


@pytest.mark.parametrize("num_rows", [1, 8])
def test_good_drafts_are_used_and_useless_ones_are_not(num_rows: int) -> None:
    plain = num_rows / _PLAIN_S
    good, useless = on_device(4), on_device(4)
    speed, num_verifying = _run(good, [_Request() for _ in range(num_rows)], 0.9)
    assert speed > 2 * plain and num_verifying > 0.9 * _STEPS
    drafted, accepted = good.counters.num_draft_tokens, good.counters.num_accepted_tokens
    assert good.counters.num_drafts > 0 and 0.6 * drafted < accepted < drafted
    assert sum(good.counters.accepted_by_position) == accepted
    assert list(good.counters.accepted_by_position) == sorted(good.counters.accepted_by_position, reverse=True)
    speed, num_verifying = _run(useless, [_Request() for _ in range(num_rows)], 0.0)
    assert speed > 0.95 * plain and num_verifying < 0.2 * _STEPS


def test_no_drafts_past_the_end_of_a_request() -> None:
    drafter, last = on_device(7), _Request()
    _run(drafter, [last], 1.0)
    drafter.begin(last)
    for left, most in ((5, 4), (2, 1), (1, 0)):
        last.max_len = last.num_known + left
        proposal = drafter.plan([last]).get(last)
        assert (proposal.num_drafts if proposal is not None else 0) <= most


def test_methods_of_models_have_a_drafter() -> None:
    assert isinstance(make_drafter(SpeculationConfig(method="eagle3", model="x")), RequestDrafter)
    assert make_drafter(SpeculationConfig()) is None
