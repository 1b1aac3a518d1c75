"""Content of Anthropic's messages: a string, or a list of blocks with a type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from raylm.errors import RequestRejected
from raylm.generation.quote import quote

Fields = Mapping[str, object]


class Block(NamedTuple):
    """place: where it stands in the request, such as messages[2].content[0]."""

    kind: str
    fields: Fields
    place: str

    def text(self, name: str, *, empty: bool = True) -> str:
        """A field that is a string. Raises RequestRejected where it is none, or empty though it must not be."""
        value = self.fields.get(name)
        if not isinstance(value, str) or not (value or empty):
            what = "a string" if empty else "a string that is not empty"
            refuse(f"{self.place}.{name} must be {what}, got {quote(value)}", f"{self.place}.{name}")
        return value


def blocks(content: object, place: str, kinds: tuple[str, ...]) -> Iterator[Block]:
    """The blocks of a content, each of one of `kinds`; a string is one block of text. Raises RequestRejected."""
    if isinstance(content, str):
        yield Block("text", {"text": content}, place)
        return
    if not isinstance(content, list):
        refuse(f"{place} must be a string or a list of blocks, got {quote(content)}", place)
    for index, one in enumerate(content):
        where = f"{place}[{index}]"
        if not isinstance(one, Mapping):
            refuse(f"{where} must be an object with a type, got {quote(one)}", where)
        kind = one.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            allowed = kinds[0] if len(kinds) == 1 else f"{', '.join(kinds[:-1])} or {kinds[-1]}"
            message = f"{where}.type must be {allowed} (others, such as images, are not supported), got {quote(kind)}"
            raise RequestRejected(message, param=f"{where}.type", code="unsupported_parameter")
        yield Block(kind, one, where)


def texts(content: object, place: str) -> list[str]:
    """Of a content that is text only; null is none."""
    return [] if content is None else [block.text("text") for block in blocks(content, place, ("text",))]


def refuse(message: str, param: str) -> NoReturn:
    raise RequestRejected(message, param=param)
