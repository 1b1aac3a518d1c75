"""GET /openapi.json: all operations with their fields, answers and errors, made from the types that the code uses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from raylm import __version__
from raylm.api.about import About
from raylm.api.dialect import Dialect
from raylm.core.options import MAX_PRIORITY, MAX_SECONDS, RequestOptions
from raylm.core.sampling import MAX_N, SamplingParams

Json = dict[str, Any]
_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_QUALIFIED = re.compile(rb"raylm(?:(?:\.|__)[a-z]+)*?(?:\.|__)([a-z]+)(?:\.|__)[a-z]+(?:_[a-z]+)*(?:\.|__)([A-Z]\w*)")
_FIELD = re.compile(r"^(\w+): ", re.MULTILINE)
RANGES: Mapping[str, Json] = {
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "typical_p": {"exclusiveMinimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 2},
    "min_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 0},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "n": {"minimum": 1, "maximum": MAX_N},
    "top_logprobs": {"minimum": -1, "maximum": 2**31 - 1},
    "prompt_logprobs": {"minimum": -1, "maximum": 2**31 - 1},
    "stream_interval": {"minimum": 1, "maximum": 2**31 - 1},
    "truncate_prompt_tokens": {"minimum": -1},
    "priority": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    "deadline_s": {"exclusiveMinimum": 0, "maximum": MAX_SECONDS},
    "queue_timeout_s": {"exclusiveMinimum": 0, "maximum": MAX_SECONDS},
}
"""Of numbers in requests. They are checked elsewhere (core/sampling.py, core/options.py); a test compares."""
_ERRORS = {
    400: "Something in the request is wrong or not supported; the message names the field, the value and the limit.",
    401: "There is no API key, or a wrong one.",
    403: "The API key is not good for this.",
    404: "There is nothing of this name.",
    405: "The path takes other methods.",
    409: "It is in the wrong state for this.",
    413: "The body is longer than the server allows.",
    424: "A server of tools does not answer as it should.",
    429: "Too much at a time.",
    500: "The engine ended this request, or the server failed.",
    503: "The queue is full, no engine is up or one was lost.",
    504: "The request's deadline was over.",
    507: "There is no room left to store it.",
}
_HEADERS = {
    401: ("www-authenticate", "Bearer"),
    503: ("retry-after", "When to try again, in seconds."),
}
_DESCRIPTION = (
    "What this server answers. Fields that are not listed are refused by name where they would change the answer, and "
    "ignored otherwise (refused too with http.strict). Proxies in front may also answer 408, 429, 502 and 503. "
    "Every answer has the header x-request-id."
)


class Described(Protocol):
    """A route of the server."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def scope(self) -> str | None: ...
    @property
    def dialect(self) -> Dialect: ...
    @property
    def about(self) -> About | None: ...


def document(routes: Iterable[Described], root_path: str = "") -> bytes:
    """The document of those that say what they do; `root_path` is before all their paths."""
    described = [(route, route.about) for route in routes if route.about is not None]
    known = [about for _, about in described]
    requests, request_schemas = _requests({cls for about in known for cls in about.requests})
    types = [one for about in known for one in (about.answer, about.event, about.error) if one is not None]
    answers, answer_schemas = _answers([*types, *(route.dialect.error_type for route, _ in described)])
    paths: dict[str, Json] = {}
    for route, about in described:
        operation = _operation(route, about, requests, answers)
        paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})[route.method.lower()] = operation
    assert not request_schemas.keys() & answer_schemas.keys(), "a body and an answer have one name"
    whole = msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "raylm", "version": __version__, "description": _DESCRIPTION},
            **({"servers": [{"url": root_path}]} if root_path else {}),
            "paths": paths,
            "components": {
                "schemas": dict(sorted({**request_schemas, **answer_schemas}.items())),
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer", "description": "Where the server has API keys."}
                },
            },
        }
    )
    return _QUALIFIED.sub(_shortened, whole)


def _shortened(name: re.Match[bytes]) -> bytes:
    """The name of a type whose own name is not the only one of its kind, with that of its API."""
    return (b"" if name[1] == b"api" else name[1].title()) + name[2]


