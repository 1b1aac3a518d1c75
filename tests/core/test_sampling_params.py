"""What SamplingParams takes, and what of it goes to the workers."""

from __future__ import annotations

import pytest

from raylm.core.request import Request
from raylm.core.sampling import SamplingParams
from raylm.core.step import RowPenalties
from raylm.errors import RequestRejected


@pytest.mark.parametrize(
    ("name", "bounds", "allowed", "refused"),
    [
        ("presence_penalty", "[-2, 2]", [-2, -0.5, 0, 2.0], [-2.001, 2.5, True, None, "1", float("nan")]),
        ("frequency_penalty", "[-2, 2]", [-2, -0.5, 0, 2.0], [-2.001, 2.5, False, None, "1", float("inf")]),
        ("repetition_penalty", "(0, 2]", [1e-9, 1, 2.0], [0, -1, 2.001, True, None, "1", float("nan")]),
    ],
)
def test_limits_of_penalties(name, bounds, allowed, refused):
    for value in allowed:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(RequestRejected) as error:
            SamplingParams(**{name: value})
        assert error.value.param == name
        assert str(error.value) == f"{name} must be a number in {bounds}, got {value!r}"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": -0.0}, None),
        ({"repetition_penalty": 1.5}, RowPenalties(3, 1.5, 0, 0)),
        ({"frequency_penalty": -1}, RowPenalties(3, 1, -1, 0)),
        ({"presence_penalty": 2, "frequency_penalty": 0.5}, RowPenalties(3, 1, 0.5, 2)),
        ({"presence_penalty": 2, "beam_width": 2}, None),
    ],
    ids=str,
)
def test_only_penalties_that_do_something_go_to_the_workers(fields, expected):
    request = Request("a", [5, 6, 7], SamplingParams(**fields), seed=0, stop_ids=frozenset(), max_len=9)
    assert request.sampling.penalties == expected
