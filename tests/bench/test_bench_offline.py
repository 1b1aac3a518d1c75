from __future__ import annotations

import json

import pytest

from raylm.bench import offline
from raylm.bench.cases import Dataset, Request, parse_case
from raylm.bench.compare import in_turns
from raylm.bench.offline import RaylmRunner, TokenRequest, Workload, measure, run_case, run_in_turns
from raylm.bench.plot import check_plot, draw
from raylm.bench.report import CompareResult, Report, StartupResult, as_json, percentile
from raylm.errors import ConfigError, RaylmError
from tests.support.fake_llm import FakeLLM

KEYS = {
    "bench",
    "model",
    "case",
    "requests",
    "input_len",
    "output_len",
    "seconds",
    "output_tokens_per_s",
    "total_tokens_per_s",
}


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_a_case_runs_warmed_up_and_gives_the_keys(mode):
    llm = FakeLLM()
    row = as_json(run_case(llm, parse_case("a:3:6:4"), mode, repeat=2))
    assert set(row) == KEYS
    assert (row["bench"], row["case"], row["requests"], row["input_len"], row["output_len"]) == (mode, "a", 3, 6, 4)
    sizes = [len(prompts) for prompts, _ in llm.calls]
    assert sizes == ([2, 3, 3] if mode == "throughput" else [2, 1, 1, 1, 1, 1, 1])
    _, params = llm.calls[-1]
    assert params[0].ignore_eos and params[0].is_greedy and params[0].max_tokens == 4


def test_ways_of_sampling_take_turns_over_the_same_requests():
    llm = FakeLLM()
    ways = ["{}", '{"temperature": 0.8, "logprobs": 5}']
    rows = [as_json(found) for found in run_in_turns(llm, parse_case("a:3:6:4"), "throughput", ways, repeat=2)]
    assert [row["sampling"] for row in rows] == ways
    measured = llm.calls[2:]
    assert [params[0].temperature for _, params in measured] == [0, 0.8, 0, 0.8]
    assert measured[0][0] == measured[1][0] != measured[2][0] == measured[3][0]
    assert measured[1][1][0].logprobs == 5 and measured[1][1][0].max_tokens == 4
    assert llm.num_resets == 4


@pytest.mark.parametrize("wrong", ["temperature=1", "[]", '{"heat": 1}'])
def test_a_way_of_sampling_is_json_of_known_fields(wrong):
    with pytest.raises(ConfigError, match="--sampling"):
        run_in_turns(FakeLLM(), parse_case("a:3:6:4"), "throughput", [wrong])


def test_no_prompt_comes_twice():
    llm = FakeLLM()
    run_case(llm, parse_case("a:2:20:4"), "throughput", repeat=2)
    prompts = [tuple(prompt) for batch, _ in llm.calls for prompt in batch]
    assert len(set(prompts)) == len(prompts) == 6


def test_rates_count_requested_tokens(monkeypatch):
    monkeypatch.setattr(offline, "measure", lambda runner, requests, mode: 2.0)
    row = as_json(run_case(FakeLLM(), parse_case("a:5:6:8-128"), "throughput"))
    assert row["output_len"] == "8-128" and row["output_len_mean"] == 68
    assert row["output_tokens_per_s"] == 5 * 68 / 2
    assert row["total_tokens_per_s"] == (5 * 68 + 5 * 6) / 2


def test_a_dataset_is_tokenised():
    entries = (Request("ab", 3), Request([{"role": "user", "content": "abcd"}], 5), Request([7, 8, 9], 5))
    llm = FakeLLM()
    row = as_json(run_case(llm, Dataset("mine", entries), "throughput"))
    assert [len(prompt) for prompt in llm.calls[-1][0]] == [2, 4, 3]
    assert (row["requests"], row["input_len"], row["output_len"]) == (3, 3, "3-5")


def test_too_few_tokens_are_an_error(monkeypatch):
    monkeypatch.setattr(FakeLLM, "short", 1)
    with pytest.raises(RaylmError, match="generated 3 tokens where 4"):
        run_case(FakeLLM(), parse_case("a:3:6:4"), "throughput")


class Other:
    def __init__(self, name, order, fail_at=None):
        self.name = name
        self.order = order
        self.fail_at = fail_at
        self.runs = 0

    def run(self, requests):
        self.runs += 1
        if self.runs == self.fail_at:
            raise ValueError("it does not\nrun here")
        self.order.append(self.name)
        return float(len(self.name))


def test_programs_take_turns_and_a_failure_is_reported():
    order = []
    runners = [Other("a", order), Other("b", order), Other("c", order, fail_at=2)]
    workload = Workload(parse_case("x:1:2:3"), lambda repetition: [TokenRequest([1, 2], 3)])
    seconds, failures = in_turns(runners, workload, "throughput", repeat=2)
    assert order == ["a", "b", "c", "a", "b", "a", "b"]
    assert seconds == {"a": 1.0, "b": 1.0}
    assert failures == {"c": "ValueError: it does not run here"}


def test_a_comparison_that_could_not_run_says_why():
    row = as_json(CompareResult("compare", "a", "generate_batch", 10.0, None, None, "ValueError: no"))
    assert row["unavailable"] == "ValueError: no" and row["ratio"] is None
    row = as_json(CompareResult("compare", "a", "static", 10.0, 5.0, 2.0))
    assert set(row) == {"bench", "case", "against", "raylm_tokens_per_s", "other_tokens_per_s", "ratio"}


def test_latency_runs_one_request_at_a_time():
    llm = FakeLLM()
    measure(RaylmRunner(llm), [TokenRequest([1], 2), TokenRequest([2], 2)], "latency")
    assert [prompts for prompts, _ in llm.calls] == [[[1]], [[2]]]


def test_percentiles():
    assert percentile([], 0.5) is None
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile(list(range(101)), 0.9) == 90


def test_a_report_prints_json_lines_and_tables(tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    report = Report(path)
    report.add(run_case(FakeLLM(), parse_case("a:3:6:4"), "throughput"))
    report.add(StartupResult("startup", "m", 1.25, {"import": 0.5, "weights": 0.75}))
    report.print_tables()
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert captured.out == path.read_text()
    assert lines[1] == {"bench": "startup", "model": "m", "ready_s": 1.25, "phases": {"import": 0.5, "weights": 0.75}}
    assert "throughput fake" in captured.err and "weights" in captured.err
    with pytest.raises(ConfigError, match="--output"):
        Report(tmp_path / "no" / "out.jsonl")


def test_a_table_too_wide_for_the_terminal_stands_upright(monkeypatch, capsys):
    phases = {f"phase{index}": float(index) for index in range(20)}
    report = Report(None)
    report.add(StartupResult("startup", "m", 1.25, phases))
    for columns, first_line in (("300", "phase19"), ("60", "ready s")):
        monkeypatch.setenv("COLUMNS", columns)
        report.print_tables()
        heading = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("┃"))
        assert first_line in heading
        assert ("phase0" in heading) == (columns == "300")


def test_plots(tmp_path, monkeypatch):
    path = tmp_path / "out.png"
    check_plot(path)
    draw([run_case(FakeLLM(), parse_case("a:3:6:4"), "throughput")], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="must end with"):
        check_plot(tmp_path / "out.txt")
    with pytest.raises(ConfigError, match="no folder"):
        check_plot(tmp_path / "no" / "out.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="plot extra"):
        check_plot(path)
