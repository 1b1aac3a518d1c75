"""docs/metrics.md says all that /metrics has, and boards and alerts ask for nothing else."""

from __future__ import annotations

from raylm.api.exposition import PREFIX, VLLM_NAMES
from tests.serving.metrics_table import PATH, all_names, metrics, text
from tests.support.queries import asked_names, queries


def test_the_table_is_that_of_the_metrics_there_are():
    assert PATH.read_text(encoding="utf-8") == text(), "python -m tests.serving.metrics_table writes it anew"


def test_boards_and_alerts_ask_for_metrics_that_there_are():
    asked = {name for query in queries() for name in asked_names(query.expression)}
    assert asked and asked <= all_names()


def test_every_name_of_vllms_is_a_metric_here():
    assert {metric.name.removeprefix(PREFIX) for metric, _ in metrics()} >= VLLM_NAMES
