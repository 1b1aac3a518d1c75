"""How conversations become prompts, and answers messages."""

from __future__ import annotations

from pydantic import Field, JsonValue, field_validator

from raylm.config.base import FrozenConfig

RESERVED_VARIABLES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("raise_exception", "strftime_now", "loop", "self"),
    }
)
"""Variables of a chat template that template_kwargs and a request's chat_template_kwargs must not set."""


def is_template(given: str) -> bool:
    """Whether this is a chat template's text, and not a file or a name."""
    return any(sign in given for sign in ("{{", "{%", "{#", "\n"))


class ChatConfig(FrozenConfig):
    """`chat`: the chat template's variables and limits, and the format of tool calls and reasoning."""

    template_kwargs: dict[str, JsonValue] = {}
    """Variables of the chat template for every request; a request's chat_template_kwargs win over them."""
    allow_request_templates: bool = False
    """Let a request bring its own `chat_template`. A template is a program: it runs in a sandbox, with tighter limits
    than these."""
    template_timeout_s: float = Field(default=5.0, gt=0, le=60)
    """Seconds that a chat template may take for one conversation."""
    max_prompt_chars: int = Field(default=16 * 2**20, ge=1024, le=2**30)
    """Characters that a chat template may write for one conversation."""
    tools: str = "auto"
    """The format in which the model calls tools; auto reads it off the chat template."""
    reasoning: str = "auto"
    """The format of the model's reasoning; auto reads it off the chat template."""

    @field_validator("template_kwargs")
    @classmethod
    def _sets_no_reserved_variable(cls, values: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted(RESERVED_VARIABLES.intersection(values)):
            raise ValueError(f"{taken[0]!r} is a variable that the server sets itself")
        return values
