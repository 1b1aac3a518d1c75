"""ResponseWriter: what a model writes as output items, and the events that tell of them."""

from __future__ import annotations

import time
from collections.abc import Mapping

from raylm.api.errors import HttpError
from raylm.api.responses.open_items import OpenApproval, OpenCall, OpenItem, OpenRemoteCall, OpenText, RemoteTool
from raylm.api.responses.wire import EventMaker, Incomplete, Response, fault_of, usage_of
from raylm.generation.choices import ChoiceDelta, Counts
from raylm.generation.pieces import CallArguments, CallBegin, Reasoning, Text

_CUT = "The answer was cut, so the call was not made"
_INCOMPLETE = {"length": "max_output_tokens", "abort": "aborted"}
"""Ends of what a model writes that are not its own, and what a response calls them."""


class ResponseWriter:
    """Writes one response, whose rounds each are what the model writes in one go."""

    def __init__(self, response: Response, remote: Mapping[str, RemoteTool]) -> None:
        """`remote`: tools of MCP servers, by the names that the model calls them by."""
        self.response = response
        self.events = EventMaker()
        self._remote = remote
        self._open: OpenItem | None = None
        self._blank = _Blank()
        self._is_silent = True
        self._waiting: list[OpenRemoteCall] = []
        self._places: dict[OpenItem, int] = {}

    def opening(self) -> bytes:
        """The events before the first token."""
        told = self.events.make("response.created", {"response": self.response})
        if self.response.background:
            told += self.events.make("response.queued", {"response": self.response})
        self.response.status = "in_progress"
        return told + self.events.make("response.in_progress", {"response": self.response})

    def push(self, delta: ChoiceDelta) -> bytes:
        """The events of what the model has written."""
        told = b""
        entries = delta.entries[0] if delta.entries else b""
        for piece in delta.pieces_or_text():
            match piece:
                case Text(text):
                    told += self._say(text, entries)
                    entries = b""
                case Reasoning(text):
                    told += self._think(text)
                case CallBegin():
                    told += self.begin(self._new_call(piece))
                case CallArguments(_, text):
                    assert isinstance(self._open, OpenCall | OpenRemoteCall | OpenApproval), "a call has begun"
                    told += self._open.push(text)
        return told

    def end_round(self, finish_reason: str | None) -> bytes:
        """The model has come to an end: the events of what was open."""
        told = b""
        if self._is_silent:
            # What says nothing at all is a message without text.
            told = self._begin_text(reasoning=False)
        is_cut = finish_reason in _INCOMPLETE
        if is_cut:
            self.response.status = "incomplete"
            self.response.incomplete_details = Incomplete(_INCOMPLETE[finish_reason or ""])
        told += self._close(is_cut=is_cut)
        for call in self.waiting() if is_cut else ():
            call.finish(None, _CUT)
            told += self.close(call, "incomplete")
        self._is_silent = True
        return told

    def waiting(self) -> list[OpenRemoteCall]:
        """Calls of remote tools that the model has made since the last time. Each must be handed to `close` when
        its tool has answered."""
        calls, self._waiting = self._waiting, []
        return calls

    def begin(self, item: OpenItem) -> bytes:
        """The events of an item that begins; the one before has ended."""
        told = self._close()
        self._is_silent = False
        self._open = item
        self._places[item] = len(self.response.output)
        self.response.output.append(item.item("in_progress"))
        return told + item.opening()

    def close(self, item: OpenItem, status: str = "completed") -> bytes:
        """The events of an item that is complete."""
        self.response.output[self._places.pop(item)] = item.item(status)
        if self._open is item:
            self._open = None
        return item.closing(status)

    def closing(self, counts: Counts) -> bytes:
        """The last event."""
        response = self.response
        response.usage = usage_of(counts)
        if response.status == "in_progress":
            response.status, response.completed_at = "completed", int(time.time())
        return self.events.make(f"response.{response.status}", {"response": response})

    def fail(self, error: HttpError) -> None:
        """The response ends with an error; `closing` tells of it."""
        for item, place in self._places.items():
            self.response.output[place] = item.item("incomplete")
        self.response.status = "failed"
        self.response.error = fault_of(error)

    def next_index(self) -> int:
        """The place of the next item in the output."""
        return len(self.response.output)

    def _say(self, text: str, entries: bytes) -> bytes:
        told = b""
        if not (isinstance(self._open, OpenText) and not self._open.is_reasoning):
            if text.isspace() or not text:
                # It may stand between two calls, which is no message.
                self._blank.add(text, entries)
                return b""
            told = self._begin_text(reasoning=False)
        assert isinstance(self._open, OpenText), "a message is open"
        return told + self._open.push(text, entries)

    def _think(self, text: str) -> bytes:
        told = b""
        if not (isinstance(self._open, OpenText) and self._open.is_reasoning):
            told = self._begin_text(reasoning=True)
        assert isinstance(self._open, OpenText), "reasoning is open"
        return told + self._open.push(text, b"")

    def _begin_text(self, *, reasoning: bool) -> bytes:
        text = OpenText(self.events, self.next_index(), reasoning=reasoning)
        told = self.begin(text)
        blank = self._blank.take()
        if blank.text and not reasoning:
            told += text.push(blank.text, blank.entries)
        return told

    def _new_call(self, call: CallBegin) -> OpenItem:
        self._blank.take()
        tool = self._remote.get(call.name)
        # What is open ends, and has its place in the output already.
        index = self.next_index()
        if tool is None:
            return OpenCall(self.events, index, call.id, call.name)
        if tool.needs_approval:
            return OpenApproval(self.events, index, tool)
        return OpenRemoteCall(self.events, index, tool)

    def _close(self, *, is_cut: bool = False) -> bytes:
        item = self._open
        if item is None:
            return b""
        if not isinstance(item, OpenRemoteCall):
            return self.close(item, "incomplete" if is_cut else "completed")
        self._open = None
        self._waiting.append(item)
        return item.written()


class _Blank:
    """White space that the model wrote where no message was open."""

    def __init__(self) -> None:
        self.text = ""
        self.entries = b""

    def add(self, text: str, entries: bytes) -> None:
        self.text += text
        self.entries = b",".join(filter(None, (self.entries, entries)))

    def take(self) -> _Blank:
        """What there is, which is forgotten here."""
        taken = _Blank()
        taken.text, taken.entries = self.text, self.entries
        self.text, self.entries = "", b""
        return taken
