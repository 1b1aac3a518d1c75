"""The chart as Helm renders it, for the tests beside it.

python -m tests.helm.rendered        writes the golden files anew; look at what `git diff` says of them
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml
from helm_python.chart import Chart

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "raylm"
EXAMPLES = {path.stem: path for path in sorted((ROOT / "helm" / "examples").glob("*.yaml"))}
GOLDEN = {name: Path(__file__).parent / "golden" / f"{name}.yaml" for name in ("defaults", "gpu", "nightly")}

Document = dict[str, object]
"""A manifest. What is inside is Kubernetes' affair, and checked against its schemas."""


@cache
def chart() -> Chart:
    return Chart.load(CHART)


def values_of(name: str) -> Document:
    """The values of an example; none for "defaults"."""
    return {} if name == "defaults" else yaml.load(EXAMPLES[name].read_text("utf-8"), Loader=yaml.CSafeLoader)


def text(values: Mapping[str, object]) -> str:
    """Everything that is rendered, notes left out."""
    return _text(json.dumps(values))


@cache
def _text(values: str) -> str:
    """Many tests look at the same values, and rendering takes Helm a while."""
    files = chart().render(values=json.loads(values), name="demo", namespace="llm")
    parts = [files[path].strip() for path in sorted(files) if path.endswith(".yaml")]
    return "\n---\n".join(part.removeprefix("---\n") for part in parts if part) + "\n"


def documents(values: Mapping[str, object]) -> list[Document]:
    return list(yaml.load_all(text(values), Loader=yaml.CSafeLoader))


def serve_config(values: Mapping[str, object]) -> Document:
    """The content of serveConfigV2."""
    (service,) = (document for document in documents(values) if document["kind"] == "RayService")
    return yaml.load(service["spec"]["serveConfigV2"], Loader=yaml.CSafeLoader)


if __name__ == "__main__":
    for name, path in GOLDEN.items():
        path.write_text(text(values_of(name)), encoding="utf-8")
