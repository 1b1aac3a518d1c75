"""Output items while the model writes them, each with the events that tell of it."""

from __future__ import annotations

from typing import NamedTuple, Protocol
from uuid import uuid4

import msgspec

from raylm.api.responses.wire import EventMaker, Item, encode
from raylm.generation.lines import one_line


class RemoteTool(NamedTuple):
    """A tool of an MCP server: the server's label, its own name there, and whether the client must approve calls."""

    server: str
    name: str
    needs_approval: bool


class OpenItem(Protocol):
    """An item that grows."""

    def opening(self) -> bytes:
        """The events that it begins with."""
        ...

    def closing(self, status: str) -> bytes:
        """The events that it ends with; `status` is completed or incomplete."""
        ...

    def item(self, status: str) -> Item: ...


class OpenText:
    """The text of a message, or of the model's reasoning: an item with one content part."""

    def __init__(self, events: EventMaker, index: int, *, reasoning: bool) -> None:
        """`index` is the item's in the output."""
        self._events = events
        self.is_reasoning = reasoning
        self._id = f"{'rs' if reasoning else 'msg'}_{uuid4().hex}"
        self._index = index
        self._place: Item = {"item_id": self._id, "output_index": index, "content_index": 0}
        self._texts: list[str] = []
        self._entries: list[bytes] = []
        self._kind = "response.reasoning_text" if reasoning else "response.output_text"
        delta = f"{self._kind}.delta"
        # Each token pays for an event: what is the same in all of them is encoded once.
        same = encode({"type": delta, **self._place})[:-1]
        self._head = f"event: {delta}\ndata: ".encode() + same + b',"delta":'

    def opening(self) -> bytes:
        item = self._item([], "in_progress")
        added = self._events.make("response.output_item.added", {"output_index": self._index, "item": item})
        return added + self._events.make("response.content_part.added", {**self._place, "part": self._part("")})

    def push(self, text: str, entries: bytes) -> bytes:
        """`entries`: JSON of its tokens' log probabilities, separated by commas."""
        self._texts.append(text)
        if entries:
            self._entries.append(entries)
        logprobs = b"" if self.is_reasoning else b',"logprobs":[' + entries + b"]"
        number = b',"sequence_number":%d}\n\n' % self._events.number()
        return self._head + one_line(encode(text) + logprobs) + number

    def closing(self, status: str) -> bytes:
        text = "".join(self._texts)
        done: Item = {**self._place, "text": text}
        if not self.is_reasoning:
            done["logprobs"] = self._logprobs()
        make = self._events.make
        return (
            make(f"{self._kind}.done", done)
            + make("response.content_part.done", {**self._place, "part": self._part(text)})
            + make("response.output_item.done", {"output_index": self._index, "item": self.item(status)})
        )

    def item(self, status: str) -> Item:
        return self._item([self._part("".join(self._texts))], status)

    def _part(self, text: str) -> Item:
        if self.is_reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs()}

    def _logprobs(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + b",".join(self._entries) + b"]")

    def _item(self, content: list[Item], status: str) -> Item:
        if self.is_reasoning:
            return {"type": "reasoning", "id": self._id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": self._id, "role": "assistant", "content": content, "status": status}


class OpenCall:
    """A call of one of the client's functions."""

    def __init__(self, events: EventMaker, index: int, call_id: str, name: str) -> None:
        self._events = events
        self._id = f"fc_{uuid4().hex}"
        self._index = index
        self._place: Item = {"item_id": self._id, "output_index": index}
        self._call_id = call_id
        self._name = name
        self._arguments: list[str] = []

    def opening(self) -> bytes:
        fields: Item = {"output_index": self._index, "item": self.item("in_progress")}
        return self._events.make("response.output_item.added", fields)

    def push(self, text: str) -> bytes:
        self._arguments.append(text)
        return self._events.make("response.function_call_arguments.delta", {**self._place, "delta": text})

    def closing(self, status: str) -> bytes:
        done: Item = {**self._place, "name": self._name, "arguments": "".join(self._arguments)}
        item: Item = {"output_index": self._index, "item": self.item(status)}
        make = self._events.make
        return make("response.function_call_arguments.done", done) + make("response.output_item.done", item)

    def item(self, status: str) -> Item:
        return {
            "type": "function_call",
            "id": self._id,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
            "status": status,
        }


class OpenRemoteCall:
    """A call of an MCP server's tool. It ends with what the tool gives, not with its arguments."""

    def __init__(self, events: EventMaker, index: int, tool: RemoteTool, *, approval_id: str | None = None) -> None:
        """`approval_id`: of the request that the client approved."""
        self._events = events
        self._id = f"mcp_{uuid4().hex}"
        self._index = index
        self._place: Item = {"item_id": self._id, "output_index": index}
        self._arguments: list[str] = []
        self._approval_id = approval_id
        self._output: str | None = None
        self._error: str | None = None
        self.tool = tool

    @property
    def arguments(self) -> str:
        return "".join(self._arguments)

    def opening(self) -> bytes:
        fields: Item = {"output_index": self._index, "item": self.item("in_progress")}
        added = self._events.make("response.output_item.added", fields)
        return added + self._events.make("response.mcp_call.in_progress", self._place)

    def push(self, text: str) -> bytes:
        self._arguments.append(text)
        return self._events.make("response.mcp_call_arguments.delta", {**self._place, "delta": text})

    def written(self) -> bytes:
        """The event once the model has written the arguments."""
        return self._events.make("response.mcp_call_arguments.done", {**self._place, "arguments": self.arguments})

    def finish(self, output: str | None, error: str | None) -> None:
        """What came of it: the tool's output, or why there is none."""
        self._output, self._error = output, error

    def closing(self, status: str) -> bytes:
        ended = "completed" if self._output is not None else "failed"
        item: Item = {"output_index": self._index, "item": self.item(status)}
        make = self._events.make
        return make(f"response.mcp_call.{ended}", self._place) + make("response.output_item.done", item)

    def item(self, status: str) -> Item:
        if self._error is not None:
            status = "failed"
        return {
            "type": "mcp_call",
            "id": self._id,
            "server_label": self.tool.server,
            "name": self.tool.name,
            "arguments": self.arguments,
            "output": self._output,
            "error": self._error,
            "approval_request_id": self._approval_id,
            "status": status,
        }


class ListedTools:
    """The tools that an MCP server has."""

    def __init__(self, events: EventMaker, index: int, server: str, tools: list[Item]) -> None:
        self._events = events
        self._id = f"mcpl_{uuid4().hex}"
        self._index = index
        self._server = server
        self._tools = tools

    def opening(self) -> bytes:
        place: Item = {"item_id": self._id, "output_index": self._index}
        fields: Item = {"output_index": self._index, "item": {**self.item("in_progress"), "tools": []}}
        make = self._events.make
        return make("response.output_item.added", fields) + make("response.mcp_list_tools.in_progress", place)

    def closing(self, status: str) -> bytes:
        place: Item = {"item_id": self._id, "output_index": self._index}
        fields: Item = {"output_index": self._index, "item": self.item(status)}
        make = self._events.make
        return make("response.mcp_list_tools.completed", place) + make("response.output_item.done", fields)

    def item(self, status: str) -> Item:
        return {"type": "mcp_list_tools", "id": self._id, "server_label": self._server, "tools": self._tools}


class OpenApproval:
    """A call of an MCP server's tool that the client must approve first. It is told of when it is whole."""

    def __init__(self, events: EventMaker, index: int, tool: RemoteTool) -> None:
        self._events = events
        self._id = f"mcpr_{uuid4().hex}"
        self._index = index
        self._tool = tool
        self._arguments: list[str] = []

    def opening(self) -> bytes:
        return b""

    def push(self, text: str) -> bytes:
        self._arguments.append(text)
        return b""

    def closing(self, status: str) -> bytes:
        fields: Item = {"output_index": self._index, "item": self.item(status)}
        make = self._events.make
        return make("response.output_item.added", fields) + make("response.output_item.done", fields)

    def item(self, status: str) -> Item:
        return {
            "type": "mcp_approval_request",
            "id": self._id,
            "server_label": self._tool.server,
            "name": self._tool.name,
            "arguments": "".join(self._arguments),
        }
