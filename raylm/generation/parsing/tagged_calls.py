"""Calls whose arguments stand in tags: Qwen3-Coder's and GLM's."""

from __future__ import annotations

import re
from collections.abc import Mapping

from raylm.generation.parsing.formats import CallFormat, Tags
from raylm.generation.parsing.sink import Sink
from raylm.generation.parsing.tape import Marks, Tape, Waiting
from raylm.generation.parsing.values import Members, Schema

_NAME = re.compile(r"[\w.\-/:]+")


class TaggedCalls:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, and the like."""

    def __init__(self, form: CallFormat, tags: Tags, tape: Tape, sink: Sink, tools: Mapping[str, Schema]) -> None:
        self._tags, self._tape, self._sink, self._tools = tags, tape, sink, tools
        self._ends = Marks(form.closes)
        self._key_end = Marks((tags.key_end.strip(),))
        # A model may forget to close a value: the next mark does.
        self._next = (tags.key_begin, form.closes[0]) if tags.name_begin else ()
        self._value_end = Marks((tags.value_end.strip(), *self._next))

    def read(self, mark: str) -> Waiting[bool]:
        """Reads the calls that `mark` has begun. False when what followed is no call."""
        tape, tags = self._tape, self._tags
        in_name = bool(tags.name_begin) and mark == tags.name_begin
        while True:
            yield from tape.space()
            if not in_name and not (yield from tape.literal(tags.name_begin)):
                return False
            if not (yield from self._call()):
                return False
            tape.record()
            if not tags.name_begin:
                return True
            yield from tape.space()
            if (yield from tape.one_of(self._ends)):
                return True
            if not (yield from tape.stands(tags.name_begin)):
                return False
            in_name = False

    def _call(self) -> Waiting[bool]:
        """One call from its name to the mark that ends it."""
        tape, tags = self._tape, self._tags
        name: list[str] = []
        yield from tape.space()
        yield from tape.matching(_NAME, name.append)
        yield from tape.space()
        if not name or not (yield from tape.literal(tags.name_end)):
            return False
        yield from tape.space()
        ended = yield from tape.one_of(self._ends)
        if not ended and not (yield from tape.stands(tags.key_begin)):
            return False
        tape.forget()
        members = Members(self._sink, "".join(name), self._tools)
        while not ended:
            tape.record()
            if not (yield from tape.literal(tags.key_begin)):
                if (yield from tape.peek()):
                    members.close()
                return False
            if not (yield from self._member(members)):
                return False
            yield from tape.space()
            ended = yield from tape.one_of(self._ends)
        members.close()
        return True

    def _member(self, members: Members) -> Waiting[bool]:
        """One argument, whose opening mark is read. False when it broke off."""
        tape, tags = self._tape, self._tags
        keys: list[str] = []
        values: list[str] = []
        if not (yield from tape.until(self._key_end, keys.append)):
            return False
        key = "".join(keys).strip()
        if not tags.trims:
            yield from tape.space()
        if not (yield from tape.literal(tags.value_begin.strip())):
            if (yield from tape.peek()):
                members.close()
            return False
        tape.forget()
        end = yield from tape.until(self._value_end, values.append)
        value = "".join(values)
        if tags.trims:
            value = value.removeprefix("\n").removesuffix("\n")
        if end is None:
            members.broken_off(key, value)
            return False
        if end in self._next:
            tape.unread(end)
        members.typed(key, value, json_first=tags.json_values)
        return True
