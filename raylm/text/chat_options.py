"""What a request may say of how its conversation becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as brief

from raylm.config.chat import RESERVED_VARIABLES
from raylm.errors import RequestRejected


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How one conversation is rendered. Raises RequestRejected naming the field.

    tools: OpenAI's tools, {"type": "function", "function": {...}}; None or empty shows none.
    documents: objects, usually with title and text, for a template that reads documents.
    add_generation_prompt: end with the beginning of an answer; by default unless continue_final_message.
    continue_final_message: leave the last message open, so that the model goes on with it.
    reasoning_effort: a variable of the template; "none" switches thinking off where a template has such a switch
        (enable_thinking, thinking), anything else switches it on.
    kwargs: more variables of the template (chat_template_kwargs); they win over the configuration's.
    template: the request's own template, or a bundled or a checkpoint's one by name.
    """

    tools: Sequence[Mapping[str, object]] | None = None
    documents: Sequence[Mapping[str, object]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    kwargs: Mapping[str, object] = field(default_factory=dict)
    template: str | None = None

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestRejected(
                "continue_final_message and add_generation_prompt exclude each other: the last message is either "
                "continued or answered",
                param="continue_final_message",
            )
        _check_objects(self.tools, "tools")
        _check_objects(self.documents, "documents")
        if not isinstance(self.kwargs, Mapping):
            raise RequestRejected(
                f"chat_template_kwargs must be an object, got {brief(self.kwargs)}", param="chat_template_kwargs"
            )
        if taken := sorted(RESERVED_VARIABLES.intersection(self.kwargs)):
            raise RequestRejected(
                f"chat_template_kwargs must not set {taken[0]!r}: the server sets this variable itself",
                param="chat_template_kwargs",
            )

    @property
    def variables(self) -> dict[str, object]:
        """What the request sets of the template's own variables: by reasoning_effort, and by kwargs, which win."""
        thinks = self.reasoning_effort != "none"
        effort = {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
        return {**(effort if self.reasoning_effort is not None else {}), **self.kwargs}

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt ends with the beginning of an answer."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


def _check_objects(values: object, name: str) -> None:
    if values is None:
        return
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RequestRejected(f"{name} must be a list of objects, got {brief(values)}", param=name)
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise RequestRejected(f"{name}[{index}] must be an object, got {brief(value)}", param=name)
