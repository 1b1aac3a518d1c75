from __future__ import annotations

from statistics import mean

import pytest

from raylm.errors import ConfigError
from raylm.sim.cost import PRESETS, DeviceCost, parse_cost
from raylm.sim.traces import TRACES, make_trace


def test_a_cost_is_a_preset_or_four_numbers():
    assert parse_cost("h200-8b") is PRESETS["h200-8b"]
    assert parse_cost("5:20:10:30") == pytest.approx(DeviceCost(5e-3, 20e-6, 10e-6, 30e-9))
    assert DeviceCost(1.0, 0.1, 0.01, 0.001).seconds(2, 3, 4) == pytest.approx(1.234)


@pytest.mark.parametrize("text", ["h100", "1:2:3", "1:2:3:x", "0:1:1:1", "1:-1:1:1", "1:inf:1:1", "nan:1:1:1"])
def test_a_wrong_cost_is_refused(text):
    with pytest.raises(ConfigError, match=f"--cost '{text}' must be h200-8b or fixed_ms"):
        parse_cost(text)


@pytest.mark.parametrize(
    ("rows", "prompt", "output", "measured_ms"), [(1, 128, 256, 4.97), (32, 128, 256, 5.87), (256, 128, 512, 13.6)]
)
def test_the_preset_decodes_as_was_measured(rows, prompt, output, measured_ms):
    context = rows * (prompt + output // 2)
    assert PRESETS["h200-8b"].seconds(0, rows, context) * 1e3 == pytest.approx(measured_ms, rel=0.05)


def test_the_preset_prefills_as_was_measured():
    seconds = PRESETS["h200-8b"].seconds(8192, 0, 2 * 4096)
    assert 8192 / seconds == pytest.approx(41_410, rel=0.05)


@pytest.mark.parametrize("kind", TRACES)
def test_a_trace_is_fixed_by_its_seed_and_scaled_by_its_rate(kind):
    trace = make_trace(kind, rate=10, requests=2000, seed=1, prefix_share=0.5)
    assert trace == make_trace(kind, rate=10, requests=2000, seed=1, prefix_share=0.5)
    assert trace != make_trace(kind, rate=10, requests=2000, seed=2, prefix_share=0.5)
    assert all(one.at <= two.at for one, two in zip(trace, trace[1:], strict=False))
    assert len(trace) / trace[-1].at == pytest.approx(10, rel=0.1)
    assert all(one.num_shared == one.prompt_len // 2 for one in trace)
    faster = make_trace(kind, rate=20, requests=2000, seed=1, prefix_share=0.5)
    assert [one[1:] for one in faster] == [one[1:] for one in trace]
    assert {one.tenant for one in trace} == {traffic.tenant for traffic in TRACES[kind].traffic}


@pytest.mark.parametrize("kind", TRACES)
def test_lengths_and_shares_are_those_of_the_kind(kind):
    trace = make_trace(kind, rate=1, requests=10_000, seed=0)
    for traffic in TRACES[kind].traffic:
        mine = [one for one in trace if one.tenant == traffic.tenant]
        assert len(mine) / len(trace) == pytest.approx(traffic.share, rel=0.15)
        # What is cut off at the limit takes a little of the mean.
        assert mean(one.prompt_len for one in mine) == pytest.approx(traffic.prompt.mean, rel=0.1)
        assert mean(one.output_len for one in mine) == pytest.approx(traffic.output.mean, rel=0.1)
        assert max(one.prompt_len for one in mine) <= traffic.prompt.limit
        assert {one.priority for one in mine} == {traffic.priority}


def test_bursts_come_in_the_first_second_of_five():
    trace = make_trace("bursts", rate=50, requests=2000, seed=0)
    assert max(one.at % 5.0 for one in trace) <= 1.0 + 1e-9
    assert trace[-1].at == pytest.approx(2000 / 50, rel=0.15)
