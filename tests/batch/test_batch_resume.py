"""A batch that is killed goes on where it was, whenever that happens; another's work is left alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raylm.batch.job import run_batch
from raylm.batch.work import WorkFolder
from raylm.errors import ConfigError, RaylmError
from tests.batch.batch_fakes import (
    answer_of,
    chat_line,
    completion_line,
    in_process,
    read_results,
    settings,
    write_lines,
)

LINES = [
    chat_line("a"),
    completion_line("b"),
    b"{bad",
    "tell me",
    chat_line("a"),
    chat_line("long", "x" * 70),
    *(completion_line(f"c{number}") for number in range(4)),
]


def never(*arguments):
    raise AssertionError("nothing is left to be done")


@pytest.mark.parametrize("kind", ["jsonl", pytest.param("parquet", marks=pytest.mark.nightly)])
def test_killed_at_any_moment_it_loses_and_repeats_nothing(tmp_path, kind):
    source = write_lines(tmp_path / "in.jsonl", LINES)
    if kind == "parquet":
        rows = [line | {"body": json.dumps(line["body"])} for line in LINES if isinstance(line, dict)]
        source = tmp_path / "in.parquet"
        pq.write_table(pa.Table.from_pylist(rows), source)
    run_batch(settings(source, tmp_path / "expected.jsonl"), in_process)
    expected = [answer_of(result) for result in read_results(tmp_path / "expected.jsonl")]
    folder = tmp_path / "moments"
    folder.mkdir()
    command = [sys.executable, "-m", "tests.batch.killed_batches", str(folder), str(source), ".jsonl"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    moments = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(moments) > 25
    assert [moment["status"] for moment in moments] == [-signal.SIGKILL] * (len(moments) - 1) + [0]
    for number, moment in enumerate(moments):
        assert moment["again"] == 0, (number, result.stderr)
        assert not set(moment["begun"]) & set(moment["finished"]), number
        assert moment["left"] == ["manifest.json", "out.jsonl"], number
        found = [answer_of(result) for result in read_results(folder / str(number) / "out.jsonl")]
        assert found == expected, number
    assert any(moment["finished"] and moment["begun"] for moment in moments)


def test_a_batch_that_is_complete_is_not_run_again(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", LINES)
    output = tmp_path / "out.jsonl"
    first = run_batch(settings(source, output), in_process)
    before = output.read_bytes()
    second = run_batch(settings(source, output), never)
    assert output.read_bytes() == before
    assert second.totals == first.totals
    assert (first.resumed, second.resumed) == (0, len(LINES))
    output.unlink()
    run_batch(settings(source, output), in_process)
    assert len(read_results(output)) == len(LINES)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"shard_size": 3}, "shard_size"), ({"max_tokens": 3}, "max_tokens"), ({"input": "other.jsonl"}, "input")],
)
def test_another_batchs_work_is_refused_unless_told(tmp_path, change, field):
    source = write_lines(tmp_path / "in.jsonl", LINES)
    write_lines(tmp_path / "other.jsonl", LINES[:-1])
    if "input" in change:
        change = {"input": str(tmp_path / "other.jsonl")}
    output = tmp_path / "out.jsonl"

    def fails(todo, job, folder):
        yield next(in_process(todo, job, folder))
        raise RaylmError("stopped")

    with pytest.raises(RaylmError, match="stopped"):
        run_batch(settings(source, output), fails)
    with pytest.raises(ConfigError, match=f"the work of another batch: its {field} is"):
        run_batch(settings(source, output, **change), never)
    summary = run_batch(settings(source, output, **change, overwrite=True), in_process)
    assert summary.resumed == 0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_folder_without_an_answer_is_nobodys_work(tmp_path, kind):
    source = write_lines(tmp_path / "in.jsonl", LINES)
    if kind == "parquet":
        source = tmp_path / "in.parquet"
        pq.write_table(pa.Table.from_pylist([{"prompt": str(number)} for number in range(len(LINES))]), source)
    output = tmp_path / "out.jsonl"

    def fails(todo, job, folder):
        raise RaylmError("no such model")
        yield

    with pytest.raises(RaylmError, match="no such model"):
        run_batch(settings(source, output), fails)
    assert run_batch(settings(source, output, max_tokens=3), in_process).totals.lines == len(LINES)
    with pytest.raises(ConfigError, match="the work of another batch: its max_tokens is 3"):
        run_batch(settings(source, output), never)


def test_an_output_of_unknown_origin_is_not_replaced(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", LINES)
    output = write_lines(tmp_path / "out.jsonl", ["mine"])
    with pytest.raises(ConfigError, match="is there already"):
        run_batch(settings(source, output), never)
    assert read_results(output) == ["mine"]
    run_batch(settings(source, output, overwrite=True), in_process)
    assert len(read_results(output)) == len(LINES)


def test_results_that_are_not_where_they_should_be_are_missed(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", LINES)

    def elsewhere(todo, job, folder):
        yield from in_process(todo, job, folder)
        WorkFolder(folder.place).place.__truediv__("shard-00000001.jsonl").remove()

    with pytest.raises(RaylmError, match="shard 1 are not in .*storage that all of them share"):
        run_batch(settings(source, tmp_path / "out.jsonl"), elsewhere)

    def too_short(todo, job, folder):
        yield from in_process(todo, job, folder)
        with (folder.place / "shard-00000001.jsonl").writer():
            pass

    with pytest.raises(RaylmError, match="shard 1 has 0 results for 4 lines"):
        run_batch(settings(source, tmp_path / "out.jsonl"), too_short)
    assert not (tmp_path / "out.jsonl").exists()


def test_engines_that_die_again_and_again_end_the_run(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", LINES)

    def dying(todo, job, folder):
        folder.forget_lives()
        for _ in range(4):
            folder.note_life(3)
        return in_process(todo, job, folder)

    with pytest.raises(RaylmError, match="3 engines were started in this run, and died"):
        run_batch(settings(source, tmp_path / "out.jsonl"), dying)
    assert run_batch(settings(source, tmp_path / "out.jsonl"), in_process).totals.lines == len(LINES)
