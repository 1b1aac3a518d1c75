"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens, and the fields that are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field

from raylm.api.unsupported import Fields, refuse_fields
from raylm.core.options import MAX_NAME_CHARS
from raylm.errors import RequestRejected
from raylm.generation.quote import quote

UNSUPPORTED: Fields = {
    "compaction": (),
    "container": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}
HARMLESS: Mapping[str, str] = {
    "cache_control": "prefixes are cached without a mark",
    **dict.fromkeys(
        ("billing_policy", "diagnostics", "fallback_credit_token", "service_tier", "user_profile_id", "workspace_id"),
        "it says who pays, how fast, or what is noted of it",
    ),
}
"""Fields that are known and never change an answer, and why not."""
_HARMLESS_EDITS = ("clear_thinking_",)
"""Edits of a context that the chat template makes by itself: it says which turns keep their thinking."""


def _listed(value: object) -> object:
    """null is none."""
    return [] if value is None else value


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class Metadata(_Body):
    user_id: str | None = Field(default=None, max_length=MAX_NAME_CHARS)


class ConversationRequest(_Body):
    """POST /v1/messages/count_tokens. What is `object` here is read in conversation.py, tools.py and reading.py."""

    model: str | None = None
    """Where it is left out, the one model that there is."""
    messages: Annotated[list[object], FailFast(), Field(min_length=1)]
    system: object = None
    tools: object = None
    tool_choice: object = None
    thinking: object = None
    output_config: object = None
    output_format: object = None


class MessagesRequest(ConversationRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: Annotated[list[str], FailFast(), BeforeValidator(_listed)] = []
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None


KNOWN = MessagesRequest.model_fields.keys() | UNSUPPORTED.keys() | HARMLESS.keys() | {"context_management", "betas"}
"""Fields of both bodies."""


def refuse_unsupported(data: Mapping[str, object]) -> None:
    """Raises RequestRejected for the first field that asks for something that this server does not do."""
    refuse_fields(data, UNSUPPORTED)
    management = data.get("context_management")
    edits = management.get("edits") if isinstance(management, dict) else management
    for index, edit in enumerate(edits if isinstance(edits, list) else [] if edits is None else [edits]):
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if not isinstance(kind, str) or not kind.startswith(_HARMLESS_EDITS):
            place = f"context_management.edits[{index}]"
            message = f"{place}.type must begin with clear_thinking_ (other edits are not supported), got {quote(kind)}"
            raise RequestRejected(message, param=place, code="unsupported_parameter")
