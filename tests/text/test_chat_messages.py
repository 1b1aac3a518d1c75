"""What becomes of messages, tools and options on their way to a template."""

from __future__ import annotations

import json

import pytest

from raylm.config.chat import ChatConfig
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError, RequestRejected
from raylm.text.chat import ChatTemplate
from raylm.text.chat_options import ChatOptions
from raylm.text.chat_settings import ChatSettings, bundled_names, template_source

SHOW = "{# tool_calls #}{% set _ = messages[0].tool_calls %}{{ messages | tojson }}"
"""Shows what a template gets that knows calls and results."""
CHATML = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def shown(*messages: object, **options: object) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(ChatTemplate(SHOW, {}).render(list(messages), ChatOptions(**options)))
    return found


def calling(function: object, **fields: object) -> dict[str, object]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function, **fields}]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": [1, "ä"]}', {"a": [1, "ä"]}), ({"a": 1}, {"a": 1}), ("{}", {}), ("", {}), (None, {})],
)
def test_arguments_of_calls_are_objects(arguments, expected):
    _, message = shown(USER, calling({"name": "f", "arguments": arguments}))
    assert message["content"] == ""
    assert message["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": expected}}]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (calling({"name": "f", "arguments": "{bad"}), r"tool_calls\[0\]\.function\.arguments is not valid JSON: "),
        (calling({"name": "f", "arguments": "[1]"}), r"arguments must be an object, or its JSON, got '\[1\]'"),
        (calling({"name": "f", "arguments": '{"a": NaN}'}), r"arguments is not valid JSON: NaN is no JSON"),
        (calling({"name": "f", "arguments": "[" * 20_000}), r"arguments is not valid JSON: it is nested too deeply"),
        (calling({"name": "f", "arguments": "[1," * 20_000}), r"arguments holds about 40000 values, at most 32768"),
        (calling({"name": ""}), r"function\.name must be a non-empty string, got ''"),
        (calling("f"), r"tool_calls\[0\]\.function must be an object with name and arguments, got 'f'"),
        (calling({"name": "f"}, type="custom"), r"tool_calls\[0\]\.type must be 'function', got 'custom'"),
        (calling({"name": "f"}, id=7), r"tool_calls\[0\]\.id must be a string, got 7"),
        ({"role": "assistant", "tool_calls": {}, "function_call": 3}, r"function_call must be an object with name"),
        ({"role": "assistant", "tool_calls": "f"}, r"messages\[1\]\.tool_calls must be a list, got 'f'"),
        ({"role": "assistant", "reasoning": 3}, r"messages\[1\]\.reasoning must be a string, got 3"),
        ({"role": "tool", "content": None}, r"messages\[1\]\.content must be a string or a list of"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"\(the model reads text only\), got"),
        ({"role": "user", "content": "x", "extra": object()}, r"messages\[1\]\.extra must be a value of JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_place(message, problem):
    with pytest.raises(RequestRejected, match=problem) as caught:
        shown(USER, message)
    assert caught.value.param == "messages"


def test_old_functions_are_tools():
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    _, asked, result = shown(USER, call, {"role": "function", "name": "f", "content": "2"})
    [made] = asked["tool_calls"]
    assert made == {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert result == {"role": "tool", "content": "2", "tool_call_id": "call00001", "name": "f"}
    assert "function_call" not in asked


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_of_histories_has_every_name_that_templates_read(name):
    [message] = shown({"role": "assistant", "content": "x", name: "why"})
    assert {message[each] for each in ("reasoning", "reasoning_content", "thinking")} == {"why"}


def test_what_is_null_or_empty_is_not_there():
    message = {"role": "assistant", "content": "x", "tool_calls": [], "name": None, "reasoning_content": None}
    assert shown(message) == [{"role": "assistant", "content": "x"}]


def test_names_ids_and_parts_of_results_reach_the_template():
    result = {
        "role": "tool",
        "tool_call_id": "1",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    assert shown({**USER, "name": "Ann"}, result) == [
        {**USER, "name": "Ann"},
        {"role": "tool", "tool_call_id": "1", "content": "a\nb"},
    ]


def test_a_template_that_does_not_know_tools_is_told_them_as_text():
    history = [
        {"role": "system", "content": "Be brief."},
        USER,
        {**calling({"name": "f", "arguments": '{"a": "ä"}'}), "content": "Let me see."},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
    ]  # fmt: skip
    template = ChatTemplate(CHATML, {})
    text = template.render(history, ChatOptions(tools=[TOOL]))
    assert not template.reads_tools
    head, tail = text.split("<user>Hi\n")
    assert head.startswith("<system>Be brief.\n\nYou may call functions") and head.count("<system>") == 1
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in head
    assert tail == (
        '<assistant>Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "ä"}}\n</tool_call>\n'
        "<user><tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\n"
    )
    assert template.render([USER], ChatOptions(tools=[TOOL])).startswith("<system>You may call functions")
    assert template.render([USER], ChatOptions(tools=[])) == "<user>Hi\n"


def test_the_templates_for_tools_and_by_name():
    named = {"tool_use": "tools: {{ tools[0].function.name }}", "rag": "{{ documents }}"}
    template = ChatTemplate("plain", {}, named=named)
    assert template.render([USER]) == "plain"
    assert template.render([USER], ChatOptions(tools=[TOOL])) == "tools: f" and template.source == named["tool_use"]
    open_to_all = ChatTemplate("plain", {}, ChatSettings(ChatConfig(allow_request_templates=True)), named)
    assert open_to_all.render([USER], ChatOptions(template="rag", documents=[{"a": 1}])) == "[{'a': 1}]"
    assert open_to_all.render([USER], ChatOptions(template="chatml")).startswith("<|im_start|>user\nHi<|im_end|>")
    assert open_to_all.render([USER], ChatOptions(template="{{ messages[0].content }}!")) == "Hi!"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("nobody", "must be a template's text or one of alpaca, chatml"),
        ("{% for %}", "chat_template is not valid, line 1"),
        ("{{ 'a' * 10 ** 9 }}", "was stopped on these messages: it makes a value of 1000000000 characters or more"),
        ("{{ 1 }}" * 10_000, "chat_template has 70000 characters, at most 32768"),
    ],
)
def test_a_template_of_a_request_is_refused_as_its_field(template, problem):
    settings = ChatSettings(ChatConfig(allow_request_templates=True))
    with pytest.raises(RequestRejected, match=problem) as caught:
        ChatTemplate(None, {}, settings).render([USER], ChatOptions(template=template))
    assert caught.value.param == "chat_template"


def test_templates_of_requests_are_refused_unless_configured():
    for given in ("chatml", "{{ 1 }}"):
        with pytest.raises(RequestRejected, match="takes no templates from requests") as caught:
            ChatTemplate(CHATML, {}).render([USER], ChatOptions(template=given))
        assert caught.value.param == "chat_template"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"tools": "all"}, "tools"),
        ({"tools": [3]}, "tools"),
        ({"documents": [None]}, "documents"),
        ({"kwargs": []}, "chat_template_kwargs"),
        ({"kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"kwargs": {"a": object()}}, "chat_template_kwargs"),
        ({"documents": [{"title": "x"}]}, "documents"),
    ],
)
def test_options_are_refused_by_their_names(options, param):
    with pytest.raises(RequestRejected, match=param) as caught:
        ChatTemplate(CHATML, {}).render([USER], ChatOptions(**options))
    assert caught.value.param == param


