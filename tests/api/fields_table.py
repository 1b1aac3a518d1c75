"""docs/fields.md: what each route does with each field, from the tables that the code uses.

python -m tests.api.fields_table        writes it
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from raylm.api.about import About
from raylm.api.metrics import HttpMetrics
from raylm.api.openapi import document
from raylm.api.operations import Operation, operations
from raylm.config.serving import HttpConfig
from tests.support.openai_fakes import Server

PATH = Path(__file__).resolve().parents[2] / "docs" / "fields.md"
_HEAD = """# Fields, route by route

Written by `python -m tests.api.fields_table` from what the code reads; `GET /openapi.json` and the page `/docs` of a
server say the same with types. null is the default of every field. Fields that no table names are ignored, and refused
with `http.strict`. A refused field is answered 400 (`unsupported_parameter`) with its name, unless its value asks for
nothing; those values stand beside it.
"""


def text() -> str:
    """The whole page."""
    catalog = Server().catalog
    table = operations(catalog, HttpConfig(), HttpMetrics(catalog))
    whole = json.loads(document(table))
    shown: dict[type[BaseModel], str] = {}
    lines = [line for group in _groups(table) for line in _section(group, whole, shown)]
    return "\n".join([_HEAD, *lines]).rstrip() + "\n"


def bodies(whole: dict[str, Any], operation: Operation) -> list[dict[str, Any]]:
    """The schemas of what its body may be, in the order of About.requests."""
    path = operation.path.replace(":path}", "}")
    about = operation.about
    if about is None or not about.requests:
        return []
    schema = whole["paths"][path][operation.method.lower()]["requestBody"]["content"]["application/json"]["schema"]
    references = [one["$ref"].rpartition("/")[2] for one in schema.get("anyOf", [schema])]
    return [whole["components"]["schemas"][name] for name in references]


def _groups(table: list[Operation]) -> list[list[Operation]]:
    """Operations that take a body; those of several paths together."""
    groups: dict[int, list[Operation]] = {}
    for operation in table:
        if operation.about is not None and operation.about.requests:
            groups.setdefault(id(operation.about), []).append(operation)
    return list(groups.values())


def _section(group: list[Operation], whole: dict[str, Any], shown: dict[type[BaseModel], str]) -> Iterator[str]:
    """`shown`: the bodies of earlier sections, and where they are."""
    about = group[0].about
    assert about is not None
    name = f"`{group[0].method} {group[0].path}`"
    yield f"## {', '.join(f'`{operation.method} {operation.path}`' for operation in group)}"
    yield ""
    yield about.summary
    yield ""
    rows: list[str] = []
    for cls, schema in zip(about.requests, bodies(whole, group[0]), strict=True):
        known = next((one for one in shown if issubclass(cls, one)), None)
        if known is not None:
            yield f"Takes the fields of {shown[known]}."
            yield ""
        rows += _rows(schema, () if known is None else known.model_fields)
        shown.setdefault(cls, name)
    if not any(shown[cls] != name for cls in about.requests):
        rows += _others(about)
    if rows:
        yield from ("| field | | |", "| --- | --- | --- |", *dict.fromkeys(rows), "")


def _rows(schema: dict[str, Any], known: Container[str]) -> list[str]:
    """Of the fields that `known` does not have."""
    return [
        f"| `{name}` | {'required' if name in schema.get('required', ()) else 'supported'} "
        f"| {_cell(field.get('description', ''))} |"
        for name, field in schema["properties"].items()
        if name not in known
    ]


def _others(about: About) -> Iterator[str]:
    for name, neutral in about.refused.items():
        passing = ", ".join(f"`{json.dumps(value)}`" for value in neutral)
        yield f"| `{name}` | refused | {f'passes: {passing}' if passing else ''} |"
    for name, why in about.ignored.items():
        yield f"| `{name}` | ignored | {_cell(why)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
