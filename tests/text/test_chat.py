"""Chat templates render as transformers renders them, and refuse in sentences."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from raylm.errors import RequestRejected
from raylm.text.chat import ChatTemplate
from raylm.text.chat_options import ChatOptions
from tests.text import tiny_tokenizers

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- if tools is not none %}{{- "tools: " + (tools | tojson(indent=4)) }}{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + "
    "message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
SYNTAX = """{% set seen = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set seen.count = seen.count + 1 %}
    {% generation %}{{ message | tojson }}{% endgeneration %}

    {% if seen.count == 2 %}{% break %}{% endif %}
{% endfor %}
{{ seen.count }} {{ dict(a=1) | tojson(indent=2) }} {{ documents is none }}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "syntax": SYNTAX}
USER = {"role": "user", "content": "  Was ist <b>größer</b>: 9 & 10? 🤖\n"}
ANSWER = {"role": "assistant", "content": "10 'is' \"greater\"."}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.byte_level(), **SPECIALS)


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("messages", [[USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER]])
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(reference, name, messages, generate):
    template = ChatTemplate(TEMPLATES[name], SPECIALS)
    if messages[0] is SYSTEM and name in ("mistral", "gemma"):
        with pytest.raises(RequestRejected, match="refuses these messages: .*(alternate|not supported)"):
            template.render(messages)
        return
    expected = reference.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=generate
    )
    assert template.render(messages, ChatOptions(add_generation_prompt=generate)) == expected


PARTS = (
    "{% for message in messages %}{{ message.role }}:{% for part in message['content'] %}"
    "{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}{% endfor %}"
)
EITHER = (
    "{% set told = messages[1:] if messages[0].role == 'system' else messages %}{% for message in told %}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content | list %}<{{ part['text'] }}>{% endfor %}{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro show(body) %}{% for part in body %}<{{ part.text }}>{% endfor %}{% endmacro %}"
    "{% for message in messages %}{% set content = message.get('content') %}{{ show(content) }}{% endfor %}"
)
LINES = "{% for message in messages %}{% for line in message.content.split('\n') %}({{ line }}){% endfor %}{% endfor %}"
TWO = [{"type": "text", "text": "Read."}, {"type": "text", "text": "Answer."}]


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        ("{{ messages[0].content }}", TWO, "Read.\nAnswer."),
        (LINES, TWO, "(Read.)(Answer.)"),
        (PARTS, TWO, "user:<Read.><Answer.>"),
        (PARTS, "Read.", "user:<Read.>"),
        (EITHER, TWO, "<Read.><Answer.>"),
        (EITHER, "Read.", "Read."),
        (MACRO, TWO, "<Read.><Answer.>"),
    ],
)
def test_a_template_gets_parts_where_it_goes_through_them_and_lines_otherwise(source, content, expected):
    assert ChatTemplate(source, {}).render([{"role": "user", "content": content}]) == expected


@pytest.mark.parametrize("name", ["either", "chatml", "llama3"])
def test_contents_that_are_strings_render_as_with_transformers(reference, name):
    source = {**TEMPLATES, "either": EITHER}[name]
    expected = reference.apply_chat_template([SYSTEM, USER], chat_template=source, tokenize=False)
    assert ChatTemplate(source, SPECIALS).render([SYSTEM, USER], ChatOptions(add_generation_prompt=False)) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None}, "[]"),
        ({}, "[]"),
        ({"content": None, "refusal": "No."}, "[No.]"),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "[No.]"),
        ({"content": [{"type": "output_text", "text": "Well."}], "refusal": "No."}, "[Well.\nNo.]"),
        ({"content": "Well.", "refusal": None}, "[Well.]"),
    ],
)
def test_what_an_assistant_did_not_say(message, expected):
    template = ChatTemplate("{% for message in messages %}[{{ message.content }}]{% endfor %}", {})
    assert template.render([{"role": "assistant", **message}]) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].role }}", "system"),
        ("{# for a developer #}developer: {{ messages[0].role }}", "developer: system"),
        ("{% if messages[0].role in ['system', 'developer'] %}{{ messages[0].role }}{% endif %}", "developer"),
    ],
)
def test_a_developer_is_the_system_unless_the_template_knows_developers(source, expected):
    assert ChatTemplate(source, {}).render([{"role": "developer", "content": "Be brief."}]) == expected


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least one message"),
        (["hi"], r"messages\[0\] must be an object with role and content, got 'hi'"),
        ([USER, {"content": "x"}], r"messages\[1\]\.role must be a non-empty string, got None"),
        ([{"role": "user"}], r"messages\[0\]\.content must be a string or a list of text parts, got None"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] must be a part of type 'text'.*image"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], r"content\[0\]\.text must be a string, got 3"),
    ],
)
def test_malformed_messages_are_rejected_with_their_place(messages, problem):
    with pytest.raises(RequestRejected, match=problem) as caught:
        ChatTemplate(CHATML, SPECIALS).render(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (None, "the model has no chat template"),
        ("\n{% for %}", "the model's chat template is not valid, line 2: Expected"),
        ("{{ messages[0].content + 1 }}", "fails on these messages: TypeError"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: access to attribute '__class__'.*unsafe"),
        ("{{ messages.append(1) }}", "refuses these messages: access to attribute 'append'"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_a_rejection(source, problem):
    with pytest.raises(RequestRejected, match=problem) as caught:
        ChatTemplate(source, SPECIALS).render([USER])
    assert caught.value.param == "messages"


def test_rendering_leaves_the_messages_alone():
    message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    ChatTemplate("{% set _ = messages %}", {}).render([message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "x"}]}
