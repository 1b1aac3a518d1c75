"""The same load under many settings: points, fresh engines and servers, results and the picture."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from raylm.bench import startup
from raylm.bench.startup import running_server
from raylm.bench.sweep import make_points, read_grid
from raylm.cli import main
from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError, RaylmError
from tests.support import checkpoints
from tests.support.openai_server import FakeServer

BASE = parse(EngineConfig, {"model": {"path": "x"}, "scheduler": {"max_num_seqs": 7}}, source="test")


def test_points_are_all_combinations(tmp_path):
    grid = read_grid(["scheduler.max_num_seqs=2,4", "cache.prefix_caching=true,false"], None)
    points = make_points(BASE, grid)
    assert [point.label for point in points] == [
        f"scheduler.max_num_seqs={seqs} cache.prefix_caching={on}" for seqs in (2, 4) for on in (True, False)
    ]
    config = points[1].config
    assert (config.scheduler.max_num_seqs, config.cache.prefix_caching) == (2, False)
    path = tmp_path / "grid.yaml"
    path.write_text("scheduler.max_num_seqs: [2, 4]\n")
    assert read_grid([], str(path)) == [{"scheduler.max_num_seqs": 2}, {"scheduler.max_num_seqs": 4}]
    path.write_text("- scheduler.max_num_seqs: 2\n- cache.block_size: 32\n")
    second = make_points(BASE, read_grid([], str(path)))[1].config
    assert (second.scheduler.max_num_seqs, second.cache.block_size) == (7, 32)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "needs --set"),
        (["scheduler.max_num_seqs"], "must be KEY="),
        (["max_num_seqs=1"], "must be a section and a key"),
        (["scheduler.max_seqs=1"], "max_seqs"),
        (["scheduler.max_num_seqs=0"], "scheduler.max_num_seqs"),
    ],
)
def test_wrong_points_are_refused_before_anything_runs(words, problem):
    with pytest.raises(ConfigError, match=problem):
        make_points(BASE, read_grid(words, None))


@pytest.mark.parametrize("content", ["a: 1", "[]", "a: []", "- 3", "{"])
def test_files_that_are_no_grid(tmp_path, content):
    (tmp_path / "grid.yaml").write_text(content)
    with pytest.raises(ConfigError, match="--grid"):
        read_grid([], str(tmp_path / "grid.yaml"))


def test_a_sweep_offline_with_its_picture(tmp_path, capsys):
    checkpoints.llama(tmp_path)
    words = ["bench", "sweep", str(tmp_path), "--device", "cpu", "--case", "a:4:8:4", "--plot", str(tmp_path / "x.png")]
    words += ["--set", "scheduler.max_num_seqs=1,4", "--set", "cache.num_blocks=64,2", "--max-model-len", "64"]
    assert main(words) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["settings"] for row in rows] == [
        f"scheduler.max_num_seqs={seqs} cache.num_blocks={blocks}" for seqs in (1, 4) for blocks in (64, 2)
    ]
    good, bad = rows[::2], rows[1::2]
    assert all(row["bench"] == "sweep" and row["output_tokens_per_s"] > 0 for row in good)
    assert all("unavailable" in row and "output_tokens_per_s" not in row for row in bad)
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_a_sweep_of_servers(tmp_path, capsys, monkeypatch):
    checkpoints.llama(tmp_path)
    configs = []

    @contextmanager
    def server(target, *, timeout_s):
        configs.append(Path(target).read_text(encoding="utf-8"))
        if len(configs) == 2:
            raise RaylmError("it does not start")
        with FakeServer().running() as fake:
            yield fake.url, "fake"

    monkeypatch.setattr(startup, "running_server", server)
    words = ["bench", "sweep", str(tmp_path), "--serve", "--set", "scheduler.max_num_seqs=2,4,8", "--case", "a:4:8:4"]
    assert main([*words, "--concurrency", "1,2", "--plot", str(tmp_path / "x.svg")]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["settings"][-1], row.get("concurrency")) for row in rows] == [
        ("2", 1), ("2", 2), ("4", None), ("8", 1), ("8", 2)
    ]  # fmt: skip
    assert rows[2]["unavailable"] == "it does not start"
    assert [f"max_num_seqs: {seqs}\n" in config for seqs, config in zip((2, 4, 8), configs, strict=True)] == [True] * 3
    assert "ttft_ms_p50" in rows[0] and (tmp_path / "x.svg").stat().st_size > 1000


def test_load_of_servers_is_refused_offline(tmp_path, capsys):
    checkpoints.llama(tmp_path)
    words = ["bench", "sweep", str(tmp_path), "--set", "cache.block_size=16", "--concurrency", "3"]
    assert main(words) == 2
    assert "add --serve" in capsys.readouterr().err


def test_a_server_that_does_not_start_has_last_words(monkeypatch):
    start = subprocess.Popen

    def instead(words, **settings):
        assert words[:3] == [sys.executable, "-m", "raylm.cli"]
        return start([sys.executable, "-c", "import sys; sys.exit('no such thing')"], **settings)

    monkeypatch.setattr(startup.subprocess, "Popen", instead)
    with pytest.raises(RaylmError, match="no such thing"), running_server("x", timeout_s=120):
        pass
