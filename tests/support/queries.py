"""What Grafana's boards and Prometheus' alerts ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import yaml

from tests.helm import rendered

_BOARDS = rendered.CHART / "dashboards"
_NAME = re.compile(r"\b((?:raylm|vllm):\w+|http_\w+|process_\w+)")


class Query(NamedTuple):
    """`where`: the board's panel or the alert."""

    where: str
    expression: str


def queries() -> Iterator[Query]:
    """Every panel's, and every alert's of the chart's example that has everything."""
    for path in sorted(_BOARDS.glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", []):
                yield Query(f"{path.name}: {panel['title']}", target["expr"])
    for group in rule_groups():
        for rule in group["rules"]:
            yield Query(f"alert {rule.get('alert', rule.get('record'))}", rule["expr"])


def rule_groups() -> list[dict]:
    """The chart's alerts, as a rules file of Prometheus has them under `groups`."""
    documents = rendered.documents(rendered.values_of("everything"))
    return [group for one in documents if one and one["kind"] == "PrometheusRule" for group in one["spec"]["groups"]]


def rules_file() -> str:
    return yaml.safe_dump({"groups": rule_groups()})


def asked_names(expression: str) -> set[str]:
    """The metrics that an expression asks for."""
    return set(_NAME.findall(expression))
