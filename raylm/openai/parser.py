"""From the bytes of a body to a checked request; whatever is wrong becomes one sentence that names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from raylm.errors import RequestRejected
from raylm.openai.protocol import GenerationRequest

MAX_VALUE_CHARS = 100
"""How much of a wrong value a message quotes."""

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
}
"""Fields that clients know and the engine cannot do, with the values, besides null, that ask for nothing."""

HARMLESS = frozenset(
    {
        *("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "service_tier"),
    }
)
"""Fields that are known and never change an answer's text."""

Request = TypeVar("Request", bound=GenerationRequest)


def parse(cls: type[Request], body: bytes, *, strict: bool) -> Request:
    """Check a body. Raises RequestRejected; with `strict` also for unknown fields and for a field given twice."""
    data = _load(body)
    if strict:
        _check_known(cls, data, body)
    _check_supported(data)
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_context=False)[0]) from None


def prompts_of(prompt: object) -> list[str | list[int]]:
    """The prompts of /v1/completions: a string, a list of token ids, or a list of those. Raises RequestRejected."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return [_prompt(one, f"prompt[{index}]") for index, one in enumerate(prompt)]
    return [_prompt(prompt, "prompt")]


def _prompt(value: object, place: str) -> str | list[int]:
    if not isinstance(value, str | list):
        reason = f"must be a string or a list of token ids, or prompt a list of those, got {_quote(value)}"
    elif not value:
        reason = f"must not be empty, got {_quote(value)}"
    elif isinstance(value, str) or all(type(token) is int for token in value):
        return value
    else:
        index, token = next((index, token) for index, token in enumerate(value) if type(token) is not int)
        reason = f"must hold token ids, but [{index}] is {_quote(token)}"
    raise RequestRejected(f"{place} {reason}", param=place)


def _load(body: bytes) -> dict[str, object]:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise RequestRejected(f"The body is not valid UTF-8 at byte {error.start}", code="invalid_utf8") from None
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestRejected(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestRejected(f"The body must be a JSON object, got {_quote(data)}", code="invalid_json")
    return data


def _check_known(cls: type[GenerationRequest], data: dict[str, object], body: bytes) -> None:
    known = cls.model_fields.keys() | UNSUPPORTED.keys() | HARMLESS
    for name in data:
        if name not in known:
            raise RequestRejected(f"Field {_quote(name)} is unknown", param=name, code="unknown_field")
    json.loads(body, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestRejected(f"Field {_quote(twice)} is given twice", param=twice, code="duplicate_field")
    return found


def _check_supported(data: dict[str, object]) -> None:
    for name in data.keys() & UNSUPPORTED.keys():
        _check_neutral(name, data[name], UNSUPPORTED[name])
    messages = data.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            for name, neutral in (("tool_calls", ([],)), ("function_call", ()), ("audio", ())):
                _check_neutral(f"messages[{index}].{name}", message.get(name), neutral)


def _check_neutral(name: str, value: object, neutral: tuple[object, ...]) -> None:
    # In Python False equals 0, but logprobs=0 asks for something and logprobs=false does not.
    if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
        return
    allowed = " or ".join([json.dumps(one) for one in neutral] + ["null"])
    raise RequestRejected(
        f"{name} is not supported: it must be left out or be {allowed}, got {_quote(value)}",
        param=name,
        code="unsupported_parameter",
    )


def _explain(item: ErrorDetails) -> RequestRejected:
    """pydantic's first finding as a sentence."""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"])
    place = place.removeprefix(".")
    if item["type"] == "missing":
        return RequestRejected(f"{place} is required", param=place, code="missing_field")
    return RequestRejected(f"{place} {_reason(item)}, got {_quote(item['input'])}", param=place)


def _reason(item: ErrorDetails) -> str:
    """pydantic's message in the words of JSON, to stand after the field's name."""
    if item["type"] == "model_type":
        return "must be an object"
    message = item["msg"].removeprefix("Value error, ").replace("a valid integer", "an integer")
    return message.replace("Input should be", "must be").replace("a valid ", "a ")


def _quote(value: object) -> str:
    """A value as JSON, cut where it gets long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."
