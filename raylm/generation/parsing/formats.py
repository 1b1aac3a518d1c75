"""Formats of tool calls and of reasoning, as data: read by `reader.py`, and enough to write a grammar from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raylm.generation.parsing.sink import IdStyle

Arguments = Literal["json", "tags", "python", "gemma"]
"""How arguments are written: a JSON object; one pair of tags for each; Python's keyword arguments; Gemma's braces."""
Style = Literal["object", "mistral", "deepseek", "kimi", "tagged", "pythonic", "gemma", "harmony"]
"""What reads it: objects with the name in them; a name before an object, as three families write it; arguments in tags;
Python's calls; FunctionGemma's; harmony's channels."""


@dataclass(frozen=True)
class Tags:
    """Arguments in tags: `key_begin` KEY `key_end` `value_begin` VALUE `value_end`, one after another."""

    name_begin: str
    """Before the name of each call; empty where the mark that opens calls stands there."""
    name_end: str
    """After the name; empty where white space or the next tag is."""
    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    between: str = ""
    """Between two arguments."""
    json_values: bool = False
    """A value is JSON except where it is a string; without it, so are only objects and arrays."""
    trims: bool = False
    """A newline before and one after a value are not of the value."""


@dataclass(frozen=True)
class CallFormat:
    """How a family writes tool calls.

    Written whole: `section[0]`, then for each call `call_begin(name)`, its arguments and `call_end`, `separator`
    between calls, then `section[1]`. Reading takes any white space for the one in these texts.
    """

    name: str
    style: Style
    arguments: Arguments
    opens: tuple[str, ...]
    """Texts that begin calls; where all calls and each one have a mark, the last is that of each one."""
    before_name: str
    """What a call begins with, up to its name."""
    after_name: str
    """Between the name and the arguments."""
    call_end: str = ""
    section: tuple[str, str] = ("", "")
    separator: str = ""
    closes: tuple[str, ...] = ()
    """Texts that end a call or all calls, and of which nothing is seen."""
    bare: Literal["", "{", "["] = ""
    """What begins calls without any mark."""
    bare_anywhere: bool = False
    """A bare call may follow text. Without it, only white space."""
    tags: Tags | None = None
    strips_text: bool = False
    """No white space at all is kept between a text and a call, not only no newlines."""
    name_key: str = "name"
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    ids: IdStyle = "call"
    noise: tuple[str, ...] = ()
    """Special tokens that may stand around text and mean nothing to a reader."""
    keeps_special_tokens: bool = False
    """The marks are special tokens: detokenising must keep these."""
    hides_marks: bool = False
    """A mark in `opens` that no call follows is not shown, as special tokens are not."""

    def call_begin(self, name: str) -> str:
        """What a call of this tool begins with, up to its arguments."""
        return f"{self.before_name}{name}{self.after_name}"


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family sets reasoning off from the answer."""

    name: str
    begin: tuple[str, ...]
    """Texts that begin reasoning; the first is the one that the family writes."""
    end: tuple[str, ...]
    """Texts that end it; the first is the one that the family writes."""
    ended_by_calls: bool = False
    """A tool call ends it too."""
    noise: tuple[str, ...] = ()
    keeps_special_tokens: bool = False


HERMES = CallFormat(
    name="hermes",
    style="object",
    arguments="json",
    opens=("<tool_call>",),
    before_name='<tool_call>\n{"name": "',
    after_name='", "arguments": ',
    call_end="}\n</tool_call>",
    separator="\n",
    closes=("</tool_call>",),
    noise=("<|im_end|>", "<|endoftext|>"),
    keeps_special_tokens=True,
)
QWEN3_CODER = CallFormat(
    name="qwen3_coder",
    style="tagged",
    arguments="tags",
    opens=("<tool_call>", "<function="),
    before_name="<tool_call>\n<function=",
    after_name=">\n",
    call_end="\n</function>\n</tool_call>",
    separator="\n",
    closes=("</function>", "</tool_call>"),
    tags=Tags("<function=", ">", "<parameter=", ">\n", "", "\n</parameter>", between="\n", trims=True),
    noise=("<|im_end|>", "<|endoftext|>"),
    keeps_special_tokens=True,
)
GLM = CallFormat(
    name="glm",
    style="tagged",
    arguments="tags",
    opens=("<tool_call>",),
    before_name="<tool_call>",
    after_name="\n",
    call_end="\n</tool_call>",
    separator="\n",
    closes=("</tool_call>",),
    tags=Tags("", "", "<arg_key>", "</arg_key>", "\n<arg_value>", "</arg_value>", between="\n", json_values=True),
    strips_text=True,
    noise=("<|user|>", "<|observation|>", "<|endoftext|>"),
    keeps_special_tokens=True,
)
LLAMA3_JSON = CallFormat(
    name="llama3_json",
    style="object",
    arguments="json",
    opens=("<|python_tag|>",),
    before_name='{"name": "',
    after_name='", "parameters": ',
    call_end="}",
    separator="; ",
    bare="{",
    bare_anywhere=True,
    noise=("<|eom_id|>", "<|eot_id|>", "<|eot|>"),
    keeps_special_tokens=True,
    hides_marks=True,
)
LLAMA_PYTHONIC = CallFormat(
    name="pythonic",
    style="pythonic",
    arguments="python",
    opens=("<|python_start|>", "<|python_tag|>"),
    before_name="",
    after_name="(",
    call_end=")",
    section=("[", "]"),
    separator=", ",
    closes=("<|python_end|>",),
    bare="[",
    noise=("<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>", "<|python_end|>"),
    keeps_special_tokens=True,
    hides_marks=True,
)
GEMMA_PYTHONIC = CallFormat(
    name="gemma3",
    style="pythonic",
    arguments="python",
    opens=("```tool_code", "```tool_call"),
    before_name="",
    after_name="(",
    call_end=")",
    section=("[", "]"),
    separator=", ",
    closes=("```",),
    bare="[",
)
MISTRAL_JSON = CallFormat(
    name="mistral_json",
    style="mistral",
    arguments="json",
    opens=("[TOOL_CALLS]",),
    before_name='{"name": "',
    after_name='", "arguments": ',
    call_end="}",
    section=("[TOOL_CALLS] [", "]"),
    separator=", ",
    ids="mistral",
    noise=("</s>",),
    keeps_special_tokens=True,
    hides_marks=True,
)
MISTRAL = CallFormat(
    name="mistral",
    style="mistral",
    arguments="json",
    opens=("[TOOL_CALLS]",),
    before_name="[TOOL_CALLS]",
    after_name="[ARGS]",
    ids="mistral",
    noise=("</s>",),
    keeps_special_tokens=True,
    hides_marks=True,
)
DEEPSEEK_V3 = CallFormat(
    name="deepseek_v3",
    style="deepseek",
    arguments="json",
    opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    after_name="\n```json\n",
    call_end="\n```<｜tool▁call▁end｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    separator="\n",
    closes=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    noise=("<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>"),
    keeps_special_tokens=True,
)
DEEPSEEK_V31 = CallFormat(
    name="deepseek_v31",
    style="deepseek",
    arguments="json",
    opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    before_name="<｜tool▁call▁begin｜>",
    after_name="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    closes=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    noise=("<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>"),
    keeps_special_tokens=True,
)
KIMI_K2 = CallFormat(
    name="kimi_k2",
    style="kimi",
    arguments="json",
    opens=(
        "<|tool_calls_section_begin|>",
        "<|tool_call_section_begin|>",
        "<|tool_call_begin|>",
    ),
    before_name="<|tool_call_begin|>functions.",
    after_name=":0<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    closes=("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    noise=("<|tool_calls_section_end|>", "<|tool_call_section_end|>", "<|im_end|>"),
    ids="kimi",
    keeps_special_tokens=True,
)
GRANITE = CallFormat(
    name="granite",
    style="object",
    arguments="json",
    opens=("<|tool_call|>", "<tool_call>"),
    before_name='{"name": "',
    after_name='", "arguments": ',
    call_end="}",
    section=("<|tool_call|>[", "]"),
    separator=", ",
    closes=("</tool_call>",),
    noise=("<|end_of_text|>",),
    keeps_special_tokens=True,
)
FUNCTION_GEMMA = CallFormat(
    name="functiongemma",
    style="gemma",
    arguments="gemma",
    opens=("<start_function_call>",),
    before_name="<start_function_call>call:",
    after_name="{",
    call_end="}<end_function_call>",
    closes=("<end_function_call>",),
    noise=("<end_of_turn>", "<start_function_response>"),
    strips_text=True,
    keeps_special_tokens=True,
)
HARMONY = CallFormat(
    name="harmony",
    style="harmony",
    arguments="json",
    opens=("<|channel|>", "<|start|>"),
    before_name="<|channel|>commentary to=functions.",
    after_name=" <|constrain|>json<|message|>",
    call_end="<|call|>",
    separator="<|start|>assistant",
    noise=("<|end|>", "<|return|>", "<|call|>"),
    keeps_special_tokens=True,
)
CALL_FORMATS = (
    HERMES, QWEN3_CODER, GLM, LLAMA3_JSON, LLAMA_PYTHONIC, GEMMA_PYTHONIC, MISTRAL_JSON, MISTRAL, DEEPSEEK_V3,
    DEEPSEEK_V31, KIMI_K2, GRANITE, FUNCTION_GEMMA, HARMONY,
)  # fmt: skip

THINK = ReasoningFormat("think", ("<think>",), ("</think>",))
THINK_OR_CALL = ReasoningFormat("think_or_call", ("<think>",), ("</think>",), ended_by_calls=True)
GRANITE_TEXT = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:", "<think>"),
    ("Here is my response:", "Here's my response:", "</think>"),
)
MISTRAL_THINK = ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), keeps_special_tokens=True)
CHANNELS = ReasoningFormat(
    "harmony", ("<|channel|>analysis<|message|>",), ("<|end|>",), ended_by_calls=True, keeps_special_tokens=True
)
REASONING_FORMATS = (THINK, THINK_OR_CALL, GRANITE_TEXT, MISTRAL_THINK, CHANNELS)
