"""Tools of MCP servers in responses: a real server by the official package, the real openai client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import uvicorn
from mcp.server.mcpserver import MCPServer
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.routing import Route

from raylm.config.mcp import McpConfig
from raylm.config.observing import TracingConfig
from raylm.core.step import TokenDelta
from raylm.serving.observing.tracing import Tracing
from raylm.serving.observing.watch import RequestWatch
from tests.api.test_responses import HERMES, client_of, prompt_of
from tests.support.openai_fakes import ByteText, Server, said
from tests.support.ports import free_port

SEEN: list[str] = []


def tools_server() -> MCPServer[Any]:
    server = MCPServer("tools")

    @server.tool()
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        SEEN.append(f"add {a} {b}")
        return str(a + b)

    @server.tool()
    def fail() -> str:
        """Fail."""
        raise ValueError("it is broken")

    @server.tool()
    def long() -> str:
        """Say much."""
        return "x" * 100_000

    @server.tool()
    async def slow() -> str:
        """Never end."""
        await asyncio.sleep(3600)
        return ""

    return server


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=0))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@pytest.fixture
async def url() -> AsyncIterator[str]:
    SEEN.clear()
    async with listening(tools_server().streamable_http_app(stateless_http=True, json_response=True)) as base:
        yield f"{base}/mcp"


def server_of(url: str, *script: Any, **options: Any) -> Server:
    mcp = McpConfig.model_validate({"servers": {"math": {"url": url}}, "max_output_bytes": 20_000, **options})
    return Server(*script, max_model_len=100_000, text=ByteText(HERMES), mcp=mcp)


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class InTurn:
    """A generator that plays another script with every request."""

    def __init__(self, server: Server, *texts: str) -> None:
        self._generator = server.generator
        self._texts = list(texts)
        self._generate = server.generator.generate
        server.generator.generate = self.generate  # type: ignore[method-assign]

    def generate(self, *arguments: Any) -> Any:
        self._generator.script = said(self._texts.pop(0))
        return self._generate(*arguments)


MATH = {"type": "mcp", "server_label": "math", "require_approval": "never"}


async def test_a_tool_is_listed_called_and_answered_with(url):
    server = server_of(url)
    InTurn(server, call_of("add", a=2, b=3), "It is 5.")
    response = await client_of(server).responses.create(model="tiny", input="2+3?", tools=[MATH])
    listed, call, message = response.output
    assert listed.type == "mcp_list_tools" and listed.server_label == "math"
    assert {tool.name for tool in listed.tools} == {"add", "fail", "long", "slow"}
    assert listed.tools[0].input_schema["properties"]["a"]["type"] == "integer"
    assert (call.type, call.name, call.server_label, call.output, call.error) == ("mcp_call", "add", "math", "5", None)
    assert json.loads(call.arguments) == {"a": 2, "b": 3} and call.status == "completed"
    assert message.content[0].text == "It is 5."
    assert SEEN == ["add 2 3"]
    assert "Add two numbers." in prompt_of(server, 0)
    assert "<|im_start|>tool\n5<|im_end|>" in prompt_of(server, 1)
    lengths = [len(request.prompt_ids) for request in server.generator.requests]
    assert response.usage.input_tokens == sum(lengths)


async def test_a_trace_goes_on_at_the_tools_server():
    seen = []

    def noting(app):
        async def noted(scope, receive, send):
            seen.append(dict(scope.get("headers", ())).get(b"traceparent"))
            await app(scope, receive, send)

        return noted

    async with listening(noting(tools_server().streamable_http_app(stateless_http=True, json_response=True))) as base:
        server = server_of(f"{base}/mcp")
        InTurn(server, call_of("add", a=2, b=3), "It is 5.")
        tracing = Tracing(TracingConfig(), InMemorySpanExporter())
        server.http._transport.app = RequestWatch(server.app, [tracing])
        await client_of(server).responses.create(model="tiny", input="2+3?", tools=[MATH])
        tracing.close()
    assert any(given is not None and given.startswith(b"00-") for given in seen)


async def test_the_events_of_a_call(url):
    server = server_of(url)
    InTurn(server, call_of("add", a=2, b=3), "It is 5.")
    stream = await client_of(server).responses.create(model="tiny", input="2+3?", tools=[MATH], stream=True)
    events = [event async for event in stream]
    assert list(dict.fromkeys(event.type for event in events)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.output_item.done",
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.delta",
        "response.mcp_call_arguments.done",
        "response.mcp_call.completed",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in events[-1].response.output] == ["mcp_list_tools", "mcp_call", "message"]


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("fail", {}, "Error executing tool fail"),
        ("long", {}, "the answer has more than 20000 bytes"),
        ("slow", {"timeout_s": 5.0}, "no answer for 5 s"),
        ("add", {}, "a"),
    ],
)
async def test_a_call_that_fails_is_told_to_the_model(url, name, options, error):
    server = server_of(url, **options)
    InTurn(server, call_of(name), "Sorry.")
    response = await client_of(server).responses.create(model="tiny", input="go", tools=[MATH])
    call = response.output[1]
    assert call.status == "failed" and call.output is None and error in call.error
    assert "<|im_start|>tool\nError: " in prompt_of(server, 1)
    assert response.output_text == "Sorry."


async def test_rounds_and_calls_are_limited(url):
    server = server_of(url, max_rounds=2)
    InTurn(server, call_of("add", a=1, b=1), call_of("add", a=2, b=2), "Enough.")
    response = await client_of(server).responses.create(model="tiny", input="go", tools=[MATH])
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert "<tools>" in prompt_of(server, 1) and "<tools>" not in prompt_of(server, 2)
    server = server_of(url)
    InTurn(server, call_of("add", a=1, b=1) + call_of("add", a=2, b=2), "Enough.")
    response = await client_of(server).responses.create(model="tiny", input="go", tools=[MATH], max_tool_calls=1)
    assert [item.status for item in response.output[1:3]] == ["completed", "failed"]
    assert "max_tool_calls is 1" in response.output[2].error


async def test_a_call_waits_for_the_clients_approval(url):
    server = server_of(url)
    InTurn(server, call_of("add", a=2, b=3), "It is 5.", "As you like.")
    client = client_of(server)
    asks = {"type": "mcp", "server_label": "math", "allowed_tools": ["add"]}
    first = await client.responses.create(model="tiny", input="2+3?", tools=[asks])
    listed, request = first.output
    assert [tool.name for tool in listed.tools] == ["add"]
    assert (request.type, request.name) == ("mcp_approval_request", "add") and SEEN == []
    history: list[Any] = [{"role": "user", "content": "2+3?"}, *(item.model_dump() for item in first.output)]
    answer = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}
    second = await client.responses.create(model="tiny", input=[*history, answer], tools=[asks])
    assert SEEN == ["add 2 3"]
    call = next(item for item in second.output if item.type == "mcp_call")
    assert call.output == "5" and call.approval_request_id == request.id
    assert second.output_text == "It is 5." and "<|im_start|>tool\n5<|im_end|>" in prompt_of(server)
    third = await client.responses.create(model="tiny", input=[*history, {**answer, "approve": False}], tools=[asks])
    assert third.output_text == "As you like." and len(SEEN) == 1
    assert "The user did not allow this call." in prompt_of(server)
    with pytest.raises(openai.BadRequestError, match="is the id of no mcp_approval_request"):
        await client.responses.create(model="tiny", input=[{**answer, "approval_request_id": "mcpr_x"}], tools=[asks])


async def test_own_functions_end_the_servers_turn(url):
    server = server_of(url)
    own = {"type": "function", "name": "mine", "parameters": {"type": "object", "properties": {}}}
    InTurn(server, call_of("add", a=2, b=3) + call_of("mine"))
    response = await client_of(server).responses.create(model="tiny", input="go", tools=[MATH, own])
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "function_call"]
    assert response.output[1].output == "5"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"server_label": "other"}, "tools[0].server_label"),
        ({"server_label": "math", "server_url": "http://169.254.169.254/"}, "tools[0].server_url"),
        ({"server_label": "math", "headers": {"x": "y"}}, "tools[0].headers"),
        ({"server_label": "math", "authorization": "t"}, "tools[0].authorization"),
        ({"server_label": "math", "connector_id": "connector_gmail"}, "tools[0].connector_id"),
        ({"server_label": "math", "require_approval": "sometimes"}, "tools[0].require_approval"),
        ({"server_label": "math", "allowed_tools": 3}, "tools[0].allowed_tools"),
    ],
)
async def test_only_what_the_configuration_allows_is_reached(tool, param):
    server = server_of("http://127.0.0.1:1/mcp", *said("ok"))
    body = {"model": "tiny", "input": "hi", "tools": [{"type": "mcp", **tool}]}
    answer = await server.http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_without_configuration_there_are_no_servers():
    server = Server(*said("ok"), text=ByteText(HERMES))
    body = {"model": "tiny", "input": "hi", "tools": [{**MATH, "server_url": "http://127.0.0.1:1/mcp"}]}
    answer = await server.http.post("/v1/responses", json=body)
    assert answer.status_code == 400 and "there are none" in answer.json()["error"]["message"]


async def test_a_server_that_is_not_there_is_named():
    server = server_of(f"http://127.0.0.1:{free_port()}/mcp", *said("ok"))
    with pytest.raises(openai.APIStatusError, match="The MCP server 'math' did not list its tools") as error:
        await client_of(server).responses.create(model="tiny", input="hi", tools=[MATH])
    assert (error.value.status_code, error.value.code) == (424, "mcp_server_error")
    assert server.generator.requests == []


async def test_a_redirect_to_elsewhere_is_not_followed(url):
    async def elsewhere(request: Any) -> RedirectResponse:
        return RedirectResponse(url, 307)

    async with listening(Starlette(routes=[Route("/mcp", elsewhere, methods=["GET", "POST", "DELETE"])])) as base:
        server = server_of(f"{base}/mcp", *said("ok"))
        with pytest.raises(openai.APIStatusError, match="did not list its tools") as error:
            await client_of(server).responses.create(model="tiny", input="hi", tools=[MATH])
    assert error.value.status_code == 424 and SEEN == []


async def test_a_cut_call_is_not_made(url):
    text = call_of("add", a=2, b=3)
    cut = [*said(text)[:-3], TokenDelta("", [], "length")]
    server = server_of(url, *cut)
    response = await client_of(server).responses.create(model="tiny", input="go", tools=[MATH])
    assert response.status == "incomplete" and SEEN == []
