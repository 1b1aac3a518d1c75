"""`raylm batch` with a Ray cluster of its own: killed, it leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.batch.batch_fakes import write_lines
from tests.batch.ray_cluster import family, kill, wait_for
from tests.support import checkpoints


class Running(NamedTuple):
    process: psutil.Process
    log: Path


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Running]:
    """The command, in the middle of its work; whatever lives of it at the end is killed."""
    model = checkpoints.llama(tmp_path / "model")
    lines = [{"prompt": "Hello", "max_tokens": 30, "ignore_eos": True}] * 4_000
    source = write_lines(tmp_path / "in.jsonl", lines)
    words = ["--input", str(source), "--output", str(tmp_path / "out.jsonl"), "--model", str(model), "--device", "cpu"]
    command = [sys.executable, "-m", "raylm.cli", "batch", *words, "--shard-size", "4", "--no-progress"]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    children: list[psutil.Process] = []
    try:
        shards = tmp_path / "out.jsonl.batch"
        wait_for(lambda: process.poll() is not None or [*shards.glob("shard-*.jsonl")], "the first shard", log)
        assert process.poll() is None, log.read_text()
        started = psutil.Process(process.pid)
        children = family(started)
        yield Running(started, log)
    finally:
        children += family(psutil.Process(process.pid)) if process.poll() is None else []
        process.kill()
        process.wait(60)
        kill(children)


@pytest.mark.timeout(900)
def test_a_killed_batch_leaves_nothing_of_ray(batch: Running):
    """What the batch started notices the death of its keeper and ends in order, and Ray's processes with it. Left to
    itself, Ray would end too, but nobody would say so."""
    children = family(batch.process)
    assert any("raylet" in name_of(one) for one in children)
    batch.process.kill()
    _, alive = psutil.wait_procs(children, timeout=300)
    assert not [name for one in alive if (name := name_of(one))]
    assert "raylm: interrupted; the same command goes on from here" in batch.log.read_text()


def name_of(process: psutil.Process) -> str:
    """Empty for a process that has ended."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.name()
    except psutil.NoSuchProcess:
        return ""
