"""`ray job submit -- python -m raylm.batch` with the demo model, killed here and there, and a pipeline of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.batch.batch_fakes import read_results, write_lines
from tests.batch.ray_cluster import Cluster, kill, wait_for

pytestmark = [pytest.mark.usefixtures("demo"), pytest.mark.timeout(900)]

SHARD = 8
MODEL = ["--model", "smollm2-135m", "--max-model-len", "256", "--max-num-seqs", "8"]


def chat(custom_id: str, text: str) -> dict[str, object]:
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 12,
        "temperature": 0,
    }
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def requests() -> list[object]:
    lines: list[object] = [chat("capital", "What is the capital of France?")]
    lines += [chat(f"sum-{number}", f"What is {number} plus 2?") for number in range(70)]
    lines += [b"{bad", chat("capital", "again"), chat("long", "word " * 300)]
    lines += [{"custom_id": "score", "url": "/v1/score", "body": {}}]
    return [*lines, {"prompt": "The capital of Italy is", "temperature": 0}]


class Job:
    """`ray job submit`, as a user runs it, with what it prints."""

    def __init__(self, cluster: Cluster, command: list[str], log: Path) -> None:
        self._log = log
        submit = [str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", cluster.dashboard, "--"]
        with log.open("w") as out:
            self.process = subprocess.Popen([*submit, *command], env=cluster.env, stdout=out, stderr=out)

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None


Submit = Callable[[list[str], Path], Job]


@pytest.fixture
def submit(cluster: Cluster) -> Iterator[Submit]:
    """Starts jobs; none outlives the test."""
    started: list[Job] = []

    def running(command: list[str], log: Path) -> Job:
        # The head answers before its agent takes jobs, and says so.
        for _ in range(20):
            job = Job(cluster, command, log)
            started.append(job)
            wait_for(lambda job=job: job.has_ended or "submitted successfully" in job.output, "a job")
            if "submitted successfully" in job.output:
                return job
            assert "No available agent" in job.output, job.output
        raise AssertionError(job.output)

    yield running
    for job in started:
        job.process.kill()
        job.process.wait(30)


@pytest.mark.nightly
def test_a_job_survives_the_death_of_its_engine_and_its_own(cluster: Cluster, submit: Submit, tmp_path: Path):
    source = write_lines(tmp_path / "in.jsonl", requests())
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "raylm.batch", "--input", str(source), "--output", str(output), *MODEL]
    # The address, because a job looks for any cluster of its machine, and there may be another.
    command += ["--shard-size", str(SHARD), "--max-tokens", "12", "--address", cluster.address]

    def shards() -> int:
        return len(list(tmp_path.glob("out.jsonl.batch/shard-*.jsonl")))

    first = submit(command, tmp_path / "first.log")
    wait_for(lambda: shards() or first.has_ended, "the first shard")
    assert not first.has_ended, first.output
    kill(cluster.processes("ray::MapWorker(MapBatches(ShardStage))"))
    before = shards()
    wait_for(lambda: shards() > before or first.has_ended, "the first shard of the next engine")
    assert not first.has_ended, first.output
    kill(cluster.processes("-m raylm.batch"))
    assert first.process.wait(300) != 0, first.output
    assert not output.exists()

    done = shards()
    assert 2 <= done < len(requests()) / SHARD, first.output
    second = submit(command, tmp_path / "second.log")
    assert second.process.wait(600) == 0, second.output
    assert f"out.jsonl: {len(requests())} results, 4 of them errors" in second.output
    assert "lines were done before" in second.output
    check(read_results(output))


def check(results: list[dict]) -> None:
    expected = [line.get("custom_id") if isinstance(line, dict) else None for line in requests()]
    expected[-1] = f"line-{len(expected)}"
    assert [result["custom_id"] for result in results] == expected
    assert "Paris" in results[0]["response"]["body"]["choices"][0]["message"]["content"]
    assert all(result["response"]["body"]["usage"]["completion_tokens"] for result in results[:71])
    assert [result["error"] and result["error"]["code"] for result in results[71:]] == [
        "invalid_json",
        "duplicate_custom_id",
        None,
        "unsupported_url",
        None,
    ]
    assert results[73]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert "Rome" in results[-1]["response"]["body"]["choices"][0]["text"]


PIPELINE = """
import json, sys
import ray
import raylm.batch
from raylm import EngineConfig

ray.init(sys.argv[1], log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
config = EngineConfig.model_validate({
    "model": {"path": "smollm2-135m", "max_model_len": 256},
    "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 256},
})
places = ["France", "Italy", "Spain"] * 8
rows = [{"place": place, "prompt": f"The capital of {place} is", "temperature": 0.0} for place in places]
rows.append({"place": "nowhere", "prompt": "", "temperature": 0.0})
answered = raylm.batch.processor(config, batch_size=6, max_tokens=6)(ray.data.from_items(rows, override_num_blocks=5))
print(json.dumps(answered.map(lambda row: {**row, "seen": True}).take_all()))
"""


def test_a_processor_is_a_stage_of_any_pipeline():
    """On a cluster of the pipeline's own."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    check_pipeline("local", env)


@pytest.mark.nightly
def test_a_processor_is_a_stage_on_a_cluster_that_is_there(cluster: Cluster):
    check_pipeline(cluster.address, cluster.env)


def check_pipeline(address: str, env: dict[str, str]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PIPELINE, address]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = json.loads(result.stdout.splitlines()[-1])
    assert len(rows) == 25
    capitals = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid"}
    for row in rows:
        assert row["seen"]
        if row["place"] == "nowhere":
            assert (row["answer"], row["response"] is None) == (None, False)
            assert "must not be empty" in row["error"]
        else:
            assert capitals[row["place"]] in row["answer"]
            assert row["error"] is None
            assert json.loads(row["response"])["usage"]["completion_tokens"] <= 6
