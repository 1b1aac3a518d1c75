"""Fields of OpenAI's, vLLM's and SGLang's requests: what is not built is refused by name, the rest is taken."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from openai import AsyncOpenAI
from openai.types import chat, completion_create_params

from raylm.api.protocol import ChatRequest, CompletionRequest
from raylm.api.unsupported import CHAT_ONLY, COMPLETIONS_ONLY, HARMLESS, OF_CHATS, UNSUPPORTED
from raylm.text.chat import ChatTemplate
from tests.support.openai_fakes import Server, ended

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
HI = [{"role": "user", "content": "hi"}]


def client_of(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://raylm/v1", api_key="none", http_client=server.http, max_retries=0)


NOT_BUILT: list[tuple[str, Any, Any]] = [
    ("lora_path", "adapter", None),
    ("input_ids", [1], None),
    ("stop_regex", ["a+"], []),
    ("thinking_token_budget", 10, -1),
    ("kv_transfer_params", {"a": 1}, {}),
    ("prompt_embeds", "AAAA", None),
    ("vllm_xargs", {"a": 1}, {}),
    ("mm_processor_kwargs", {"a": 1}, {}),
    ("include_reasoning", False, True),
    ("repetition_detection", {"n": 3}, None),
    ("repetition_min_count", 3, 0),
    ("max_repetition_pattern_size", 3, 0),
    ("min_repetition_pattern_size", 3, 0),
    ("truncation_side", "right", "left"),
]


@pytest.mark.parametrize(("name", "value", "neutral"), NOT_BUILT, ids=lambda value: str(value)[:28])
@pytest.mark.parametrize("kind", ["chat", "complete"])
@pytest.mark.parametrize("strict", [False, True])
async def test_what_is_not_built_is_refused_by_name(
    kind: str, name: str, value: Any, neutral: Any, strict: bool
) -> None:
    if kind == "chat" and name in OF_CHATS:
        return
    server = Server(strict=strict)
    response = await getattr(server, kind)(**{name: value})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", name)
    assert error["message"].startswith(f"{name} is not supported") and json.dumps(value) in error["message"]
    assert server.generator.requests == []
    for accepted in (neutral, None):
        assert (await getattr(server, kind)(**{name: accepted}, max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("request_of", "params_of", "own"),
    [
        (ChatRequest, chat.completion_create_params.CompletionCreateParamsBase, CHAT_ONLY),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase, COMPLETIONS_ONLY),
    ],
)
def test_every_field_of_openais_client_is_known(request_of: Any, params_of: Any, own: Any) -> None:
    known = {*request_of.model_fields, *UNSUPPORTED, *own, *HARMLESS}
    assert set(get_type_hints(params_of)) - known == set()


def test_no_field_is_both_taken_and_refused() -> None:
    taken = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert taken & {*UNSUPPORTED, *HARMLESS} == set()


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"echo": True}, "echo"),
        ("complete", {"max_completion_tokens": 3}, "max_completion_tokens"),
        ("chat", {"stream": True, "stream_options": {"include_obfuscation": True}}, None),
        ("complete", {"stream": True, "stream_options": {"include_obfuscation": True}}, None),
        ("chat", {"messages": [{"role": "system", "content": "hi", "tools": TOOLS}]}, "messages[0].tools"),
    ],
)
async def test_what_is_not_built_on_one_route_or_inside_a_field(kind: str, fields: Any, param: str | None) -> None:
    for strict in (False, True):
        error = (await getattr(Server(strict=strict), kind)(**fields)).json()["error"]
        expected = param or "stream_options.include_obfuscation"
        assert (error["code"], error["param"]) == ("unsupported_parameter", expected)


async def test_neutral_values_of_one_route() -> None:
    options = {"include_usage": True, "continuous_usage_stats": False, "include_obfuscation": False}
    server = Server(strict=True)
    fields: dict[str, Any] = {"stream": True, "stream_options": options, "max_tokens": 1, "session_id": "mine"}
    assert (await server.chat(**fields, echo=False, add_special_tokens=False)).status_code == 200
    assert (await server.complete(**fields, echo=True, add_special_tokens=True)).status_code == 200
    error = (await server.chat(stream=True, stream_options={"usage": True})).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_field", "stream_options.usage")


async def test_the_first_of_several_is_the_same_whatever_their_order() -> None:
    fields = {"vllm_xargs": {"a": 1}, "lora_path": "x", "stop_regex": ["a"], "logit_bias": {"5": 1}}
    for names in (list(fields), list(reversed(fields))):
        error = (await Server().chat(**{name: fields[name] for name in names})).json()["error"]
        assert error["param"] == "vllm_xargs"


async def test_tools_that_are_not_to_be_used_are_taken_and_not_shown() -> None:
    template = ChatTemplate("{{ tools is none }} {{ messages[0].content }}", {})
    server = Server(ended(), template=template)
    async with client_of(server) as client:
        await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice="none")  # type: ignore
        assert bytes(server.generator.requests[0].prompt_ids) == b"True hi"
    assert (await Server(ended()).chat(functions=[{"name": "f"}], function_call="none")).status_code == 200
    assert (await Server().chat(tools="all", tool_choice="none")).status_code == 400


async def test_a_history_of_openais_models() -> None:
    server = Server(ended(), strict=True, max_model_len=200)
    async with client_of(server) as client:
        await client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": None, "function_call": None, "audio": None},  # type: ignore
                {"role": "assistant", "tool_calls": []},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "name": "me"},
                {"role": "assistant", "refusal": "never"},
            ],
        )
    expected = b"user: a\nb\nassistant: \nassistant: \nassistant: no\nassistant: never\n>"
    assert bytes(server.generator.requests[0].prompt_ids) == expected


async def test_roles_go_to_the_template_and_functions_are_tools() -> None:
    template = ChatTemplate(
        "{% for message in messages %}{{ message.role }}({{ message.name }},{{ message.tool_call_id }},"
        "{{ message.reasoning_content }}){{ message.content }};{% endfor %}",
        {},
    )
    server = Server(ended(), template=template, max_model_len=200)
    messages = [
        {"role": "critic", "content": "a", "name": "n"},
        {"role": "tool", "content": "b", "tool_call_id": "t"},
        {"role": "function", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "r"},
    ]
    assert (await server.chat(messages=messages)).status_code == 200
    assert (
        bytes(server.generator.requests[0].prompt_ids) == b"critic(n,,)a;tool(,t,)b;tool(,call00001,)c;assistant(,,r)d;"
    )


@pytest.mark.parametrize("body", [{}, {"model": None}])
async def test_a_model_that_is_not_named(body: dict[str, None]) -> None:
    for path, rest in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "hi"})):
        response = await Server(ended(), alone=True).http.post(path, json={**body, **rest})
        assert (response.status_code, response.json()["model"]) == (200, "tiny")
        error = (await Server().http.post(path, json={**body, **rest})).json()["error"]
        assert (error["param"], error["code"]) == ("model", "missing_field")
        assert error["message"] == "model is required: one of 'tiny', 'late'"


async def test_an_unknown_model_names_those_that_there_are() -> None:
    error = (await Server().chat(model="nobody")).json()["error"]
    assert error["message"] == "The model 'nobody' does not exist; this server has 'tiny', 'late'"
