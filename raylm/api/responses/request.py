"""The body of POST /v1/responses: its fields, checked, and what they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from raylm.api.identity import Identity
from raylm.api.params import Asking, asking
from raylm.api.parser import read_fields, validated
from raylm.api.protocol import ChatRequest
from raylm.api.responses.items import read_input
from raylm.api.responses.wire import Item
from raylm.api.structure import Asked, read_format
from raylm.api.unsupported import HARMLESS, SGLANG, VLLM, Fields, refuse_fields
from raylm.config.sampling import SamplingDefaults
from raylm.config.serving import HttpConfig
from raylm.core.options import MAX_NAME_CHARS
from raylm.errors import RequestRejected
from raylm.generation.listing import LogprobForm
from raylm.generation.quote import quote

MAX_METADATA = 16
MAX_KEY_CHARS = 64
MAX_VALUE_CHARS = 512
LOGPROBS = "message.output_text.logprobs"
INCLUDES = frozenset(
    {
        LOGPROBS,
        # What a model thought is in its reasoning items as it is.
        "reasoning.encrypted_content",
        # Of items that no response here has.
        *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
    }
)

UNSUPPORTED: Fields = {
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    # Of chats, whose names differ here: input, max_output_tokens, text.format, reasoning.effort.
    "functions": ([],),
    "function_call": (),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "n": (1,),
    "reasoning_effort": (),
    "response_format": (),
}
"""Fields that are refused by name, with the values that ask for nothing."""
_TEXT_FIELDS: Fields = {"verbosity": ("medium",)}
_REASONING_FIELDS: Fields = {"summary": ("auto",), "generate_summary": ("auto",)}
"""No model here writes summaries, so the best that it has, which auto is, is none."""
_STREAM_FIELDS: Fields = {"include_obfuscation": (False,)}


def _few(value: dict[str, str] | None) -> dict[str, str] | None:
    for key, text in (value or {}).items():
        if len(key) > MAX_KEY_CHARS or len(text) > MAX_VALUE_CHARS:
            raise ValueError(
                f"must have keys of at most {MAX_KEY_CHARS} characters and values of at most {MAX_VALUE_CHARS}"
            )
    if value is not None and len(value) > MAX_METADATA:
        raise ValueError(f"must have at most {MAX_METADATA} pairs")
    return value


def _known(value: list[str] | None) -> list[str] | None:
    for name in value or []:
        if name not in INCLUDES:
            raise ValueError(f"must hold only {', '.join(sorted(INCLUDES))}")
    return value


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class ReasoningFields(_Body):
    effort: str | None = None


class TextFields(_Body):
    format: object = None


class ResponsesRequest(_Body):
    """POST /v1/responses. null means the default everywhere. The last fields are vLLM's and raylm's own."""

    model: str | None = None
    input: Annotated[object, WithJsonSchema(_INPUT)] = None
    instructions: str | None = None
    background: bool | None = None
    include: Annotated[list[str] | None, AfterValidator(_known)] = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    metadata: Annotated[dict[str, str] | None, AfterValidator(_few)] = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningFields | None = None
    safety_identifier: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "fast", "scale"] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, object] | None = None
    temperature: float | None = None
    text: TextFields | None = None
    tool_choice: object = None
    tools: list[object] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None

    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    thinking_token_budget: int | None = None
    priority: int | None = None
    deadline_s: float | None = None
    queue_timeout_s: float | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None


_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "min_tokens", "ignore_eos", "thinking_token_budget"),
    *("priority", "deadline_s", "queue_timeout_s", "cache_salt", "stream"),
)
"""Fields that a chat has under the same name and with the same meaning."""
_KNOWN = ResponsesRequest.model_fields.keys() | UNSUPPORTED.keys() | HARMLESS.keys()
_FOREIGN: Fields = {
    name: neutral for name, neutral in {**VLLM, **SGLANG}.items() if name not in ResponsesRequest.model_fields
}


class Reading(NamedTuple):
    """A request that was read: its fields and the items of its input."""

    fields: ResponsesRequest
    items: list[Item]


def read_request(body: bytes | bytearray, limits: HttpConfig) -> Reading:
    """Check a body, and empty it. Raises RequestRejected."""
    data = read_fields(body, limits, _KNOWN | _FOREIGN.keys())
    refuse_fields(data, UNSUPPORTED)
    refuse_fields(data, _FOREIGN)
    refuse_fields(data.get("text"), _TEXT_FIELDS, "text.")
    refuse_fields(data.get("reasoning"), _REASONING_FIELDS, "reasoning.")
    refuse_fields(data.get("stream_options"), _STREAM_FIELDS, "stream_options.")
    fields = validated(ResponsesRequest, data)
    if fields.background and fields.store is False:
        raise RequestRejected("background=true needs store=true: the response is fetched later", param="store")
    return Reading(fields, read_input(fields.input, limits))


def asking_of(fields: ResponsesRequest, sampling: SamplingDefaults, identity: Identity) -> Asking:
    """What a request asks of the engine; `sampling` holds where it says nothing. Raises RequestRejected."""
    given = {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    chat = ChatRequest.model_construct(messages=[], stop=stop, user=fields.user, **given)
    asked = asking(chat, sampling, identity, default_max_tokens=None)
    limit = asked.wanted.limit._replace(field="max_output_tokens", value=fields.max_output_tokens)
    params = replace(asked.wanted.params, max_tokens=fields.max_output_tokens)
    form = asked.answer
    if fields.top_logprobs is not None or LOGPROBS in (fields.include or ()):
        top = fields.top_logprobs or 0
        params = replace(params, logprobs=top)
        form = form._replace(logprobs=LogprobForm(top, as_chat=True))
    wanted = asked.wanted._replace(params=params, limit=limit)
    return asked._replace(wanted=wanted, answer=form, structure=_structure(fields))


def _structure(fields: ResponsesRequest) -> Asked | None:
    given = None if fields.text is None else fields.text.format
    if given is None:
        return None
    if isinstance(given, Mapping) and given.get("type") == "json_schema":
        inner = {key: value for key, value in given.items() if key != "type"}
        return read_format("text.format", {"type": "json_schema", "json_schema": inner})
    if isinstance(given, Mapping) and given.get("type") not in ("text", "json_object"):
        kind = given.get("type")
        raise RequestRejected(
            f"text.format.type must be text, json_object or json_schema, got {quote(kind)}", param="text.format.type"
        )
    return read_format("text.format", given)
