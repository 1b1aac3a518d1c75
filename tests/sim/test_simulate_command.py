from __future__ import annotations

import json

import pytest

from raylm.cli import main

SMALL = ["simulate", "--requests", "30", "--rate", "10,30"]


def test_json_lines_and_a_table(capsys, tmp_path):
    path = tmp_path / "out.jsonl"
    words = ["--trace", "tenants", "--policy", "fcfs", "--policy", "fair", "--target-itl-ms", "off,20"]
    assert main([*SMALL, *words, "--output", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == path.read_text()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert len(rows) == 2 * 2 * 2 * 4
    assert {(row["policy"], row["target_itl_ms"]) for row in rows} == {
        ("fcfs", None),
        ("fcfs", 20.0),
        ("fair", None),
        ("fair", 20.0),
    }
    assert {row["tenant"] for row in rows} == {"all", "agents", "batch", "chat"}
    assert all(row["bench"] == "simulate" and row["ttft_ms_p50"] <= row["ttft_ms_p99"] for row in rows)
    assert "simulate" in captured.err


def test_the_same_seed_prints_the_same(capsys):
    def run(*words):
        assert main([*SMALL, *words]) == 0
        return capsys.readouterr().out

    assert run("--seed", "5") == run("--seed", "5") != run("--seed", "6")


@pytest.mark.parametrize("name", ["curves.png", "curves.svg"])
def test_a_picture(tmp_path, name, capsys):
    path = tmp_path / name
    assert main([*SMALL, "--trace", "long", "--plot", str(path)]) == 0
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--cost", "fast"], "--cost 'fast' must be h200-8b or"),
        (["--max-num-seqs", "0"], "key 'max_num_seqs' has the value 0"),
        (["--target-itl-ms", "-3"], "key 'target_itl_ms' has the value -3"),
        (["--num-blocks", "20"], "the KV cache has 19 blocks"),
        (["--deadline-s", "0"], "deadline_s must be a number of seconds over 0"),
        (["--plot", "x.png", "--rate", "5"], "give --rate at least two"),
        (["--plot", "x.txt"], "must end with .png"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, problem, capsys):
    assert main([*SMALL, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("raylm: ") and captured.err.count("\n") == 1
    assert problem in captured.err


@pytest.mark.parametrize("words", [["--rate", "inf"], ["--rate", "0"], ["--requests", "0"], ["--prefix-share", "2"]])
def test_what_no_load_can_be_is_refused(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", *words])
    assert exit_.value.code == 2
    assert words[0] in capsys.readouterr().err
