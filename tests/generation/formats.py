"""What models of each family write, as their published chat templates print an assistant's turn of the history."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from jinja2 import Environment

from raylm.generation.parsing import ModelFormat, OutputReader
from raylm.generation.parsing.formats import CallFormat
from raylm.generation.pieces import CallArguments, CallBegin, Piece

# Ids that differ from one reading to the next.
_MADE_UP = re.compile(r"call_[0-9a-f]{24}|[A-Za-z0-9]{9}|functions\..*")
Call = tuple[str, Mapping[str, object]]
TOOLS: Mapping[str, Mapping[str, object]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "options": {"type": "object"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "now": {"type": "boolean"},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
    },
    "get_time": {"type": "object", "properties": {}},
    "mcp.search": {
        "type": "object",
        "properties": {"query": {"$ref": "#/$defs/Q"}},
        "$defs": {"Q": {"type": "string"}},
    },
}
WEATHER: Call = (
    "get_weather",
    {
        "city": 'São "Paulo"\n{x} </p>',
        "days": 3,
        "share": 0.5,
        "options": {"units": [1, None, "é"], "deep": {"a": {}}},
        "tags": ["a", "[b]"],
        "now": True,
        "limit": None,
    },
)
CALLS: tuple[Call, ...] = (WEATHER, ("get_time", {}), ("mcp.search", {"query": "42"}))

# By the name of the format; `content` is the text before the calls, `calls` are (name, arguments).
TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.jinja")}
# Templates that print no text beside calls.
CALLS_ALONE = frozenset({"llama3_json", "pythonic", "gemma3", "granite", "functiongemma"})


def gemma(value: object) -> str:
    if isinstance(value, str):
        return f"<escape>{value}<escape>"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def rendered(name: str, content: str, calls: tuple[Call, ...]) -> str:
    """An assistant's turn as the template of this format prints it."""
    environment = Environment()
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.filters["python"] = repr
    environment.filters["gemma"] = gemma
    return environment.from_string(TEMPLATES[name]).render(content=content, calls=calls)


def written(form: CallFormat, calls: tuple[Call, ...]) -> str:
    """The same by the format's own data, which grammars are made of."""
    each = [form.call_begin(name) + _arguments(form, arguments) + form.call_end for name, arguments in calls]
    return form.section[0] + form.separator.join(each) + form.section[1]


def _arguments(form: CallFormat, arguments: Mapping[str, object]) -> str:
    if form.arguments == "json":
        return json.dumps(arguments)
    if form.arguments == "python":
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    if form.arguments == "gemma":
        return gemma(dict(arguments))[1:-1]
    tags = form.tags
    assert tags is not None
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return tags.between.join(
        f"{tags.key_begin}{key}{tags.key_end}{tags.value_begin}{value}{tags.value_end}" for key, value in values.items()
    )


def read(form: ModelFormat, parts: Iterable[str], **settings: bool) -> list[Piece]:
    """All pieces of a stream that came in these parts, joined."""
    reader = OutputReader(form, tools=TOOLS, **settings)
    pieces = [piece for part in parts for piece in reader.push(part)]
    return joined(pieces + reader.finish())


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one; calls without ids that are made up."""
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            out.append(piece._replace(id="" if _MADE_UP.fullmatch(piece.id) else piece.id))
        elif out and type(out[-1]) is type(piece):
            out[-1] = piece._replace(text=out[-1].text + piece.text)
        else:
            out.append(piece)
    return out


def calls_of(pieces: list[Piece]) -> list[Call]:
    names = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
    arguments = [""] * len(names)
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.number] += piece.text
    return [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]