def _operation(route: Described, about: About, requests: Mapping[Any, Json], answers: Mapping[int, Json]) -> Json:
    made: Json = {
        "summary": about.summary,
        "tags": [about.tag],
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").rstrip("_"),
        "responses": {"200": _success(route, about, answers), **_failures(route, about, answers)},
    }
    if parameters := list(_parameters(route.path, about.query)):
        made["parameters"] = parameters
    if about.requests:
        schemas = [requests[cls] for cls in about.requests]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if route.scope is not None:
        # The empty one: a server may have no keys.
        made["security"] = [{"bearer": []}, {}]
    return made


def _parameters(path: str, query: Mapping[str, str]) -> Iterator[Json]:
    for name in _PARAMETER.findall(path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name, description in query.items():
        yield {"name": name, "in": "query", "schema": {"type": "string"}, "description": description}


def _success(route: Described, about: About, answers: Mapping[int, Json]) -> Json:
    text = about.media != "application/json"
    plain: Json = {"type": "string" if text else "object"}
    content: Json = {about.media: {"schema": plain if about.answer is None else answers[id(about.answer)]}}
    description = about.summary
    if about.event is not None:
        kind = route.dialect.stream_type.decode().partition(";")[0]
        content[kind] = {"schema": _event(kind, answers[id(about.event)], answers[id(route.dialect.error_type)])}
        description += " With stream, as events."
    return {"description": description, "content": content}


def _event(kind: str, event: Json, error: Json) -> Json:
    """One line, or one server-sent event, of a stream."""
    either = {"anyOf": [event, error]}
    if kind == "application/x-ndjson":
        return {**either, "description": "Each line; an error ends the stream.", "x-event": event}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": either}
    return {
        "type": "object",
        "description": "Each server-sent event; an error ends the stream.",
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
        "x-event": event,
    }


def _failures(route: Described, about: About, answers: Mapping[int, Json]) -> Json:
    statuses = about.errors | ({401, 403} if route.scope is not None else frozenset())
    schema = answers[id(route.dialect.error_type if about.error is None else about.error)]
    return {str(status): _failure(status, schema) for status in sorted(statuses)}


def _failure(status: int, schema: Json) -> Json:
    described = _ERRORS.get(status, HTTPStatus(status).phrase)
    made: Json = {"description": described, "content": {"application/json": {"schema": schema}}}
    if status in _HEADERS:
        name, description = _HEADERS[status]
        made["headers"] = {name: {"schema": {"type": "string"}, "description": description}}
    return made


def _requests(classes: set[type[BaseModel]]) -> tuple[dict[Any, Json], Json]:
    """References to the schemas of bodies, and these."""
    ordered = sorted(classes, key=lambda cls: cls.__name__)
    template = _REF.replace("name", "model")
    refs, schemas = models_json_schema([(cls, "validation") for cls in ordered], ref_template=template)
    found: Json = schemas.get("$defs", {})
    told = {**_told(SamplingParams.__doc__), **_told(RequestOptions.__doc__)}
    for schema in found.values():
        for name, field in schema.get("properties", {}).items():
            field.pop("title", None)
            if name in told:
                field.setdefault("description", told[name])
            for form in field.get("anyOf", ()):
                # An API with a range of its own says it with the type.
                if form.get("type") in ("integer", "number") and len(form) == 1:
                    form.update(RANGES.get(name, {}))
    return {cls: refs[cls, "validation"] for cls in ordered}, found


def _told(doc: str | None) -> dict[str, str]:
    """What a docstring with lines `name: text` says of each name."""
    parts = [_FIELD.split(paragraph)[1:] for paragraph in inspect.cleandoc(doc or "").split("\n\n")]
    pairs = [pair for part in parts for pair in zip(part[::2], part[1::2], strict=True)]
    return {name: _sentence(" ".join(text.split())) for name, text in pairs}


def _sentence(text: str) -> str:
    """A request's null is None in Python."""
    return (text[:1].upper() + text[1:]).replace("None", "null")


def _anything(kind: type) -> Json:
    """The schema of `object`; NotImplementedError is how msgspec is told that others have none here."""
    if kind is not object:
        raise NotImplementedError
    return {"description": "Any value."}


def _answers(types: Sequence[Any]) -> tuple[dict[int, Json], Json]:
    """References to the schemas of answers, by the identity of their type, and these."""
    references, schemas = msgspec.json.schema_components(types, schema_hook=_anything, ref_template=_REF)
    return {id(one): reference for one, reference in zip(types, references, strict=True)}, schemas
