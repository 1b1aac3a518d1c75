"""Tools of MCP servers: which may be used, what they are, and calls of them, through the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from raylm.api.errors import HttpError
from raylm.api.responses.wire import Item
from raylm.config.mcp import McpConfig
from raylm.errors import RequestRejected
from raylm.generation.quote import quote
from raylm.generation.tool_reading import read_function
from raylm.generation.tools import Tool
from raylm.log import get_logger

if TYPE_CHECKING:
    from mcp import Client

logger = get_logger(__name__)

_FIELDS = frozenset({"type", "server_label", "server_url", "server_description", "allowed_tools", "require_approval"})
_MAX_PAGES = 20
Result = TypeVar("Result")


class RemoteServer(NamedTuple):
    """A server that a request asks for. allowed: the tools that it may use; None: all. approved: tools that the model
    may call at once; None: all of them. shown: the entry of `tools` as the response repeats it."""

    label: str
    allowed: frozenset[str] | None
    approved: frozenset[str] | None
    shown: Item

    def needs_approval(self, name: str) -> bool:
        return self.approved is not None and name not in self.approved


class Listing(NamedTuple):
    """The tools of a server that a request may use, and the same as an item of the output lists them."""

    server: RemoteServer
    tools: list[Tool]
    listed: list[Item]


_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class RemoteTools:
    """The servers that the configuration allows."""

    def __init__(self, config: McpConfig) -> None:
        self._config = config

    @property
    def max_rounds(self) -> int:
        return self._config.max_rounds

    def read(self, value: Mapping[str, object], place: str) -> RemoteServer:
        """An entry of `tools` with type mcp. Raises RequestRejected."""
        label = value.get("server_label")
        known = self._config.servers
        if not isinstance(label, str) or label not in known:
            names = ", ".join(known) or "there are none"
            raise RequestRejected(
                f"{place}.server_label must be one of this server's MCP servers ({names}), got {quote(label)}",
                param=f"{place}.server_label",
                code="unsupported_tool",
            )
        for name, one in value.items():
            if name not in _FIELDS and one is not None:
                raise RequestRejected(
                    f"{place}.{name:.64} is not supported: the server's configuration says how MCP servers are reached",
                    param=f"{place}.{name:.64}",
                    code="unsupported_parameter",
                )
        if value.get("server_url") not in (None, known[label].url):
            raise RequestRejected(
                f"{place}.server_url must be left out, or be the URL that the server's configuration has",
                param=f"{place}.server_url",
            )
        allowed = _names(value.get("allowed_tools"), f"{place}.allowed_tools")
        approved = _approved(value.get("require_approval"), f"{place}.require_approval")
        shown: Item = {name: one for name, one in value.items() if name in _FIELDS}
        return RemoteServer(label, allowed, approved, shown)

    async def list(self, server: RemoteServer) -> Listing:
        """Ask a server for its tools. Raises HttpError 424 where it does not answer as it should."""

        async def listed(client: Client) -> list[Item]:
            found: list[Item] = []
            cursor: str | None = None
            for _ in range(_MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                found += [_listed(tool.model_dump(by_alias=False)) for tool in page.tools]
                cursor = page.next_cursor
                if cursor is None:
                    break
            return found

        try:
            items = await self._ask(server.label, listed)
        except _NoAnswer as error:
            message = f"The MCP server {server.label!r} did not list its tools: {error}"
            raise HttpError(424, message, kind="server_error", param="tools", code="mcp_server_error") from None
        tools, shown = [], []
        for item in items:
            if server.allowed is not None and item["name"] not in server.allowed:
                continue
            fields = {"name": item["name"], "description": item["description"], "parameters": item["input_schema"]}
            try:
                tools.append(read_function(fields, f"MCP server {server.label}: tool"))
                shown.append(item)
            except RequestRejected as error:
                logger.warning("a tool of the MCP server %s is left out: %s", server.label, error)
        return Listing(server, tools, shown)

    async def call(
        self, label: str, name: str, arguments: str, *, traceparent: str = ""
    ) -> tuple[str | None, str | None]:
        """What a call gives: its output, or why there is none. `traceparent`: W3C's header, where there is a trace."""
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return None, f"The arguments are no JSON: {error}"
        if not isinstance(given, dict):
            return None, "The arguments are no JSON object"

        async def called(client: Client) -> tuple[str | None, str | None]:
            result = await client.call_tool(name, given)
            text = _text(result.model_dump(by_alias=False))
            return (None, text or "The tool failed") if result.is_error else (text, None)

        try:
            return await self._ask(label, called, {"traceparent": traceparent} if traceparent else {})
        except _NoAnswer as error:
            return None, str(error)

    async def _ask(
        self, label: str, work: Callable[[Client], Awaitable[Result]], also: Mapping[str, str] = _NO_HEADERS
    ) -> Result:
        """Connect to a server, ask, and leave. Raises _NoAnswer."""
        if find_spec("mcp") is None:
            logger.error("MCP servers need the extra: pip install -e '.[mcp]'")
            raise _NoAnswer("the server has no MCP client")
        from raylm.api.responses.remote_http import connected

        config = self._config.servers[label]
        try:
            async with asyncio.timeout(self._config.timeout_s):
                async with connected(config.url, {**config.headers(), **also}, self._config) as client:
                    return await work(client)
        except TimeoutError:
            raise _NoAnswer(f"no answer for {self._config.timeout_s:g} s") from None
        except Exception as error:
            why = _reason(error)
            logger.warning("the MCP server %s failed: %s", label, why)
            # What a server says of itself is for the client; addresses and files of this one are not.
            raise _NoAnswer(why if _is_said(error) else "it failed; this server's log says how") from None


