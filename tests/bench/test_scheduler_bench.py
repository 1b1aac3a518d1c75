from __future__ import annotations

import json

import pytest

from raylm.bench import scheduler
from raylm.cli import main


def test_one_line_a_size_and_one_for_prefixes(capsys):
    assert (
        main(["bench", "scheduler", "--running", "2,5", "--waiting", "0,20", "--steps", "40", "--prompt-len", "64"])
        == 0
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["running"], row["waiting"]) for row in rows[:-1]] == [(2, 0), (2, 20), (5, 0), (5, 20)]
    for row in rows[:-1]:
        assert set(row) == {
            "bench",
            "running",
            "waiting",
            "us_per_step",
            "us_encode",
            "asked_us_per_step",
            "asked_us_encode",
        }
        assert row["bench"] == "scheduler" and row["us_per_step"] > 0 and row["us_encode"] > 0
    assert set(rows[-1]) == {"bench", "prompt_len", "ms_cold", "ms_warm", "asked_ms"}
    assert (rows[-1]["bench"], rows[-1]["prompt_len"], rows[-1]["asked_ms"]) == ("prefix", 64, None)


def test_every_measured_step_decodes_every_running_request():
    decoding = scheduler._Decoding(20, 30, steps=50)
    for _ in range(50):
        _, plan = decoding.step()
        assert plan.num_tokens == [1] * 20
    stats = decoding._scheduler.stats()
    assert (stats.running, stats.waiting, stats.num_preemptions) == (20, 30, 0)


def test_what_was_asked_stands_beside():
    result = scheduler.measure_steps(256, 0, steps=1)
    assert (result.asked_us_per_step, result.asked_us_encode) == (250.0, 100.0)


def test_the_prefix_is_found_whole(monkeypatch):
    found = []
    real = scheduler.KVCacheManager.attach_prefix

    def attach(self, request):
        real(self, request)
        found.append(request.num_computed)

    monkeypatch.setattr(scheduler.KVCacheManager, "attach_prefix", attach)
    scheduler.measure_prefix(160)
    # The last token is always computed.
    assert set(found) == {144}


@pytest.mark.parametrize("running", ["0", "5000"])
def test_a_wrong_size_is_one_line(running, capsys):
    assert main(["bench", "scheduler", "--running", running]) == 2
    assert f"--running must be from 1 to 4096, got {running}" in capsys.readouterr().err
