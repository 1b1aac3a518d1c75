"""Chat templates: messages to the text of a prompt, as transformers' apply_chat_template renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from reprlib import repr as brief
from typing import NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from raylm.errors import RequestRejected
from raylm.text.template_reading import TemplateReading

Message = Mapping[str, object]
"""{"role": str, "content": str or a list of {"type": "text", "text": str}}, and whatever else a template reads. An
assistant's content may be None or missing, and one of its parts or its `refusal` may be what it refused with."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of a part that are text, with the field that holds it."""


class ChatTemplate:
    """One model's chat template (jinja2 source; None for a model without one), compiled at its first use."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: the template's variables such as bos_token and eos_token."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._template: tuple[jinja2.Template, TemplateReading] | None = None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text; special tokens stand in it as text.

        Raises RequestRejected(param="messages") when a message is malformed, the template refuses the conversation or
        the model has none.
        """
        conversation = _checked(messages)
        try:
            template, reading = self._compiled()
            return template.render(
                messages=[_as_read(message, reading) for message in conversation],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateSyntaxError as error:
            raise _rejected(f"the model's chat template is not valid, line {error.lineno}: {error.message}") from None
        except jinja2.TemplateError as error:
            raise _rejected(f"the model's chat template refuses these messages: {error}") from None
        except RequestRejected:
            raise
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise _rejected(f"the model's chat template fails on these messages: {reason}") from None

    def _compiled(self) -> tuple[jinja2.Template, TemplateReading]:
        if self._source is None:
            raise _rejected("the model has no chat template, so it takes no messages; send a prompt instead")
        if self._template is None:
            environment = _environment()
            tree = environment.parse(self._source)
            # Read before it is compiled, which folds constants in the tree.
            reading = TemplateReading(tree)
            self._template = (environment.from_string(tree), reading)
        return self._template


class _Turn(NamedTuple):
    """A message that was checked: its texts, and whether they came as parts."""

    message: Message
    role: str
    texts: list[str]
    is_string: bool


def _checked(messages: Sequence[Message]) -> list[_Turn]:
    if not messages:
        raise _rejected("messages must hold at least one message, got none")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: Message, where: str) -> _Turn:
    if not isinstance(message, Mapping):
        raise _rejected(f"{where} must be an object with role and content, got {brief(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _rejected(f"{where}.role must be a non-empty string, got {brief(role)}")
    content = message.get("content")
    if role == "assistant":
        refusal = message.get("refusal")
        if isinstance(refusal, str) and refusal:
            texts = [] if content is None else _texts(content, f"{where}.content")
            return _Turn(message, role, [*texts, refusal], is_string=not texts)
        if content is None:
            content = ""
    return _Turn(message, role, _texts(content, f"{where}.content"), is_string=isinstance(content, str))


def _texts(content: object, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        raise _rejected(f"{where} must be a string or a list of text parts, got {brief(content)}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise _rejected(
                f"{where}[{index}] must be a part of type 'text' (the model reads text only), got {brief(kind)}"
            )
        text = part.get(field)
        if not isinstance(text, str):
            raise _rejected(f"{where}[{index}].{field} must be a string, got {brief(text)}")
        texts.append(text)
    return texts


def _as_read(turn: _Turn, reading: TemplateReading) -> dict[str, object]:
    """A message as the template wants it. A template that goes through parts gets them; others get one string, in which
    a line end stands between two parts, as with vLLM."""
    content: object = "\n".join(turn.texts)
    if reading.takes_parts and not (turn.is_string and reading.takes_strings):
        content = [{"type": "text", "text": text} for text in turn.texts]
    role = turn.role
    if role == "developer" and not reading.knows_developer:
        # OpenAI's later name of the system's role, which most templates have not heard of.
        role = "system"
    return {**turn.message, "role": role, "content": content}


def _rejected(message: str) -> RequestRejected:
    return RequestRejected(message, param="messages")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """{% generation %}: marks an answer's text for training; a prompt takes it as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
