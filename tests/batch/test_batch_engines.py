"""How many engines a batch gets, and what becomes of one that dies; the command's options."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from raylm.batch import cluster
from raylm.batch.check import check_model
from raylm.batch.job import run_batch
from raylm.batch.pool import plan_pool
from raylm.batch.requests import BatchRequest, parse_line
from raylm.bench.dummy import write_shape
from raylm.cli import main, make_parser
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError, EngineDeadError
from raylm.executor.placement import NodeResources
from tests.batch.batch_fakes import completion_line, fake_answerer, in_process, settings, write_lines
from tests.support.fakes import FakeExecutor

FILES = ["--input", "in.jsonl", "--output", "out.jsonl"]


@pytest.fixture
def no_cluster(monkeypatch, no_keeper):
    """A cluster that would be started raises what this list holds."""
    errors = []

    def start():
        raise errors.pop() if errors else AssertionError("no cluster is needed")

    monkeypatch.setattr(cluster, "start_local_ray", start)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return errors


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that can be loaded, "llama", and one of an unknown architecture, "odd". Their tokenizers
    are large: every test copies the folder instead of making both anew."""
    folder = tmp_path_factory.mktemp("shapes")
    write_shape("llama-3.1-8b", folder / "llama")
    odd = shutil.copytree(folder / "llama", folder / "odd") / "config.json"
    odd.write_text(odd.read_text().replace("LlamaForCausalLM", "OddForCausalLM"))
    return folder


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
        ([*FILES, "--max-num-seqs", "0"], "scheduler.max_num_seqs"),
        ([*FILES, "--model", "nope"], "model.path 'nope' does not exist"),
        ([*FILES, "--model", "odd"], "architectures is ['OddForCausalLM']; allowed: one of LlamaForCausalLM"),
        ([*FILES, "--tensor", "3"], "num_attention_heads is 32, which parallel.tensor 3 cannot divide"),
        ([*FILES, "--pipeline", "33"], "parallel.pipeline is 33, but the model has 32 layers only"),
        (["--input", "*.jsonl", "--output", "out.jsonl"], "the batch cannot be planned: [Errno 21] Is a directory"),
        (["--input", "in.jsonl", "--output", "taken.jsonl"], "--output 'taken.jsonl' cannot be written: [Errno 17]"),
    ],
)
def test_what_is_wrong_is_said_before_a_cluster_is_started(
    shapes, tmp_path, no_cluster, monkeypatch, capsys, words, problem
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(shapes, tmp_path, dirs_exist_ok=True)
    write_lines(tmp_path / "in.jsonl", [completion_line("a")])
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "taken.jsonl.batch").touch()
    before = {*tmp_path.iterdir()}
    assert main(["batch", "--model", "llama", "--load-format", "dummy", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("raylm: ") and error.count("\n") == 1 and problem in error
    assert {*tmp_path.iterdir()} == before


def test_a_model_that_only_the_cluster_has_is_not_looked_for_here():
    check_model(config(), must_be_here=False)
    with pytest.raises(ConfigError, match="'fake' does not exist"):
        check_model(config(), must_be_here=True)


def test_a_complete_batch_starts_no_cluster(shapes, tmp_path, no_cluster, capsys):
    source, output = write_lines(tmp_path / "in.jsonl", [completion_line("a")]), tmp_path / "out.jsonl"
    engine = config(model={"path": str(shapes / "llama"), "load_format": "dummy"})
    run_batch(settings(source, output, config=engine, shard_size=128, max_tokens=128), in_process)
    words = ["batch", "--input", str(source), "--output", str(output), "--model", str(shapes / "llama")]
    assert main([*words, "--load-format", "dummy"]) == 0
    assert "1 results, 0 of them errors" in capsys.readouterr().out


def test_an_interrupted_batch_says_how_to_go_on(shapes, tmp_path, no_cluster, capsys):
    source = write_lines(tmp_path / "in.jsonl", [completion_line("a")])
    no_cluster.append(KeyboardInterrupt())
    words = ["batch", "--input", str(source), "--output", str(tmp_path / "out.jsonl"), "--no-progress"]
    assert main([*words, "--model", str(shapes / "llama"), "--load-format", "dummy"]) == 130
    assert capsys.readouterr().err == "raylm: interrupted; the same command goes on from here\n"


@pytest.mark.parametrize("option", ["--engines", "--shard-size", "--max-tokens"])
def test_options_that_count_must_count_something(option, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["batch", "--input", "a", "--output", "b", "--model", "m", option, "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err


async def test_sampling_that_a_line_leaves_open_is_the_models_own(monkeypatch):
    config = EngineConfig.model_validate({"model": {"path": "fake", "sampling": {"temperature": 0.2, "top_p": 0.9}}})
    answerer = fake_answerer(config=config)
    asked = []
    generate = answerer._client.generate
    monkeypatch.setattr(
        answerer._client,
        "generate",
        lambda ids, prompt, params, options: asked.append(params) or generate(ids, prompt, params, options),
    )
    try:
        for line in ({"prompt": "a"}, completion_line("b"), {"prompt": "c", "temperature": 0}):
            request = parse_line(json.dumps(line).encode(), 1, model="fake")
            result = await answerer.answer(request)
            assert result.response.status_code == 200
    finally:
        answerer.close()
    assert [(params.temperature, params.top_p) for params in asked] == [(0.2, 0.9), (0.2, 0.9), (0.0, 0.9)]
