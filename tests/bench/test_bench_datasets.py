"""Datasets like users' requests, and when they arrive."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from statistics import mean, pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylm.bench.cases import Dataset, Lengths, Request, Turn
from raylm.bench.datasets import Shape, multi_turn_dataset, prefix_dataset, sharegpt_dataset
from raylm.bench.report import as_json
from raylm.bench.serve import Load, Target, sweep
from raylm.cli import main
from raylm.errors import ConfigError
from raylm.sim.arrivals import Ramp, arrivals
from tests.support.openai_server import FakeServer

RATES = st.floats(0.5, 50)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_as_their_mean_and_the_burstiness_in_their_variance(burstiness):
    times = arrivals(20_000, 5.0, 7, burstiness)
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert pvariance(gaps) / mean(gaps) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


@given(RATES, RATES, st.sampled_from(["linear", "exponential"]), st.integers(10, 1000))
def test_a_ramp_begins_with_one_rate_and_ends_with_the_other(start, end, growth, count):
    ramp = Ramp(start, end, growth)
    times = [ramp.at(index, count) for index in range(count + 2)]
    assert times[0] == 0 and all(a < b for a, b in pairwise(times))
    step = 1e-6
    assert step / ramp.at(step, count) == pytest.approx(start, rel=0.01)
    assert step / (ramp.at(count, count) - ramp.at(count - step, count)) == pytest.approx(end, rel=0.01)
    if not math.isclose(start, end, rel_tol=1e-3):
        middle = (start + end) / 2 if growth == "linear" else (start * end) ** 0.5
        whole = times[count]
        gained = whole / 2 * (start + middle) / 2 if growth == "linear" else count * (middle - start) / (end - start)
        assert ramp.at(gained, count) == pytest.approx(whole / 2, rel=1e-6)


def test_a_ramp_is_steeper_at_its_end():
    times = arrivals(2000, Ramp(2, 40), 3)
    assert times == arrivals(2000, Ramp(2, 40), 3)
    half = times[-1] / 2
    assert sum(time < half for time in times) / 2000 == pytest.approx((2 + 21) / 2 / 21 / 2, abs=0.04)


def test_prefixes_are_shared_within_groups():
    shape = Shape(requests=30, groups=3, prefix_len=20, input_len=Lengths(4, 8), output_len=Lengths(5, 9))
    dataset = prefix_dataset(shape, 1)
    assert dataset.entries == prefix_dataset(shape, 1).entries != prefix_dataset(shape, 2).entries
    systems = Counter(entry.prompt[0]["content"] for entry in dataset.entries)
    assert sorted(systems.values()) == [10, 10, 10]
    assert {len(text.split()) for text in systems} == {20}
    assert {len(entry.prompt[1]["content"].split()) for entry in dataset.entries} == set(range(4, 9))
    assert all(not entry.turns for entry in dataset.entries)
    assert (dataset.requests, dataset.output_label) == (30, "5-9")


def test_conversations_have_their_turns():
    shape = Shape(requests=20, groups=2, prefix_len=5, turns=Lengths(2, 4), think_s=3.0)
    dataset = multi_turn_dataset(shape, 1)
    counts = [1 + len(entry.turns) for entry in dataset.entries]
    assert set(counts) == {2, 3, 4} and dataset.requests == sum(counts)
    thinks = [turn.think_s for entry in dataset.entries for turn in entry.turns]
    assert 1.5 < mean(thinks) < 6
    assert dataset.redraw is not None and dataset.redraw(9).requests == dataset.requests


def test_a_turn_waits_for_the_answer_before():
    talk = Request([{"role": "user", "content": "one"}], 2, (Turn("two", 3, 0.01), Turn("three", 1)))
    other = Request([{"role": "user", "content": "hi"}], 1)
    results = []
    with FakeServer(cached=4).running() as server:
        target = Target(server.url, "fake", session_header="x-session-id")
        sweep(target, [Dataset("talks", (talk, other))], [Load(concurrency=1)], results.append)
        bodies = [body for path, body in server.requests if path == "/v1/chat/completions"]
        sessions = server.sessions[-4:]
    assert [[message["content"] for message in body["messages"]] for body in bodies] == [
        ["one"],
        ["one", " w w", "two"],
        ["one", " w w", "two", " w w w", "three"],
        ["hi"],
    ]
    assert [message["role"] for message in bodies[2]["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert len(set(sessions[:3])) == 1 and sessions[3] != sessions[0] and all(sessions)
    row = as_json(results[0])
    assert (row["requests"], row["failed"], row["hit_rate"], row["output_len"]) == (4, 0, 0.4, "1-3")


def test_a_failed_turn_ends_its_conversation():
    talk = Request([{"role": "user", "content": "one"}], 2, (Turn("two", 3), Turn("three", 1)))
    results = []
    with FakeServer(fail_every=6).running() as server:  # 4 requests warm up
        sweep(Target(server.url, "fake"), [Dataset("talks", (talk,))], [Load()], results.append)
        assert len(server.requests) == 6
    assert (results[0].requests, results[0].failed) == (3, 2)


def _sharegpt(tmp_path, entries):
    path = tmp_path / "share.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return str(path)


def _talk(*said):
    speakers = ("human", "gpt")
    return {"id": "x", "conversations": [{"from": speakers[i % 2], "value": text} for i, text in enumerate(said)]}


def test_sharegpt_is_read_as_it_is(tmp_path):
    long = "word " * 10
    path = _sharegpt(
        tmp_path,
        [
            _talk("Tell me of the sea, please", "a" * 41, "And of lakes?", "b" * 8, "unanswered"),
            {"conversations": [{"from": "system", "value": "s"}, *_talk(long, long)["conversations"]]},
            _talk("short", "x"),
            _talk("y" * 5000, long),
            {"items": []},
            7,
            {"conversations": [{"from": "gpt"}]},
        ],
    )
    entries = sharegpt_dataset(path, requests=10, turns=4, seed=0).entries
    by_first = {entry.prompt[0]["content"]: entry for entry in entries}
    assert set(by_first) == {"Tell me of the sea, please", long}
    talk = by_first["Tell me of the sea, please"]
    assert (talk.output_len, talk.turns) == (11, (Turn("And of lakes?", 2),))
    assert all(not entry.turns for entry in sharegpt_dataset(path, requests=10, turns=1, seed=0).entries)
    assert len(sharegpt_dataset(path, requests=1, turns=1, seed=0).entries) == 1


@pytest.mark.parametrize(
    ("content", "problem"), [("{", "not valid JSON"), ("{}", "must be a list"), ("[{}]", "holds no conversation")]
)
def test_files_that_are_not_sharegpts(tmp_path, content, problem):
    (tmp_path / "x.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        sharegpt_dataset(str(tmp_path / "x.json"), requests=1, turns=1, seed=0)


def test_the_command_line_runs_conversations(capsys):
    with FakeServer().running() as server:
        words = ["bench", "serve", "--url", server.url, "--dataset", "multi-turn", "--requests", "4", "--turns", "2"]
        assert main([*words, "--prefix-len", "3", "--ramp-up", "200:400:exponential", "--burstiness", "0.5"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["case"], row["requests"], row["failed"]) == ("multi-turn", 8, 0)
    assert row["request_rate"] == "200-400 exponential gamma 0.5"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--dataset", "sharegpt"], "needs --dataset-path"),
        (["--dataset", "prefix", "--turns", "3"], "--turns says nothing of --dataset prefix"),
        (["--groups", "3"], "--groups says nothing of --dataset random"),
        (["--dataset", "multi-turn", "--turns", "3-2"], "--turns '3-2' must be"),
        (["--dataset", "prefix", "--case", "a:1:1:1"], "leave out --case"),
        (["--ramp-up", "1:2", "--request-rate", "3"], "leave out --request-rate"),
        (["--burstiness", "2"], "needs --request-rate"),
    ],
)
def test_wrong_options(capsys, words, problem):
    assert main(["bench", "serve", *words]) != 0
    assert problem in capsys.readouterr().err
