"""Which formats a model writes: found in its chat template, or named in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from raylm.generation.parsing import formats
from raylm.generation.parsing.formats import CallFormat, ReasoningFormat
from raylm.plugins import Group, load_plugin, plugin_names

_T = TypeVar("_T")


class ModelFormat(NamedTuple):
    """What a model's text is read by. None: the family writes no calls, or does not set off its reasoning."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether special tokens must stay in the text for it to be read."""
        return any(form is not None and form.keeps_special_tokens for form in self)


CALLS: Mapping[str, CallFormat] = {
    "hermes": formats.HERMES,
    "qwen3_json": formats.HERMES,
    "granite4": formats.HERMES,
    "qwen3_coder": formats.QWEN3_CODER,
    "qwen3_xml": formats.QWEN3_CODER,
    "glm": formats.GLM,
    "glm45": formats.GLM,
    "glm47": formats.GLM,
    "llama3_json": formats.LLAMA3_JSON,
    "llama4_json": formats.LLAMA3_JSON,
    "pythonic": formats.LLAMA_PYTHONIC,
    "llama4_pythonic": formats.LLAMA_PYTHONIC,
    "gemma3": formats.GEMMA_PYTHONIC,
    "functiongemma": formats.FUNCTION_GEMMA,
    "mistral": formats.MISTRAL,
    "mistral_json": formats.MISTRAL_JSON,
    "deepseek_v3": formats.DEEPSEEK_V3,
    "deepseek_v31": formats.DEEPSEEK_V31,
    "kimi_k2": formats.KIMI_K2,
    "granite": formats.GRANITE,
    "harmony": formats.HARMONY,
    "openai": formats.HARMONY,
}
"""By the names for the configuration; vLLM's are among them."""
REASONING: Mapping[str, ReasoningFormat] = {
    "think": formats.THINK,
    "qwen3": formats.THINK_OR_CALL,
    "deepseek_r1": formats.THINK,
    "deepseek_v3": formats.THINK,
    "deepseek_v31": formats.THINK,
    "glm": formats.THINK,
    "glm45": formats.THINK,
    "glm47": formats.THINK,
    "kimi_k2": formats.THINK_OR_CALL,
    "granite": formats.GRANITE_TEXT,
    "mistral": formats.MISTRAL_THINK,
    "harmony": formats.CHANNELS,
    "openai_gptoss": formats.CHANNELS,
}
"""By the names for the configuration; vLLM's are among them."""

# The first line of which all texts stand in the chat template. What is rarer stands first.
_CALL_MARKS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<|channel|>", "<|message|>"), formats.HARMONY),
    (("<|tool_calls_section_begin|>",), formats.KIMI_K2),
    (("<｜tool▁calls▁begin｜>", "```json"), formats.DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), formats.DEEPSEEK_V31),
    (("[TOOL_CALLS]", "[ARGS]"), formats.MISTRAL),
    (("[TOOL_CALLS]",), formats.MISTRAL_JSON),
    (("<arg_key>",), formats.GLM),
    (("<function=", "<parameter="), formats.QWEN3_CODER),
    (("<start_function_call>",), formats.FUNCTION_GEMMA),
    (("<|tool_call|>",), formats.GRANITE),
    (("<tool_call>",), formats.HERMES),
    (("```tool_code",), formats.GEMMA_PYTHONIC),
    (("<start_of_turn>", "func_name"), formats.GEMMA_PYTHONIC),
    (("<start_of_turn>", "tool_calls"), formats.GEMMA_PYTHONIC),
    (("func_name1(",), formats.LLAMA_PYTHONIC),
    (("ipython", '"parameters": '), formats.LLAMA3_JSON),
    (("<|python_start|>",), formats.LLAMA_PYTHONIC),
    (("<|python_tag|>",), formats.LLAMA3_JSON),
)
_REASONING_MARKS: tuple[tuple[tuple[str, ...], ReasoningFormat], ...] = (
    (("<|channel|>", "<|message|>"), formats.CHANNELS),
    (("[THINK]",), formats.MISTRAL_THINK),
    (("Here is my thought process:",), formats.GRANITE_TEXT),
    (("</think>", "<|tool_calls_section_begin|>"), formats.THINK_OR_CALL),
    (("</think>", "<tool_call>", "<|im_start|>"), formats.THINK_OR_CALL),
    (("</think>",), formats.THINK),
    (("<think>",), formats.THINK),
)


def model_format(chat_template: str, *, calls: str = "auto", reasoning: str = "auto") -> ModelFormat:
    """The formats of a model, by its chat template's text where they are "auto"; "none" reads neither.

    ValueError: no such name; its sentence names those that are.
    """
    return ModelFormat(
        _by_marks(chat_template, _CALL_MARKS) if calls == "auto" else _named(calls, CALLS, _CALL_PLUGINS),
        _by_marks(chat_template, _REASONING_MARKS)
        if reasoning == "auto"
        else _named(reasoning, REASONING, _REASONING_PLUGINS),
    )


def _by_marks(template: str, table: tuple[tuple[tuple[str, ...], _T], ...]) -> _T | None:
    return next((form for marks, form in table if all(mark in template for mark in marks)), None)


class _Plugins(NamedTuple, Generic[_T]):
    """Formats of other packages. what: what they are of."""

    what: str
    group: Group
    form: type[_T]


_CALL_PLUGINS = _Plugins("calls", "raylm.tool_parsers", CallFormat)
_REASONING_PLUGINS = _Plugins("reasoning", "raylm.reasoning_parsers", ReasoningFormat)


def _named(name: str, known: Mapping[str, _T], plugins: _Plugins[_T]) -> _T | None:
    if name == "none":
        return None
    if name in known:
        return known[name]
    others = plugin_names(plugins.group)
    if name not in others:
        names = ", ".join(sorted([*known, *others]))
        raise ValueError(f"{name!r} is no format of {plugins.what}: it is auto, none, {names}")
    found = load_plugin(plugins.group, name)
    if not isinstance(found, plugins.form):
        raise ValueError(f"the plug-in {name!r} ({plugins.group}) is no {plugins.form.__name__}, but {found!r}")
    return found
