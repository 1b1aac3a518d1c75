"""Lines of a batch: OpenAI's batch requests and plain prompts in, results out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from uuid import uuid4

import msgspec

from raylm.api.protocol import ChatRequest, CompletionRequest
from raylm.api.unsupported import OPENAI, VLLM

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
OTHER_MODELS = {"/v1/embeddings": "embeddings", "/v1/score": "scores"}
"""Urls that are known and need models of other kinds, with what those give."""

_MAX_QUOTED = 100
# Other servers' fields are not among them: tables have columns of their own that are called "task" or "request_id".
_OTHERS = {"json_schema", "regex", "ebnf"}
_TAKEN = CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys()
_BODY_FIELDS = (_TAKEN | OPENAI.keys() | VLLM.keys()) - _OTHERS
REQUEST_COLUMNS = _BODY_FIELDS | {"custom_id", "method", "url", "body"}
"""The columns of a table that parse_row looks at."""


class BatchRequest(NamedTuple):
    """One line, ready to be answered: the JSON `body` of a POST to `url`.

    is_plain: the line was a prompt without url, method and model, so the batch's own settings hold for it.
    """

    custom_id: str
    url: str
    body: bytes
    is_plain: bool


class Response(msgspec.Struct):
    """What the server would have answered. `body` is JSON: a completion, or {"error": ...} with a status over 399."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    """Why a line was no request that could be asked."""

    code: str
    message: str


class Result(msgspec.Struct):
    """One line of the output; either `response` or `error` is set."""

    id: str
    custom_id: str | None
    response: Response | None
    error: LineError | None


class BadLine(Exception):
    """A line cannot be asked. `custom_id` is None where the line does not tell it."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def parse_line(line: bytes, number: int, *, model: str) -> BatchRequest:
    """A line of JSON: a batch request, a prompt, or an object with `prompt` or `messages`. Raises BadLine.

    `number` counts the file's lines from 1; `model` is asked where a plain prompt names none.
    """
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine("invalid_json", f"Line {number} is not valid JSON: {error}") from None
    if isinstance(value, str):
        return plain_request({"prompt": value}, number, model=model)
    if not isinstance(value, dict):
        raise BadLine("invalid_line", f"Line {number} must hold an object or a string")
    if "body" not in value and ("prompt" in value or "messages" in value):
        return plain_request(value, number, model=model)
    return _request(value, number)


def parse_row(row: Mapping[str, object], number: int, *, model: str) -> BatchRequest:
    """A row of a table, with the columns of a batch request (`body` may be JSON), or `prompt` or `messages`.

    Columns that are no parameter of OpenAI's are left alone, and null is the same as no column. Raises BadLine.
    """
    given = {name: value for name, value in row.items() if value is not None}
    if "body" in given:
        return _request(given, number)
    if "prompt" not in given and "messages" not in given:
        raise BadLine("invalid_line", f"Row {number} has neither body nor prompt nor messages", _custom_id(given))
    body = {name: value for name, value in given.items() if name in _BODY_FIELDS or name == "custom_id"}
    return plain_request(body, number, model=model)


def plain_request(fields: Mapping[str, object], number: int, *, model: str) -> BatchRequest:
    """A request made of a body's fields alone; its custom_id is `line-<number>` where they have none."""
    custom_id = _custom_id(fields) or default_id(number)
    body = {"model": model, **{name: value for name, value in fields.items() if name != "custom_id"}}
    url = CHAT if "messages" in fields else COMPLETIONS
    return BatchRequest(custom_id, url, _json(body, number, custom_id), is_plain=True)


def _request(value: Mapping[str, object], number: int) -> BatchRequest:
    """A request in OpenAI's batch format."""
    custom_id, url = value.get("custom_id"), value.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine("missing_custom_id", f"Line {number} needs a custom_id, a string that is not empty")
    if value.get("method", "POST") != "POST":
        raise BadLine("invalid_method", f"method must be POST, got {_quote(value['method'])}", custom_id)
    if isinstance(url, str) and url in OTHER_MODELS:
        message = f"{url} is not possible: the model of this batch makes text, not {OTHER_MODELS[url]}"
        raise BadLine("unsupported_url", message, custom_id)
    if url not in (CHAT, COMPLETIONS):
        raise BadLine("unknown_url", f"url must be {CHAT} or {COMPLETIONS}, got {_quote(url)}", custom_id)
    body = value.get("body")
    # A table's column may hold the body as JSON; whether it is any is for the parser of bodies to say.
    data = body.encode() if isinstance(body, str) else _json(body, number, custom_id)
    return BatchRequest(custom_id, str(url), data, is_plain=False)


def _json(value: object, number: int, custom_id: str) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadLine("invalid_line", f"Line {number} cannot be written as JSON: {error}", custom_id) from None


def _quote(value: object) -> str:
    return repr(value)[:_MAX_QUOTED]


def custom_id_of(line: bytes, number: int) -> str:
    """What the result of a line is called, as far as the line is readable; quick, for looking at all lines."""
    try:
        custom_id = _ids.decode(line).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        custom_id = None
    return custom_id if isinstance(custom_id, str) and custom_id else default_id(number)


def default_id(number: int) -> str:
    return f"line-{number}"


class _Identified(msgspec.Struct):
    custom_id: object = None


_ids = msgspec.json.Decoder(_Identified)


def new_id() -> str:
    return f"batch_req_{uuid4().hex}"


def failure(error: BadLine) -> Result:
    """The result of a line that could not be asked."""
    return Result(new_id(), error.custom_id, None, LineError(error.code, str(error)))


def answered(custom_id: str, status: int, body: bytes) -> Result:
    return Result(new_id(), custom_id, Response(status, uuid4().hex, msgspec.Raw(body)), None)


def _custom_id(fields: Mapping[str, object]) -> str | None:
    custom_id = fields.get("custom_id")
    return custom_id if isinstance(custom_id, str) and custom_id else None
