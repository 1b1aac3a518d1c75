"""Chat templates: messages to the text of a prompt, as transformers' apply_chat_template renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from raylm.errors import RequestRejected

Message = Mapping[str, object]
"""{"role": str, "content": str or a list of {"type": "text", "text": str}}, and whatever else a template reads."""


class ChatTemplate:
    """One model's chat template (jinja2 source; None for a model without one), compiled at its first use."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: the template's variables such as bos_token and eos_token."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text; special tokens stand in it as text.

        Raises RequestRejected(param="messages") when a message is malformed, the template refuses the conversation or
        the model has none.
        """
        plain = _plain(messages)
        try:
            return self._compiled().render(
                messages=plain,
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

    def _compiled(self) -> jinja2.Template:
        if self._source is None:
            raise _rejected("the model has no chat template, so it takes no messages; send a prompt instead")
        if self._template is None:
            self._template = _environment().from_string(self._source)
        return self._template


def _plain(messages: Sequence[Message]) -> list[dict[str, object]]:
    if not messages:
        raise _rejected("messages must hold at least one message, got none")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: Message, where: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise _rejected(f"{where} must be an object with role and content, got {message!r}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _rejected(f"{where}.role must be a non-empty string, got {role!r}")
    return {**message, "content": _plain_content(message.get("content"), f"{where}.content")}


def _plain_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise _rejected(f"{where} must be a string or a list of text parts, got {content!r}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise _rejected(f"{where}[{index}] must be a part of type 'text' (the model reads text only), got {kind!r}")
        text = part.get("text")
        if not isinstance(text, str):
            raise _rejected(f"{where}[{index}].text must be a string, got {text!r}")
        texts.append(text)
    return "".join(texts)


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
