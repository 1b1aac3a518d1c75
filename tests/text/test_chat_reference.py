"""Whole chat templates give what transformers' apply_chat_template gives, option by option."""

from __future__ import annotations

import datetime as real
import sys

import pytest
from transformers import PreTrainedTokenizerFast

from raylm.errors import RequestRejected
from raylm.text import sandbox
from raylm.text.chat import ChatTemplate
from raylm.text.chat_options import ChatOptions
from tests.text import tiny_tokenizers

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

TOOLS_TEMPLATE = """{{- bos_token }}
{%- if tools %}
    {{- '[TOOLS]' }}
    {%- for tool in tools %}
        {{- (tool.function if tool.type == 'function' else tool) | tojson(indent=2) }}{{ ',' if not loop.last }}
    {%- endfor %}
    {{- '[/TOOLS]\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<results>' }}{%- endif %}
        {{- '\n' ~ message.tool_call_id ~ ': ' ~ message.content }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '\n</results>\n' }}{%- endif %}
    {%- elif message.tool_calls is defined %}
        {{- message.role + ': ' + (message.content or '') }}
        {%- for call in message.tool_calls %}
            {{- '\n' + call.id + ' ' + call.function.name + '(' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- name + '=' + (value if value is string else value | tojson) }}{{ ', ' if not loop.last }}
            {%- endfor %}
            {{- ')' }}
        {%- endfor %}
        {{- eos_token + '\n' }}
    {%- else %}
        {{- message.role + (' ' + message.name if message.name is defined else '') + ': ' + message.content }}
        {{- eos_token + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}
"""
THINKING = """{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == 'user' %}{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- if message.reasoning_content is string and loop.index0 > ns.last %}
        {{- '<think>' + message.reasoning_content.strip('\n') + '</think>' }}
    {%- endif %}
    {{- message.content.split('</think>')[-1].lstrip('\n') }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<assistant>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
    {{- reasoning_effort | default('medium') }}
{%- endif %}
"""
DOCUMENTS = """{%- for document in documents or [] %}
{{ loop.index }}. {{ document.title | upper }}
{{ document['text'] | indent(2) }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
{{ message.role }}{% generation %}: {{ message.content }}{% endgeneration %}
{%- endfor %}
{%- macro closing(text, sign='.') %}{{ text | trim }}{{ sign }}{% endmacro %}
{{ closing(' end ') }} {{ closing(topic, sign='!') if topic is defined }}"""
TRIMMING = (
    "{% for message in messages %}{{ '[' + message.role + ']' + message.content | trim + '[end]' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}[end]{% endfor %}"
)
CLOCK = "{{ strftime_now('%d %b %Y %H:%M') }}{% for message in messages %}{{ message.content }}{% endfor %}"
TEMPLATES = {"tools": TOOLS_TEMPLATE, "thinking": THINKING, "documents": DOCUMENTS, "trimming": TRIMMING}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'What\'s the weather <now>? "Größe"',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCKS = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "  Wie ist das Wetter in Köln? <b>&\n"}
CALLS = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [
        {
            "id": "a1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Köln", "n": [1.5]}},
        },
        {"id": "a2", "type": "function", "function": {"name": "clock", "arguments": {}}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "a1", "content": "Regen"},
    {"role": "tool", "tool_call_id": "a2", "content": '{"time": "12:00"}'},
]
ANSWER = {"role": "assistant", "content": "Es regnet. \n"}
THOUGHT = {"role": "assistant", "content": "It rains.", "reasoning_content": "\nLook outside.\n"}
CHATS = {
    "one": [USER],
    "system": [SYSTEM, USER, ANSWER, USER],
    "named": [{**USER, "name": "Ann"}],
    "calls": [SYSTEM, USER, CALLS, *RESULTS, ANSWER, USER],
    "thought": [USER, THOUGHT, USER, THOUGHT],
}
DOCUMENT = {"title": "Rain", "text": "It falls.\nOften."}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.byte_level(), **SPECIALS)


