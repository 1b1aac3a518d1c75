"""What the reader does beside calls' texts: reasoning, ids, special tokens, values by schema, choosing of formats."""

from __future__ import annotations

import json
import re

import pytest

from raylm.generation.parsing import ModelFormat, OutputReader, OutputReading, model_format
from raylm.generation.parsing import formats as f
from raylm.generation.pieces import CallArguments, CallBegin, Reasoning, Text
from tests.generation.formats import calls_of, read

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("form", "in_reasoning", "text", "pieces"),
    [
        (f.THINK, True, "hm</think>\n\nYes", [Reasoning("hm"), Text("\n\nYes")]),
        (f.THINK, True, "\n<think>hm</think>Yes", [Reasoning("hm"), Text("Yes")]),
        (f.THINK, True, "\nhm", [Reasoning("\nhm")]),
        (f.THINK, False, "\n<think>\nhm</think>Yes", [Reasoning("\nhm"), Text("Yes")]),
        (f.THINK, False, "</think>Yes", [Text("Yes")]),
        (f.THINK, False, "The tag <think> and </think>", [Text("The tag <think> and </think>")]),
        (
            f.GRANITE_TEXT,
            False,
            "Here is my thought process: a\nHere is my response: b",
            [Reasoning(" a\n"), Text(" b")],
        ),
        (f.GRANITE_TEXT, False, "Here is my cat", [Text("Here is my cat")]),
        (f.MISTRAL_THINK, False, "[THINK]a[/THINK]b", [Reasoning("a"), Text("b")]),
        (None, False, "<think>a</think>b", [Text("<think>a</think>b")]),
    ],
)
def test_reasoning(form, in_reasoning, text, pieces):
    assert read(ModelFormat(f.HERMES, form), list(text), in_reasoning=in_reasoning) == pieces


def test_a_call_ends_reasoning_where_the_family_forgets_to():
    pieces = read(ModelFormat(f.HERMES, f.THINK_OR_CALL), list(f"<think>hm\n{CALL}"))
    assert pieces == [Reasoning("hm\n"), CallBegin(0, "", "f"), CallArguments(0, "{}")]
    assert read(ModelFormat(f.HERMES, f.THINK), list(f"<think>hm\n{CALL}")) == [Reasoning(f"hm\n{CALL}")]


def test_in_reasoning_is_known_between_pushes():
    reader = OutputReading(ModelFormat(f.HERMES, f.THINK), {}, reads_calls=True, in_reasoning=True).begin()
    assert reader.in_reasoning
    reader.push("hm</thi")
    assert reader.in_reasoning
    reader.push("nk>")
    assert not reader.in_reasoning


def test_calls_are_text_when_there_are_no_tools():
    assert read(ModelFormat(f.HERMES), list(CALL), reads_calls=False) == [Text(CALL)]


def test_channels():
    text = (
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    model = ModelFormat(f.HARMONY, f.CHANNELS)
    calls = [CallBegin(0, "", "f"), CallArguments(0, '{"a": 1}')]
    assert read(model, list(text)) == [Reasoning("Need it."), Text("I look."), *calls, Text("Done.")]
    assert read(model, list(text), reads_calls=False) == [Reasoning("Need it."), Text('I look.{"a": 1}Done.')]
    begun = " to=functions.f<|channel|>commentary<|message|><|call|>"
    assert read(model, list(begun)) == [CallBegin(0, "", "f"), CallArguments(0, "{}")]
    assert read(model, ["hm<|end|>"], in_reasoning=True) == [Reasoning("hm")]
    assert read(model, ["no channel"]) == [Text("no channel")]


@pytest.mark.parametrize(
    ("form", "text", "pattern"),
    [
        (f.HERMES, CALL, "call_[0-9a-f]{24}"),
        (f.MISTRAL, "[TOOL_CALLS]f[ARGS]{}", "[A-Za-z0-9]{9}"),
        (f.MISTRAL, "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", "abcdefghi"),
        (f.KIMI_K2, "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>", "functions.f:7"),
        (f.KIMI_K2, "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>", "functions.f:0"),
    ],
)
def test_ids(form, text, pattern):
    reader = OutputReader(ModelFormat(form))
    begins = [piece for piece in reader.push(text) + reader.finish() if isinstance(piece, CallBegin)]
    assert [bool(re.fullmatch(pattern, begin.id)) for begin in begins] == [True]
    assert [begin.name for begin in begins] == ["f"]


SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "float"},
        "flag": {"type": "boolean"},
        "maybe": {"type": ["integer", "null"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "list": {"type": "array"},
        "choice": {"enum": ["1", "2"]},
        "any": {},
    },
}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "42", "42"),
        ("text", "null", "null"),
        ("text", "\n two\n", "\n two\n"),
        ("count", "42", 42),
        ("count", "many", "many"),
        ("count", "9" * 5000, "9" * 5000),
        ("share", "0.5", 0.5),
        ("share", "1e999", "1e999"),
        ("share", "NaN", "NaN"),
        ("flag", "True", True),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("list", "['a', None]", ["a", None]),
        ("list", "[1, 2", "[1, 2"),
        ("choice", "1", "1"),
        ("any", '{"a": 1}', {"a": 1}),
        ("unknown", "5", "5"),
    ],
)
def test_values_are_typed_by_the_schema(key, written, value):
    text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    reader = OutputReader(ModelFormat(f.QWEN3_CODER), tools={"f": SCHEMA})
    assert calls_of(reader.push(text) + reader.finish()) == [("f", {key: value})]


