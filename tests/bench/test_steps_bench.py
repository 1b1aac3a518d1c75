from __future__ import annotations

import json

import msgspec
import pytest

from raylm.bench import steps
from raylm.cli import main
from raylm.core.step import StepPlan
from raylm.errors import RaylmError


def test_one_line_a_plan_and_number_of_workers(capsys):
    assert main(["bench", "steps", "--workers", "1,2", "--steps", "5", "--device-us", "500"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = ["decode 64", "decode 256", "prefill 8 x 1024"]
    assert [(row["workers"], row["plan"]) for row in rows] == [(count, name) for count in (1, 2) for name in names]
    for row in rows:
        assert set(row) == {"bench", "workers", "plan", "us_round_trip", "device_us", "us_added"}
        assert row["us_round_trip"] > 0 and row["device_us"] == 500


def test_plans_are_as_large_as_a_schedulers():
    assert steps.decodes(256).total_tokens == 256 and len(steps.decodes(256).new_blocks) == 16
    plan = steps.prefill()
    assert plan.total_tokens == 8192
    assert sum(len(blocks.block_ids) for blocks in plan.new_blocks) * 16 == 8192
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan


def test_a_worker_that_ends_ends_the_measurement():
    workers = steps._Workers(1, 0.0)
    workers._processes[0].kill()
    workers._processes[0].join(60)
    with pytest.raises(RaylmError, match="a worker of the benchmark ended"):
        workers.us_per_trip(steps.decodes(64), 1)
    workers.close()


def test_a_wrong_number_is_one_line(capsys):
    assert main(["bench", "steps", "--workers", "65"]) == 2
    assert "--workers must be from 1 to 64, got 65" in capsys.readouterr().err