def rendered(reference: PreTrainedTokenizerFast, source: str, messages: list, **options: object) -> str:
    text: str = reference.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    return text


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER, CLOCKS]])
@pytest.mark.parametrize("chat", ["one", "system", "named", "calls"])
def test_tools(reference, chat, tools, generate):
    expected = rendered(reference, TOOLS_TEMPLATE, CHATS[chat], tools=tools, add_generation_prompt=generate)
    options = ChatOptions(tools=tools, add_generation_prompt=generate)
    assert ChatTemplate(TOOLS_TEMPLATE, SPECIALS).render(CHATS[chat], options) == expected


@pytest.mark.parametrize(
    "kwargs", [{}, {"enable_thinking": False}, {"reasoning_effort": "high", "enable_thinking": True}]
)
@pytest.mark.parametrize("chat", ["one", "system", "thought"])
def test_variables_and_reasoning(reference, chat, kwargs):
    expected = rendered(reference, THINKING, CHATS[chat], add_generation_prompt=True, **kwargs)
    template = ChatTemplate(THINKING, SPECIALS)
    assert template.render(CHATS[chat], ChatOptions(kwargs=kwargs)) == expected
    if "reasoning_effort" in kwargs:
        assert template.render(CHATS[chat], ChatOptions(reasoning_effort="high")) == expected


@pytest.mark.parametrize("documents", [None, [DOCUMENT], [DOCUMENT, {"title": "x", "text": ""}]])
@pytest.mark.parametrize("kwargs", [{}, {"topic": "<rain>"}])
@pytest.mark.parametrize("chat", ["one", "system"])
def test_documents_loop_controls_macros_and_generation_tags(reference, chat, kwargs, documents):
    expected = rendered(reference, DOCUMENTS, CHATS[chat], documents=documents, **kwargs)
    options = ChatOptions(documents=documents, kwargs=kwargs, add_generation_prompt=False)
    assert ChatTemplate(DOCUMENTS, SPECIALS).render(CHATS[chat], options) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["It is", "It is \n", "", "  It"])
def test_a_final_message_is_continued(reference, name, content):
    messages = [SYSTEM, USER, {"role": "assistant", "content": content}]
    expected = rendered(reference, TEMPLATES[name], messages, continue_final_message=True)
    template = ChatTemplate(TEMPLATES[name], SPECIALS)
    assert template.render(messages, ChatOptions(continue_final_message=True)) == expected


def test_the_last_part_of_a_final_message_is_continued(reference):
    parts = [{"type": "text", "text": "It is"}, {"type": "text", "text": " so "}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
        {"role": "assistant", "content": parts},
    ]
    expected = rendered(reference, PARTS, messages, continue_final_message=True)
    assert expected.endswith("It is so ")
    assert ChatTemplate(PARTS, SPECIALS).render(messages, ChatOptions(continue_final_message=True)) == expected


def test_a_final_message_that_is_not_shown_cannot_be_continued(reference):
    source = "{% for message in messages %}{{ message.content[:2] }}{% endfor %}"
    messages = [USER, ANSWER]
    with pytest.raises(ValueError, match="does not appear"):
        rendered(reference, source, messages, continue_final_message=True)
    with pytest.raises(RequestRejected, match="does not show the last message as it is") as caught:
        ChatTemplate(source, {}).render(messages, ChatOptions(continue_final_message=True))
    assert caught.value.param == "messages"


class Noon(real.datetime):
    """A clock that stands: a text rendered twice is the same text."""

    @classmethod
    def now(cls, tz: real.tzinfo | None = None) -> Noon:
        return cls(2026, 3, 1, 12, 0, tzinfo=tz)


def test_the_date_is_today(reference, monkeypatch):
    utils = sys.modules["transformers.utils.chat_template_utils"]
    monkeypatch.setattr(utils, "datetime", Noon)
    monkeypatch.setattr(sandbox, "datetime", Noon)
    expected = rendered(reference, CLOCK, [USER])
    assert expected.startswith("01 Mar 2026 12:00")
    assert ChatTemplate(CLOCK, {}).render([USER]) == expected


def test_variables_win_over_special_tokens(reference):
    expected = rendered(reference, "{{ bos_token }}{{ eos_token }}", [USER], bos_token="B")
    options = ChatOptions(kwargs={"bos_token": "B"})
    assert ChatTemplate("{{ bos_token }}{{ eos_token }}", SPECIALS).render([USER], options) == expected == "B</s>"