class _NoAnswer(Exception):
    """A server did not answer as it should."""


def _cause(error: BaseException) -> BaseException:
    """The innermost cause: the client runs in groups of tasks, whose errors come wrapped."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error


def _reason(error: BaseException) -> str:
    cause = _cause(error)
    return " ".join(str(cause).split()) or type(cause).__name__


def _is_said(error: BaseException) -> bool:
    """Whether the error is the MCP server's own answer, or that the answer is too large."""
    from mcp import MCPError

    from raylm.api.responses.remote_http import TooLarge

    return isinstance(_cause(error), MCPError | TooLarge)


def _listed(tool: Mapping[str, object]) -> Item:
    return {
        "name": tool["name"],
        "description": tool.get("description"),
        "input_schema": tool.get("input_schema") or {"type": "object", "properties": {}},
        "annotations": tool.get("annotations"),
    }


def _text(result: Mapping[str, object]) -> str:
    """The text of a call's result; other content is named, since the model reads text alone."""
    content = result.get("content")
    parts = content if isinstance(content, list) else []
    texts = [str(part["text"]) if part.get("type") == "text" else f"[{part.get('type')} content]" for part in parts]
    structured = result.get("structured_content")
    return "\n".join(texts) if texts or structured is None else json.dumps(structured, ensure_ascii=False)


def _names(value: object, place: str) -> frozenset[str] | None:
    """Names of tools: a list, or an object with tool_names; None: no limit."""
    if isinstance(value, Mapping):
        if extra := [name for name in value if name != "tool_names"]:
            raise RequestRejected(f"{place}.{extra[0]:.64} is not supported; name the tools", param=place)
        value = value.get("tool_names")
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise RequestRejected(f"{place} must be a list of names of tools, got {quote(value)}", param=place)
    return frozenset(value)


def _approved(value: object, place: str) -> frozenset[str] | None:
    """The tools that need no approval; None: all."""
    if value == "never":
        return None
    if value in (None, "always"):
        return frozenset()
    if isinstance(value, Mapping) and value.keys() <= {"never"}:
        return _names(value.get("never"), f"{place}.never") or frozenset()
    raise RequestRejected(
        f"{place} must be always, never, or an object with never.tool_names, got {quote(value)}", param=place
    )
