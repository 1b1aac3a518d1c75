"""Chat templates: messages to the text of a prompt, as transformers' apply_chat_template renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import jinja2

from raylm.config.chat import is_template
from raylm.errors import RequestRejected
from raylm.text.budget import Limits, TooMuch
from raylm.text.chat_options import ChatOptions
from raylm.text.chat_settings import ChatSettings, bundled, bundled_names
from raylm.text.messages import Message, Turn, checked, plain, reject
from raylm.text.sandbox import Sandbox
from raylm.text.template_reading import TemplateReading
from raylm.text.tool_prompt import tell_calls, tell_results, tell_tools

__all__ = ["ChatTemplate", "Message"]

_OPEN_END = "RAYLM_GOES_ON_HERE "
"""Stands at the end of a message that is continued; what a template writes after it is cut off. The space tells whether
the template trims contents."""
_MAX_REASON_CHARS = 500
_REQUEST_SECONDS = 1.0
"""What a template of a request may take, beside the configuration's limits."""
_REQUEST_CHARS = 2**20
_MAX_SOURCE_CHARS = 32_768
_KEPT_TEMPLATES = 8
"""Templates of requests that stay compiled."""


class ChatTemplate:
    """One model's chat templates, each compiled at its first use. Safe to share between requests and threads."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        settings: ChatSettings | None = None,
        named: Mapping[str, str] | None = None,
    ) -> None:
        """source: the checkpoint's template (jinja2), None where it has none; the settings' comes before it.
        special_tokens: the template's variables such as bos_token and eos_token.
        named: further templates of the checkpoint, such as tool_use, which is taken where there are tools.
        """
        self._settings = settings or ChatSettings()
        self._special_tokens = dict(special_tokens)
        self._named = dict(named or {})
        config = self._settings.config
        limits = Limits(config.template_timeout_s, config.max_prompt_chars)
        self._request_limits = Limits(min(limits.seconds, _REQUEST_SECONDS), min(limits.chars, _REQUEST_CHARS))
        own = self._settings.template if self._settings.template is not None else source
        self._template = None if own is None else _Template(own, "the model's chat template", limits)
        use = self._named.get("tool_use") if self._settings.template is None else None
        self._with_tools = (
            self._template if use is None else _Template(use, "the model's chat template 'tool_use'", limits)
        )
        self._of_request = lru_cache(_KEPT_TEMPLATES)(self._read)

    @property
    def source(self) -> str | None:
        """The template that renders a conversation with tools, if the model has any."""
        return None if self._with_tools is None else self._with_tools.source

    @property
    def reads_tools(self) -> bool:
        """Whether it shows tools itself. Otherwise they are told in the system message, in the format of Hermes."""
        return self._with_tools is not None and self._with_tools.reading.reads_tools

    def render(self, messages: Sequence[Message], options: ChatOptions | None = None) -> str:
        """The prompt's text; special tokens stand in it as text.

        Raises RequestRejected when a message is malformed, the template refuses the conversation or the model has none;
        param is "messages", or the option at fault.
        """
        options = options or ChatOptions()
        turns = checked(messages)
        template = self._chosen(options)
        reading = template.reading
        if options.documents and not reading.reads_documents:
            raise RequestRejected("documents: the model's chat template reads no documents", param="documents")
        tools = plain(options.tools, "tools", param="tools") if options.tools else None
        if not reading.reads_tool_calls:
            turns = tell_calls(turns)
        if not reading.reads_tool_results:
            turns = tell_results(turns)
        if isinstance(tools, list) and not reading.reads_tools:
            turns, tools = tell_tools(turns, tools), None
        conversation = [_as_read(turn, reading) for turn in turns]
        last = _opened(conversation[-1]) if options.continue_final_message else None
        text = template.run({**self._variables(options), "messages": conversation, "tools": tools})
        return text if last is None else _cut(text, last)

    def _chosen(self, options: ChatOptions) -> _Template:
        if options.template is not None:
            return self._requested(options.template)
        chosen = self._with_tools if options.tools else self._template
        if chosen is None:
            raise RequestRejected(
                "the model has no chat template, so it takes no messages; send a prompt instead", param="messages"
            )
        return chosen

    def _requested(self, given: str) -> _Template:
        """The template that a request brings, or names."""
        if not self._settings.config.allow_request_templates:
            raise RequestRejected(
                "chat_template: this server takes no templates from requests (chat.allow_request_templates is false)",
                param="chat_template",
            )
        if len(given) > _MAX_SOURCE_CHARS:
            raise RequestRejected(
                f"chat_template has {len(given)} characters, at most {_MAX_SOURCE_CHARS} are allowed",
                param="chat_template",
            )
        return self._of_request(given)

    def _read(self, given: str) -> _Template:
        source = given
        if not is_template(given):
            if given in self._named:
                source = self._named[given]
            elif given in bundled_names():
                source = bundled(given)
            else:
                known = ", ".join(sorted({*self._named, *bundled_names()}))
                raise RequestRejected(
                    f"chat_template must be a template's text or one of {known}, got {given[:100]!r}",
                    param="chat_template",
                )
        return _Template(source, "chat_template", self._request_limits, param="chat_template")

    def _variables(self, options: ChatOptions) -> dict[str, object]:
        """What a template sees beside the conversation; what comes later wins."""
        documents = plain(options.documents, "documents", param="documents") if options.documents else None
        given = plain(options.variables, "chat_template_kwargs", param="chat_template_kwargs")
        assert isinstance(given, dict), "a mapping is copied as one"
        return {
            **self._special_tokens,
            **self._settings.config.template_kwargs,
            **given,
            "documents": documents,
            "add_generation_prompt": options.begins_answer,
        }


class _Template:
    """One template: its source, what the source says of it, and its compiled form."""

    def __init__(self, source: str, name: str, limits: Limits, *, param: str = "messages") -> None:
        """`name`: what it is called in sentences; `param`: the field that is at fault when it is wrong."""
        self.source = source
        self._name = name
        self._limits = limits
        self._param = param
        self._sandbox: Sandbox | None = None

    @property
    def reading(self) -> TemplateReading:
        """Raises RequestRejected where the source is no template."""
        return self._compiled().reading

    def run(self, variables: Mapping[str, object]) -> str:
        sandbox = self._compiled()
        try:
            text = sandbox.run(variables, self._limits)
            # No tokenizer takes a lone surrogate, which escapes in JSON's or the template's own strings can write.
            text.encode()
            return text
        except UnicodeEncodeError as error:
            raise self._rejected(f"writes no text: half of a pair of surrogates at character {error.start}") from None
        except jinja2.TemplateError as error:
            raise self._rejected(f"refuses these messages: {error}") from None
        except TooMuch as error:
            raise self._rejected(f"was stopped on these messages: it {error}") from None
        except Exception as error:  # a template is a program of somebody else's: it may raise anything
            raise self._rejected(f"fails on these messages: {type(error).__name__}: {error}") from None

    def _compiled(self) -> Sandbox:
        if self._sandbox is None:
            try:
                self._sandbox = Sandbox(self.source)
            except jinja2.TemplateSyntaxError as error:
                raise self._rejected(f"is not valid, line {error.lineno}: {error.message}") from None
            except Exception as error:  # Python's compiler has limits of its own
                raise self._rejected(f"is not valid: {type(error).__name__}: {error}") from None
        return self._sandbox

    def _rejected(self, reason: str) -> RequestRejected:
        if len(reason) > _MAX_REASON_CHARS:
            reason = reason[:_MAX_REASON_CHARS] + "..."
        return RequestRejected(f"{self._name} {reason}", param=self._param)


def _as_read(turn: Turn, reading: TemplateReading) -> dict[str, object]:
    """A message as the template wants it. A template that goes through parts gets them; others get one string."""
    content: object = turn.text
    if reading.takes_parts and not (turn.is_string and reading.takes_strings):
        content = [{"type": "text", "text": part.text} for part in turn.parts]
    role = turn.role
    if role == "developer" and not reading.knows_developer:
        # OpenAI's later name of the system's role, which most templates have not heard of.
        role = "system"
    message: dict[str, object] = {"role": role, "content": content, **turn.rest}
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.calls
        ]
    if turn.reasoning is not None:
        message |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), turn.reasoning)
    return message


def _opened(message: dict[str, object]) -> str:
    """Mark the end of the last message; its text as it was."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _OPEN_END
        return content
    if not isinstance(content, list) or not content:
        reject("continue_final_message: the last message has no text to go on from")
    text = str(content[-1]["text"])
    content[-1]["text"] = text + _OPEN_END
    return text


def _cut(text: str, last: str) -> str:
    """What was rendered up to the mark. A template that trims contents trims the end of an open one too."""
    place = text.rfind(_OPEN_END.strip())
    if place < 0 or last.strip() not in text:
        reject("continue_final_message: the model's chat template does not show the last message as it is")
    return text[:place] if text.startswith(_OPEN_END, place) else text[:place].rstrip()
