"""From a conversation to a prompt, the form of the answer and how the answer is read; for every API that chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from raylm.core.sampling import SamplingParams
from raylm.core.structure import StructuredOutput
from raylm.core.thinking import ThinkingSection
from raylm.errors import RequestRejected
from raylm.generation.parsing import CallFormat, ModelFormat, OutputReading, ReasoningFormat
from raylm.generation.parsing.formats import CHANNELS, GRANITE_TEXT
from raylm.generation.reader import Reading
from raylm.generation.served_model import Text
from raylm.generation.tool_grammar import tool_structure
from raylm.generation.tools import NO_TOOLS, ToolUse
from raylm.text.chat import Message
from raylm.text.chat_options import ChatOptions


class Chat(NamedTuple):
    """A conversation that wants an answer.

    structure: the form that the answer's text must have. reads_reasoning: what the model thinks is set off from the
    text; without it everything that it writes is text.
    """

    messages: Sequence[Message]
    options: ChatOptions = ChatOptions()
    tools: ToolUse = NO_TOOLS
    structure: StructuredOutput | None = None
    reads_reasoning: bool = True


class OpenedChat(NamedTuple):
    """text: the prompt. params: the request's, as the model's formats need them. reading: how the answer becomes
    pieces; None: all of it is text. structure: the form of all that the model writes, calls too."""

    text: str
    params: SamplingParams
    reading: Reading | None
    structure: StructuredOutput | None


def open_chat(side: Text, own: ModelFormat, chat: Chat, params: SamplingParams) -> OpenedChat:
    """`side` is the model's text side, `own` how it writes calls and reasoning. Raises RequestRejected for a
    conversation that the template refuses, and for what the model cannot do."""
    shown = [tool.as_function() for tool in chat.tools.shown_tools]
    text = side.render(chat.messages, replace(chat.options, tools=shown or None))
    calls = own.calls if shown else None
    thinking = Thinking(own.reasoning, text, chat.options)
    params = _with_budget(side, thinking, params)
    structure = _structure(chat, calls, thinking, side)
    reasoning = own.reasoning if chat.reads_reasoning else None
    if calls is None and reasoning is None:
        return OpenedChat(text, params, None, structure)
    form = ModelFormat(calls, reasoning)
    if form.keeps_special_tokens:
        params = replace(params, skip_special_tokens=False)
    schemas = {tool.name: tool.parameters or {} for tool in chat.tools.tools}
    in_reasoning = reasoning is not None and thinking.has_begun
    return OpenedChat(text, params, OutputReading(form, schemas, calls is not None, in_reasoning), structure)


class Thinking:
    """Whether the model thinks before it answers, as its prompt says."""

    def __init__(self, form: ReasoningFormat | None, prompt: str, options: ChatOptions) -> None:
        self.form = form
        end = prompt.rstrip()
        self.has_begun = form is not None and end.endswith(form.begin)
        """The prompt ends inside the thinking."""
        is_over = form is not None and end.endswith(form.end)
        # Granite thinks only when its template is told to; other families do unless told otherwise.
        is_on = form is not GRANITE_TEXT or bool(options.variables.get("thinking"))
        self.is_expected = form is not None and (self.has_begun or (is_on and options.begins_answer and not is_over))

    def end_ids(self, text: Text) -> tuple[int, ...]:
        """The tokens after which the answer begins; none where the model begins with it."""
        if self.form is None or not self.is_expected:
            return ()
        mark = "<|channel|>final<|message|>" if self.form is CHANNELS else self.form.end[0]
        return tuple(text.encode(mark, add_special_tokens=False))

    def section(self, text: Text) -> ThinkingSection:
        """Raises RequestRejected where this model's thinking has no marks that could be forced."""
        form = self.form
        if form is None or form is CHANNELS:
            what = "ends its thinking by more than a mark" if form is CHANNELS else "does not think"
            raise RequestRejected(
                f"thinking_token_budget is not possible: the model {what}",
                param="thinking_token_budget",
                code="unsupported_parameter",
            )
        begin, end = (tuple(text.encode(marks[0], add_special_tokens=False)) for marks in (form.begin, form.end))
        return ThinkingSection(begin, end, begun=self.has_begun)


def _with_budget(text: Text, thinking: Thinking, params: SamplingParams) -> SamplingParams:
    return params if params.thinking_token_budget < 0 else replace(params, thinking=thinking.section(text))


def _structure(chat: Chat, calls: CallFormat | None, thinking: Thinking, text: Text) -> StructuredOutput | None:
    """The one form of all that the model writes. Raises RequestRejected where there is none."""
    if chat.tools.shown_tools:
        # Thinking that has not begun may be left out, so the grammar has it where it may come.
        end = thinking.end_ids(text) if thinking.has_begun else ()
        form = ModelFormat(calls, thinking.form if thinking.is_expected else None)
        return tool_structure(chat.tools, form, end_of_thinking=end, answer=chat.structure)
    begin_after = thinking.end_ids(text)
    if chat.structure is None or not begin_after:
        return chat.structure
    return replace(chat.structure, begin_after=begin_after)
