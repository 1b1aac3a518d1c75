"""What Ollama's requests say of sampling, thinking, the answer's form and the conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from raylm.api.ollama.request import Options
from raylm.api.structure import Asked
from raylm.api.unsupported import Fields, refuse_fields
from raylm.config.sampling import SamplingDefaults
from raylm.core.sampling import SamplingParams
from raylm.core.structure import StructuredOutput
from raylm.errors import RequestRejected
from raylm.generation.quote import quote
from raylm.text.chat import Message
from raylm.text.chat_options import ChatOptions

_NAMES = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
"""Fields of SamplingParams that Ollama names otherwise."""
_RANDOM_SEED = -1
_MESSAGE: Fields = {"images": ([],)}
_EFFORTS = ("low", "medium", "high")


def read_options(options: Options, sampling: SamplingDefaults) -> SamplingParams:
    """`sampling` holds where `options` say nothing; they set no max_tokens. Raises RequestRejected."""
    given = options.model_dump(exclude_none=True, exclude={"num_predict", "repeat_penalty", "seed", "stop"})
    if options.repeat_penalty is not None:
        given["repetition_penalty"] = options.repeat_penalty
    if options.seed != _RANDOM_SEED:
        given["seed"] = options.seed
    if options.top_k == -1:
        given["top_k"] = 0
    try:
        return SamplingParams(**{**sampling.fields(), **given, "stop": tuple(options.stop)})
    except RequestRejected as error:
        param = error.param or ""
        name = f"options.{_NAMES.get(param, param)}"
        raise RequestRejected(str(error).replace(param, name, 1), param=name, code=error.code) from None


def num_predict(options: Options) -> int | None:
    """Tokens to generate at most; None, Ollama's 0 or less, means up to the model's length."""
    return options.num_predict if options.num_predict is not None and options.num_predict > 0 else None


class Thinking(NamedTuple):
    """options: of the chat template. is_shown: the answer has what the model thinks."""

    options: ChatOptions
    is_shown: bool


def read_think(value: object) -> Thinking:
    """`think`; without it the model thinks as its template says. Raises RequestRejected."""
    if value is None or value == "":
        return Thinking(ChatOptions(), is_shown=True)
    if isinstance(value, str) and value in _EFFORTS:
        switches = {"enable_thinking": True, "thinking": True}
        return Thinking(ChatOptions(reasoning_effort=value, kwargs=switches), is_shown=True)
    if not isinstance(value, bool):
        _refuse(f"think must be true, false, low, medium or high, got {quote(value)}", "think")
    return Thinking(ChatOptions(kwargs={"enable_thinking": value, "thinking": value}), is_shown=value)


def read_format(value: object) -> Asked | None:
    """`format`: "json" or a JSON schema. Raises RequestRejected."""
    if value is None or value == "":
        return None
    if value == "json":
        return Asked(StructuredOutput("json_object"), "format")
    if not isinstance(value, Mapping):
        _refuse(f'format must be "json" or a JSON schema, got {quote(value)}', "format")
    return Asked(StructuredOutput("json_schema", json.dumps(value, ensure_ascii=False)), "format")


def read_messages(messages: Sequence[object]) -> list[Message]:
    """As chat templates read them. Raises RequestRejected, naming the place, such as messages[2].tool_calls[0]."""
    reader = _Reader()
    return [reader.message(one, f"messages[{index}]") for index, one in enumerate(messages)]


class _Reader:
    """Takes messages, one after the other. Ollama's calls need no id, so a result is one of the call before it that has
    none yet, by its tool's name where it says that."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []
        """Ids and names of calls without a result."""
        self._num_calls = 0

    def message(self, value: object, place: str) -> Message:
        if not isinstance(value, Mapping):
            _refuse(f"{place} must be an object with role and content, got {quote(value)}", place)
        refuse_fields(value, _MESSAGE, f"{place}.")
        role, content = value.get("role"), value.get("content")
        if not isinstance(role, str) or not role:
            _refuse(f"{place}.role must be a string that is not empty, got {quote(role)}", f"{place}.role")
        if content is not None and not isinstance(content, str):
            _refuse(f"{place}.content must be a string, got {quote(content)}", f"{place}.content")
        found: dict[str, object] = {"role": role, "content": content or ""}
        thinking = value.get("thinking")
        if isinstance(thinking, str) and thinking:
            found["reasoning_content"] = thinking
        calls = self._calls(value.get("tool_calls"), f"{place}.tool_calls")
        if calls:
            found["tool_calls"] = calls
        return {**found, **self._result_of(value)} if role == "tool" else found

    def _calls(self, value: object, place: str) -> list[dict[str, object]]:
        if value is None:
            return []
        if not isinstance(value, list):
            _refuse(f"{place} must be a list, got {quote(value)}", place)
        return [self._call(one, f"{place}[{index}]") for index, one in enumerate(value)]

    def _call(self, value: object, place: str) -> dict[str, object]:
        function = value.get("function") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(function, Mapping):
            _refuse(f"{place} must be an object with a function, got {quote(value)}", place)
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name:
            where = f"{place}.function.name"
            _refuse(f"{where} must be a string that is not empty, got {quote(name)}", where)
        if arguments is not None and not isinstance(arguments, Mapping):
            where = f"{place}.function.arguments"
            _refuse(f"{where} must be an object, got {quote(arguments)}", where)
        self._num_calls += 1
        given = value.get("id")
        own_id = given if isinstance(given, str) and given else f"call_{self._num_calls}"
        self._open.append((own_id, name))
        text = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        return {"id": own_id, "type": "function", "function": {"name": name, "arguments": text}}

    def _result_of(self, message: Mapping[str, object]) -> dict[str, object]:
        """The call that this message is the result of."""
        wanted_id, wanted = message.get("tool_call_id"), message.get("tool_name") or message.get("name")
        for call in self._open:
            if wanted_id == call[0] or (not wanted_id and wanted in (None, "", call[1])):
                self._open.remove(call)
                return {"tool_call_id": call[0], "name": call[1]}
        known = {"tool_call_id": wanted_id, "name": wanted}
        return {name: value for name, value in known.items() if isinstance(value, str) and value}


def _refuse(message: str, param: str) -> NoReturn:
    raise RequestRejected(message, param=param)