def test_configured_variables_hold_until_a_request_sets_them():
    settings = ChatSettings(ChatConfig(template_kwargs={"a": 1, "b": [2]}))
    template = ChatTemplate("{{ a }}{{ b }}{{ enable_thinking }}{{ thinking }}", {}, settings)
    assert template.render([USER]) == "1[2]"
    assert template.render([USER], ChatOptions(kwargs={"a": 3})) == "3[2]"
    assert template.render([USER], ChatOptions(reasoning_effort="none")) == "1[2]FalseFalse"
    assert template.render([USER], ChatOptions(reasoning_effort="low", kwargs={"thinking": 0})) == "1[2]True0"


def test_the_operators_template_is_text_a_file_or_a_bundled_one(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("own: {{ messages[0].content }}")
    for given, expected in ((str(file), "own: Hi"), ("{{ 1 }}", "1"), ("zephyr", "<|user|>\nHi</s>\n<|assistant|>\n")):
        settings = ChatSettings(template=template_source(given))
        assert ChatTemplate("the checkpoint's", {"eos_token": "</s>"}, settings).render([USER]) == expected
    with pytest.raises(ConfigError, match=r"model.chat_template 'nowhere' cannot be read: .*one of alpaca, chatml"):
        template_source("nowhere")


def test_a_wrong_template_is_found_before_anything_starts():
    engine = EngineConfig(model={"path": "x", "chat_template": "{% if %}"})
    with pytest.raises(ConfigError, match="model.chat_template is not valid, line 1: Expected an expression"):
        ChatSettings.of(engine)
    engine = EngineConfig(model={"path": "x", "chat_template": "chatml"}, chat={"template_kwargs": {"a": 1}})
    assert ChatSettings.of(engine).config.template_kwargs == {"a": 1}
    assert ChatSettings.of(engine).key == ChatSettings.of(engine.model_copy()).key != ChatSettings().key


BUNDLED = {
    "alpaca": "Be brief.\n\n### Instruction:\nHi\n\n### Response:\nYes</s>\n\n### Instruction:\nHi\n\n### Response:\n",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes"
    "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "llama-2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Yes </s><s>[INST] Hi [/INST]",
    "vicuna": "Be brief.\n\nUSER: Hi ASSISTANT: Yes</s>USER: Hi ASSISTANT:",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nYes</s>\n<|user|>\nHi</s>\n<|assistant|>\n",
}


def test_bundled_templates():
    assert bundled_names() == sorted(BUNDLED)
    messages = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Yes"}, USER]
    for name, expected in BUNDLED.items():
        settings = ChatSettings(template=template_source(name))
        template = ChatTemplate(None, {"bos_token": "<s>", "eos_token": "</s>"}, settings)
        assert template.render(messages) == expected
        with_tools = template.render([USER], ChatOptions(tools=[TOOL]))
        assert "<tools>" in with_tools


def test_limits_of_a_model_hold():
    settings = ChatSettings(ChatConfig(max_prompt_chars=1024))
    template = ChatTemplate(CHATML, {}, settings)
    assert template.render([{"role": "user", "content": "x" * 900}])
    with pytest.raises(RequestRejected, match="was stopped on these messages: it .*at most 1024 are allowed"):
        template.render([{"role": "user", "content": "x" * 2000}])
