"""`raylm batch` with a Ray cluster of its own: killed, it leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.batch.batch_fakes import write_lines
from tests.batch.ray_cluster import wait_for
from tests.support import checkpoints

GONE_S = 25.0
"""Left to itself, Ray needs over 36 s: its agents wait for a node that does not answer."""


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command, in the middle of its work; whatever lives of it at the end is killed."""
    model = checkpoints.llama(tmp_path / "model")
    lines = [{"prompt": "Hello", "max_tokens": 30, "ignore_eos": True}] * 20_000
    source = write_lines(tmp_path / "in.jsonl", lines)
    words = ["--input", str(source), "--output", str(tmp_path / "out.jsonl"), "--model", str(model), "--device", "cpu"]
    command = [sys.executable, "-m", "raylm.cli", "batch", *words, "--shard-size", "4", "--no-progress"]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
    family: list[psutil.Process] = []
    try:
        wait_for(
            lambda: process.poll() is not None or [*tmp_path.glob("out.jsonl.batch/shard-*.jsonl")], "the first shard"
        )
        assert process.poll() is None, (tmp_path / "log").read_text()
        family = psutil.Process(process.pid).children(recursive=True)
        yield process
    finally:
        process.kill()
        process.wait(30)
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def test_a_killed_batch_leaves_nothing_of_ray(batch: subprocess.Popen[bytes]):
    family = psutil.Process(batch.pid).children(recursive=True)
    assert any("raylet" in one.name() for one in family)
    batch.kill()
    _, alive = psutil.wait_procs(family, timeout=GONE_S)
    left = [one.name() for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    assert not left, left
