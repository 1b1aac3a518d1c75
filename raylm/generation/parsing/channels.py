"""Harmony, the format of gpt-oss: every message has a channel, and a call has a recipient.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>`; the answer is in the channel "final".
"""

from __future__ import annotations

import re

from raylm.generation.parsing.sink import Sink
from raylm.generation.parsing.tape import Marks, Tape, Waiting

_MESSAGE = "<|message|>"
_BEGINS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_STOPS = Marks((*_BEGINS, *_ENDS))
_HEADER = Marks((_MESSAGE, "<|start|>", *_ENDS))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.\-/:]+)")


class Channels:
    """Reads a whole output."""

    def __init__(self, tape: Tape, sink: Sink, *, reads_calls: bool, reads_reasoning: bool, in_reasoning: bool) -> None:
        """With `in_reasoning` the prompt has ended in the header of an analysis."""
        self._tape, self._sink = tape, sink
        self._reads_calls, self._reads_reasoning = reads_calls, reads_reasoning
        self.in_reasoning = in_reasoning

    def read(self) -> Waiting[None]:
        tape = self._tape
        mark: str | None = ""
        if self.in_reasoning:
            mark = yield from self._thinking()
        elif (yield from tape.stands(" to=")):
            mark = "<|start|>"
        while mark is not None:
            if mark in _BEGINS:
                mark = yield from self._message(mark)
            else:
                mark = yield from tape.until(_STOPS, self._sink.text)

    def _message(self, begin: str) -> Waiting[str | None]:
        """A message whose header `begin` has begun. The mark after its body; None at the text's end."""
        tape, sink = self._tape, self._sink
        header: list[str] = [begin]
        mark = yield from tape.until(_HEADER, header.append)
        if mark != _MESSAGE:
            # Nothing was said: the role alone, or a header that was broken off.
            text = "".join(header)
            if text.strip() not in ("<|start|>", "<|start|>assistant"):
                sink.text(text)
            return mark
        text = "".join(header)
        channel = _CHANNEL.search(text)
        recipient = _RECIPIENT.search(text)
        if recipient and self._reads_calls:
            return (yield from self._call(recipient[1]))
        if channel and channel[1] == "analysis" and self._reads_reasoning:
            return (yield from self._thinking())
        return (yield from tape.until(_STOPS, sink.text))

    def _thinking(self) -> Waiting[str | None]:
        self.in_reasoning = True
        mark = yield from self._tape.until(_STOPS, self._sink.reasoning)
        self.in_reasoning = mark is None
        return mark

    def _call(self, name: str) -> Waiting[str | None]:
        tape, sink = self._tape, self._sink
        sink.begin(name)
        yield from tape.space()
        if not (yield from tape.peek()) or (yield from tape.stands("<|")):
            sink.arguments("{}")
        return (yield from tape.until(_STOPS, sink.arguments))