def test_a_schema_that_refers_to_itself():
    """Each part is looked at once: otherwise this would not end."""
    itself = {"anyOf": [{"$ref": "#/properties/a"}, {"$ref": "#/$defs/b"}] * 100}
    schema = {"properties": {"a": itself}, "$defs": {"b": {"oneOf": [itself, {"type": "integer"}]}}}
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>5</arg_value></tool_call>"
    reader = OutputReader(ModelFormat(f.GLM), tools={"f": schema})
    assert calls_of(reader.push(text) + reader.finish()) == [("f", {"a": 5})]


def test_python_values():
    text = r"[f(a='it\'s', b=(1, 2,), c={1: None}, d=-.5, e=1_000, g='\u00e9\n', h=true, text=42), g()]"
    [(name, values), other] = calls_of(read(ModelFormat(f.LLAMA_PYTHONIC), list(text)))
    assert (name, other) == ("f", ("g", {}))
    assert values == {
        "a": "it's", "b": [1, 2], "c": {"1": None}, "d": -0.5, "e": 1000, "g": "é\n", "h": True, "text": 42,
    }  # fmt: skip


def test_strings_that_cannot_be_encoded_are_escaped():
    text = r"[f(a='\ud800')]"
    pieces = read(ModelFormat(f.LLAMA_PYTHONIC), list(text))
    assert json.dumps([piece.text for piece in pieces if isinstance(piece, CallArguments)], ensure_ascii=False).encode()
    lone = r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'
    assert read(ModelFormat(f.HERMES), [lone]) == [Text(lone)]


def test_arguments_stream_as_they_come():
    reader = OutputReader(ModelFormat(f.HERMES))
    reader.push('<tool_call>{"name": "f", "arguments": {"a": "lo')
    assert reader.push("ng te") == [CallArguments(0, "ng te")]
    assert reader.push('xt"}}') == [CallArguments(0, 'xt"}')]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 5}',
        '{"name": "Bob"}',
        '{"name": "f", "parameters": {not json}',
        "[1] says (a=1)",
        "[f](https://example.com)",
        "see [f(x)] there",
    ],
)
@pytest.mark.parametrize("form", [f.LLAMA3_JSON, f.LLAMA_PYTHONIC], ids=lambda form: form.name)
def test_what_only_looks_like_a_call_is_text(form, text):
    assert read(ModelFormat(form), list(text)) == [Text(text)]


@pytest.mark.parametrize(
    ("form", "text", "shown"),
    [
        (f.MISTRAL, "[TOOL_CALLS] not a call", "not a call"),
        (f.LLAMA3_JSON, "<|python_tag|>print(1)", "print(1)"),
        (f.HERMES, "<tool_call> not a call", "<tool_call> not a call"),
    ],
)
def test_a_special_token_that_no_call_follows_is_not_shown(form, text, shown):
    assert read(ModelFormat(form), list(text)) == [Text(shown)]


def test_special_tokens_that_say_nothing_are_dropped():
    assert read(ModelFormat(f.LLAMA3_JSON), list("Hi<|eot_id|>")) == [Text("Hi")]


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("<|im_start|> <tool_call> </tool_call>", f.HERMES, None),
        ("<|im_start|> <tool_call> <think> </think>", f.HERMES, f.THINK_OR_CALL),
        ("<tool_call> <function= <parameter= <think> </think>", f.QWEN3_CODER, f.THINK),
        ("<tool_call> <arg_key> </think>", f.GLM, f.THINK),
        ("'<｜tool▁calls▁begin｜>' '\\n```json\\n' </think>", f.DEEPSEEK_V3, f.THINK),
        ("<｜tool▁calls▁begin｜> </think>", f.DEEPSEEK_V31, f.THINK),
        ("[TOOL_CALLS] [ARGS] [THINK]", f.MISTRAL, f.MISTRAL_THINK),
        ("[TOOL_CALLS] [", f.MISTRAL_JSON, None),
        ("<|tool_calls_section_begin|> </think>", f.KIMI_K2, f.THINK_OR_CALL),
        ("<|start_of_role|> <|tool_call|> Here is my thought process:", f.GRANITE, f.GRANITE_TEXT),
        ("<|start|> <|channel|> <|message|>", f.HARMONY, f.CHANNELS),
        ('ipython <|python_tag|> "parameters": ', f.LLAMA3_JSON, None),
        ("[func_name1(params_name1=params_value1)]", f.LLAMA_PYTHONIC, None),
        ("<start_function_call>", f.FUNCTION_GEMMA, None),
        ("<start_of_turn> ```tool_code", f.GEMMA_PYTHONIC, None),
        ("<|im_start|>", None, None),
    ],
)
def test_formats_are_found_in_the_chat_template(template, calls, reasoning):
    assert model_format(template) == ModelFormat(calls, reasoning)


def test_formats_are_named():
    assert model_format("<tool_call> <think>", calls="openai", reasoning="none") == ModelFormat(f.HARMONY, None)
    with pytest.raises(ValueError, match="'hermess' is no format of calls: it is auto, none, deepseek_v3"):
        model_format("", calls="hermess")


def test_special_tokens_are_kept_where_marks_are_special():
    assert ModelFormat(f.MISTRAL).keeps_special_tokens
    assert not ModelFormat(None, f.THINK).keeps_special_tokens
