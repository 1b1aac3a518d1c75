"""Calls of MCP servers' tools that the client approves in its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from uuid import uuid4

from raylm.api.responses.open_items import RemoteTool
from raylm.api.responses.remote import RemoteTools
from raylm.api.responses.wire import Item
from raylm.errors import RequestRejected


class ApprovedCall(NamedTuple):
    """A call that was approved and has been made: what came of it, or why nothing did."""

    tool: RemoteTool
    request_id: str
    arguments: str
    output: str | None
    error: str | None

    def item(self) -> Item:
        """As a prompt is made from it."""
        tool = self.tool
        return {
            "type": "mcp_call",
            "id": f"mcp_{uuid4().hex}",
            "server_label": tool.server,
            "name": tool.name,
            "arguments": self.arguments,
            "output": self.output,
            "error": self.error,
        }


async def approved_calls(
    before: Sequence[Item], given: Sequence[Item], remote: Mapping[str, RemoteTool], tools: RemoteTools
) -> list[ApprovedCall]:
    """Make the calls that the `given` items approve. Their requests are there too, or among those `before`. Raises
    RequestRejected for a request or a tool that there is not."""
    requests = {item["id"]: item for item in (*before, *given) if item["type"] == "mcp_approval_request"}
    known = {(tool.server, tool.name): tool for tool in remote.values()}
    calls = []
    for item in given:
        if item["type"] != "mcp_approval_response":
            continue
        request_id = item["approval_request_id"]
        request = requests.get(request_id)
        if request is None:
            message = f"approval_request_id {request_id!r} is the id of no mcp_approval_request before it"
            raise RequestRejected(f"input: {message}", param="input")
        if not item["approve"]:
            continue
        tool = known.get((request["server_label"], request["name"]))
        if tool is None:
            message = f"{request['name']!r} of {request['server_label']!r} is approved, but tools does not have it"
            raise RequestRejected(f"input: {message}", param="input")
        output, error = await tools.call(tool.server, tool.name, request["arguments"])
        calls.append(ApprovedCall(tool, request_id, request["arguments"], output, error))
    return calls
