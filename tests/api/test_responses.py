"""POST /v1/responses through the real openai client: what goes in, what comes out, every event."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from raylm.core.step import Logprobs, TokenDelta
from raylm.core.structure import StructuredOutput
from raylm.errors import EngineDeadError, Overloaded
from raylm.text.chat import ChatTemplate
from tests.support.openai_fakes import ByteText, RawClient, Server, ended, said

HERMES = ChatTemplate(
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><tool_call>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    {},
)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'


def server_of(*script: Any, template: ChatTemplate = HERMES, **options: Any) -> Server:
    return Server(*script, max_model_len=4096, text=ByteText(template), **options)


def client_of(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://raylm/v1", api_key="none", http_client=server.http, max_retries=0)


def prompt_of(server: Server, number: int = -1) -> str:
    return bytes(server.generator.requests[number].prompt_ids).decode()


async def test_a_text_is_answered():
    server = server_of(*said("Hello."))
    response = await client_of(server).responses.create(
        model="tiny", input="hi", instructions="Be kind.", metadata={"a": "b"}, temperature=0.5, user="me"
    )
    assert response.output_text == "Hello."
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert response.id.startswith("resp_") and message.id.startswith("msg_")
    assert response.object == "response" and response.model == "tiny" and response.store is False
    assert (response.metadata, response.temperature, response.instructions) == ({"a": "b"}, 0.5, "Be kind.")
    assert response.usage.input_tokens == len(prompt_of(server))
    assert response.usage.output_tokens == 7
    assert response.usage.total_tokens == response.usage.input_tokens + 7
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert prompt_of(server).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert server.generator.requests[0].params.temperature == 0.5


async def test_a_streams_events_come_in_order_and_with_numbers():
    server = server_of(*said("Hello."))
    events = [event async for event in await client_of(server).responses.create(model="tiny", input="hi", stream=True)]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(10))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello."
    last = events[-1].response
    assert last.status == "completed" and last.output_text == "Hello." and last.usage.output_tokens == 7
    item_ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert item_ids == {last.output[0].id}
    raw = await server.http.post("/v1/responses", json={"model": "tiny", "input": "hi", "stream": True})
    assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert raw.text.startswith('event: response.created\ndata: {"type":"response.created"')
    assert "[DONE]" not in raw.text


async def test_the_clients_own_stream_helper_ends_with_the_response():
    server = server_of(*said("Hello."))
    async with client_of(server).responses.stream(model="tiny", input="hi") as stream:
        seen = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert "response.output_text.delta" in seen
    assert final.output_text == "Hello."


class Point(BaseModel):
    x: int
    y: int


async def test_parse_gives_the_clients_own_class():
    server = server_of(*said('{"x": 1, "y": 2}'))
    with pytest.raises(openai.BadRequestError, match="tiny has no structured output") as error:
        await client_of(server).responses.parse(model="tiny", input="hi", text_format=Point)
    assert error.value.param == "text.format.json_schema.schema"


async def test_a_function_is_called_and_its_output_goes_back():
    server = server_of(*said("Let me see." + CALL))
    client = client_of(server)
    first = await client.responses.create(model="tiny", input="Weather in Rome?", tools=[WEATHER])
    message, call = first.output
    assert message.content[0].text == "Let me see."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"place": "Rome"})
    assert call.call_id and call.id.startswith("fc_") and call.status == "completed"
    assert first.tools[0].name == "weather" and first.tool_choice == "auto"
    history = [
        {"role": "user", "content": "Weather in Rome?"},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    server.generator.script = said("It is sunny.")
    second = await client.responses.create(model="tiny", input=history, tools=[WEATHER])
    assert second.output_text == "It is sunny."
    prompt = prompt_of(server)
    assert "<|im_start|>assistant\nLet me see.<tool_call>" in prompt and '"place"' in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt


async def test_a_streamed_call_has_its_events():
    server = server_of(*said(CALL))
    stream = await client_of(server).responses.create(model="tiny", input="hi", tools=[WEATHER], stream=True)
    events = [event async for event in stream]
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    written = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert json.loads(written) == {"place": "Rome"} and done.arguments == written
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_two_calls_are_two_items():
    server = server_of(*said(CALL + "\n" + CALL.replace("Rome", "Oslo")))
    response = await client_of(server).responses.create(model="tiny", input="hi", tools=[WEATHER])
    assert [(item.type, json.loads(item.arguments)["place"]) for item in response.output] == [
        ("function_call", "Rome"),
        ("function_call", "Oslo"),
    ]


THINKING = ChatTemplate(
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined %}{% endif %}<think>\n"
    "{% endif %}{# </think> #}",
    {},
)


async def test_what_a_model_thinks_is_an_item_of_its_own():
    server = server_of(*said("Hm, 4?\n</think>\n\nFour."), template=THINKING)
    client = client_of(server)
    response = await client.responses.create(model="tiny", input="2+2?", include=["reasoning.encrypted_content"])
    reasoning, message = response.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text.strip() == "Hm, 4?"
    assert reasoning.summary == []
    assert message.content[0].text.strip() == "Four."
    events = [event async for event in await client.responses.create(model="tiny", input="2+2?", stream=True)]
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds[2:6] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
    ]
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert thought == reasoning.content[0].text


async def test_a_limit_of_tokens_makes_it_incomplete():
    server = server_of(b"abc", TokenDelta("", [100], "length"))
    response = await client_of(server).responses.create(model="tiny", input="hi", max_output_tokens=4)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete" and response.output_text == "abcd"
    assert server.generator.requests[0].params.max_tokens == 4
    stream = await client_of(server).responses.create(model="tiny", input="hi", max_output_tokens=4, stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_an_answer_without_anything_is_an_empty_message():
    response = await client_of(server_of(ended())).responses.create(model="tiny", input="hi")
    assert response.output_text == "" and len(response.output) == 1


async def test_an_error_before_the_first_token_has_its_status():
    server = server_of(Overloaded("the queue is full", retry_after=3))
    with pytest.raises(openai.InternalServerError) as error:
        await client_of(server).responses.create(model="tiny", input="hi", stream=True)
    assert error.value.status_code == 503 and error.value.code == "overloaded"


async def test_an_error_in_a_stream_is_an_event():
    server = server_of(b"abc", EngineDeadError("the engine died"))
    stream = await client_of(server).responses.create(model="tiny", input="hi", stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert (last.response.error.code, last.response.error.message) == ("server_error", "the engine died")
    assert last.response.output[0].status == "incomplete"
    with pytest.raises(openai.InternalServerError, match="the engine died"):
        await client_of(server).responses.create(model="tiny", input="hi")


async def test_a_client_that_leaves_frees_the_engine():
    server = server_of(b"abc", None)
    body = json.dumps({"model": "tiny", "input": "hi", "stream": True}).encode()
    client = RawClient(server.app, body, "/v1/responses")
    await client.arrived.wait()
    assert server.generator.live == 1
    client.gone.set()
    await client.task
    assert server.generator.live == 0


async def test_messages_of_all_kinds_are_shown_to_the_template():
    server = server_of(*said("ok"))
    await client_of(server).responses.create(
        model="tiny",
        input=[
            {"role": "developer", "content": "D"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "S"}]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "A", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"place": "Rome"}'},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "sunny"}]},
            {"role": "user", "content": "more"},
        ],
    )
    prompt = prompt_of(server)
    roles = [part.split("\n", 1)[0] for part in prompt.split("<|im_start|>")[1:]]
    assert roles == ["system", "user", "assistant", "tool", "user", "assistant"]
    assert "<think>S</think>A<tool_call>" in prompt


async def test_old_turns_are_dropped_where_the_request_allows():
    server = Server(*said("ok"), max_model_len=80, text=ByteText())
    client = client_of(server)
    history = [{"role": "user", "content": f"question {number}"} for number in range(8)]
    with pytest.raises(openai.BadRequestError) as error:
        await client.responses.create(model="tiny", input=history, max_output_tokens=16)
    assert error.value.code == "context_length_exceeded" and error.value.param == "input"
    response = await client.responses.create(
        model="tiny", input=history, max_output_tokens=16, truncation="auto", instructions="Keep."
    )
    assert response.truncation == "auto"
    prompt = prompt_of(server)
    assert prompt.startswith("system: Keep.\nuser: question 6") and "question 7" in prompt
    assert len(prompt) <= 64
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="tiny", input="x" * 100, truncation="auto")


async def test_log_probabilities_come_with_the_text():
    delta = TokenDelta("", [ord("h"), ord("i")], "length", logprobs=Logprobs([-0.5, -1.0], [1, 2], [[], []], [[], []]))
    server = server_of(delta)
    client = client_of(server)
    response = await client.responses.create(model="tiny", input="hi", include=["message.output_text.logprobs"])
    part = response.output[0].content[0]
    assert [(entry.token, entry.logprob) for entry in part.logprobs] == [("h", -0.5), ("i", -1.0)]
    assert server.generator.requests[0].params.logprobs == 0
    stream = await client.responses.create(model="tiny", input="hi", top_logprobs=2, stream=True)
    (delta_event,) = [event async for event in stream if event.type == "response.output_text.delta"]
    assert [entry.token for entry in delta_event.logprobs] == ["h", "i"]
    assert server.generator.requests[1].params.logprobs == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}}, "text.format.json_schema.schema"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]}, "tools[0].type"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"metadata": {"k": "x" * 513}}, "metadata"),
        ({"include": ["everything"]}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"truncation": "some"}, "truncation"),
        ({"background": True, "store": False}, "store"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
    ],
)
async def test_what_is_wrong_or_not_supported_is_named(fields, param):
    server = server_of(*said("ok"))
    answer = await server.http.post("/v1/responses", json={"model": "tiny", "input": "hi", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert server.generator.requests == []


@pytest.mark.parametrize("given", [{"store": True}, {"background": True}, {"previous_response_id": ""}])
async def test_without_a_store_nothing_that_needs_one_is_taken(given: dict[str, Any]):
    response = await server_of(*said("x")).http.post("/v1/responses", json={"model": "tiny", "input": "hi", **given})
    assert (response.status_code, response.json()["error"]["param"]) == (400, *given)


async def test_without_a_store_there_is_no_response_to_fetch():
    client = client_of(server_of(*said("ok")))
    with pytest.raises(openai.NotFoundError, match="Response with id 'resp_1' not found"):
        await client.responses.retrieve("resp_1")


async def test_tool_choice_and_parallel_calls_are_repeated():
    server = server_of(*said("ok"))
    response = await client_of(server).responses.create(
        model="tiny", input="hi", tools=[WEATHER], tool_choice="none", parallel_tool_calls=False
    )
    assert (response.tool_choice, response.parallel_tool_calls) == ("none", False)
    assert "<tools>" not in prompt_of(server)


async def test_many_at_once_are_kept_apart():
    server = server_of()
    client = client_of(server)
    requests = [
        client.responses.create(model="tiny", input="hi", max_output_tokens=5, extra_body={"seed": seed})
        for seed in range(8)
    ]
    answers = await asyncio.gather(*requests)
    assert [answer.output_text for answer in answers] == [
        "".join(chr(ord("a") + seed + step) for step in range(5)) for seed in range(8)
    ]


async def test_a_response_is_ended_by_its_id():
    server = server_of(b"abc", None)
    body = json.dumps({"model": "tiny", "input": "hi", "stream": True}).encode()
    client = RawClient(server.app, body, "/v1/responses")
    while not any(b"abc" in message.get("body", b"") for message in client.sent):
        await client.arrived.wait()
        await asyncio.sleep(0.01)
    response_id = json.loads(client.sent[1]["body"].split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
    assert (await server.http.post("/v1/abort", json={"request_ids": response_id})).status_code == 200
    await client.task
    last = json.loads(client.sent[-2]["body"].split(b"data: ")[-1])
    assert (last["type"], last["response"]["incomplete_details"]) == ("response.incomplete", {"reason": "aborted"})


async def test_a_form_goes_to_the_grammars():
    asked: list[tuple[str, str]] = []

    class Grammars:
        async def compile_async(self, structure: StructuredOutput, *, param: str = "structure") -> StructuredOutput:
            asked.append((structure.kind, param))
            return StructuredOutput("grammar", 'root ::= "a"')

    server = server_of(*said('{"x": 1, "y": 2}'))
    server.catalog.model = replace(server.catalog.model, grammars=Grammars())
    client = client_of(server)
    response = await client.responses.parse(model="tiny", input="hi", text_format=Point)
    assert response.output_parsed == Point(x=1, y=2) and asked == [("json_schema", "text.format.json_schema.schema")]
    assert response.text.format.type == "json_schema" and response.text.format.name == "Point"
    await client.responses.create(model="tiny", input="hi", text={"format": {"type": "json_object"}})
    assert asked[1] == ("json_object", "text.format")
