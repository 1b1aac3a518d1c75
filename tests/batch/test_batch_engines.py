"""How many engines a batch gets, and what becomes of one that dies; the command's options."""

from __future__ import annotations

import asyncio

import pytest
from batch_fakes import completion_line, fake_answerer, write_lines
from fakes import FakeExecutor

from raylm.batch.pool import plan_pool
from raylm.batch.requests import BatchRequest, parse_line
from raylm.cli import main, make_parser
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError, EngineDeadError
from raylm.executor.placement import NodeResources


def config(**sections) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"path": "fake"}, **sections})


def machine(**resources: float) -> NodeResources:
    return NodeResources(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


@pytest.mark.parametrize(
    ("sections", "engines", "nodes", "count", "resources", "threads"),
    [
        ({}, None, [{"CPU": 8.0}], 1, {"CPU": 0.5}, None),
        ({}, None, [{"CPU": 0.0}, {"CPU": 8.0}, {"CPU": 4.0}], 2, {"CPU": 0.5}, None),
        ({"runtime": {"num_threads": 2}}, None, [{"CPU": 8.0}, {"CPU": 5.0}], 6, {"CPU": 0.5}, 2),
        ({}, 4, [{"CPU": 8.0}], 4, {"CPU": 0.5}, 2),
        ({}, 4, [{"CPU": 2.0}], 4, {"CPU": 0.5}, 1),
        ({}, None, [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0}, {"GPU": 2.0}], 6, {"CPU": 0.5, "GPU": 1.0}, None),
        ({"parallel": {"tensor": 4}}, None, [{"CPU": 9.0, "GPU": 8.0}, {"GPU": 3.0}], 2, {"CPU": 0.1}, None),
        ({"parallel": {"tensor": 2, "pipeline": 2}}, None, [{"GPU": 3.0}, {"GPU": 2.0}], 1, {"CPU": 0.1}, None),
        ({"runtime": {"ray_workers": True}}, 1, [{"CPU": 8.0}], 1, {"CPU": 0.1}, None),
        ({"runtime": {"device": "cpu"}}, None, [{"CPU": 8.0, "GPU": 4.0}], 1, {"CPU": 0.5}, None),
        ({"runtime": {"device": "cuda"}}, 3, [{"CPU": 1.0}], 3, {"CPU": 0.5, "GPU": 1.0}, None),
    ],
)
def test_engines_by_what_the_cluster_has(sections, engines, nodes, count, resources, threads):
    pool = plan_pool(config(**sections), engines, [machine(**node) for node in nodes])
    assert (pool.engines, pool.resources, pool.config.runtime.num_threads) == (count, resources, threads)


@pytest.mark.parametrize(("rows", "size", "batches"), [(8, 64, 2), (64, 128, 2), (64, 64, 3), (256, 10, 53)])
def test_batches_fill_an_engines_rows_twice(rows, size, batches):
    scheduler = {"max_num_seqs": rows, "max_num_batched_tokens": 1024}
    assert plan_pool(config(scheduler=scheduler), 1, [machine(CPU=2.0)]).full_batches(size) == batches


def test_no_room_is_a_sentence():
    with pytest.raises(ConfigError, match="do not have the 1 GPUs of one engine.*--engines"):
        plan_pool(config(runtime={"device": "cuda"}), None, [machine(CPU=4.0)])
    with pytest.raises(ConfigError, match="do not have the 4 GPUs"):
        plan_pool(config(parallel={"tensor": 4}), None, [machine(GPU=2.0), machine(GPU=2.0)])


async def test_an_engines_death_is_no_lines_result():
    executor = FakeExecutor()
    executor.fail_at = 2
    answerer = fake_answerer(executor)
    request = BatchRequest("a", "/v1/completions", b'{"model": "fake", "prompt": "hi"}', is_plain=False)
    with pytest.raises(EngineDeadError, match="told to fail"):
        await answerer.answer(request)
    await asyncio.to_thread(answerer.close)


def test_a_plain_prompt_asks_the_model_of_the_batch():
    request = parse_line(b'{"prompt": "hi", "top_k": 3}', 7, model="served")
    assert request == ("line-7", "/v1/completions", b'{"model":"served","prompt":"hi","top_k":3}', True)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--input", "nothing.jsonl", "--output", "out.jsonl"], "--input 'nothing.jsonl': there is no such file"),
        (["--input", "in.jsonl", "--output", "out.csv"], "--output 'out.csv' must end with .jsonl or .parquet"),
        (["--input", "in.jsonl", "--output", "out.jsonl", "--max-num-seqs", "0"], "scheduler.max_num_seqs"),
    ],
)
def test_what_is_wrong_is_said_before_a_cluster_is_started(tmp_path, monkeypatch, capsys, words, problem):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", [completion_line("a")])
    assert main(["batch", "--model", "smollm2-135m", *words]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--engines", "--shard-size", "--max-tokens"])
def test_options_that_count_must_count_something(option, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["batch", "--input", "a", "--output", "b", "--model", "m", option, "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err
