"""What a chat template's source says of the messages that it takes: parts or plain text, and which roles it names."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from jinja2 import nodes


class _Kind(IntEnum):
    """What an expression of a template is."""

    OTHER = 0
    CONTENT = 1
    MESSAGE = 2
    MESSAGES = 3


class TemplateReading:
    """Read once from a template's syntax tree.

    Names are followed without regard to scope, through assignments, loops and macros: a name that once held a
    message's content counts as content everywhere.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._kinds: dict[str, _Kind] = {"messages": _Kind.MESSAGES}
        while self._spread():
            pass
        self.takes_parts = any(self._kind(loop.iter) is _Kind.CONTENT for loop in tree.find_all(nodes.For))
        """It goes through the parts of a content, so that a list reaches it as a list."""
        self.takes_strings = any(test.name == "string" for test in tree.find_all(nodes.Test))
        """It asks whether something is a string, so that a content may be one where it takes parts too."""
        constants = (constant.value for constant in tree.find_all(nodes.Const))
        self.knows_developer = any(isinstance(value, str) and "developer" in value for value in constants)
        """One of its expressions mentions the role "developer". Text that it prints does not count."""

    def _spread(self) -> bool:
        """Follow every assignment once; True where that taught a name's kind."""
        before = len(self._kinds)
        for name, value in self._assignments():
            kind = self._kind(value)
            if kind is not _Kind.OTHER:
                self._kinds.setdefault(name, kind)
        for loop in self._tree.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name) and self._kind(loop.iter) is _Kind.MESSAGES:
                self._kinds.setdefault(loop.target.name, _Kind.MESSAGE)
        return len(self._kinds) > before

    def _assignments(self) -> Iterator[tuple[str, nodes.Node]]:
        for assign in self._tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name):
                yield assign.target.name, assign.node
        macros = {macro.name: macro for macro in self._tree.find_all(nodes.Macro)}
        for call in self._tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                for parameter, value in zip(macros[call.node.name].args, call.args, strict=False):
                    yield parameter.name, value
                for keyword in call.kwargs:
                    yield keyword.key, keyword.value

    def _kind(self, value: nodes.Node | None) -> _Kind:
        match value:
            case nodes.Name():
                return self._kinds.get(value.name, _Kind.OTHER)
            case nodes.Filter():
                return self._kind(value.node)
            case nodes.CondExpr():
                return max(self._kind(value.expr1), self._kind(value.expr2))
            case nodes.Getattr(node=owner, attr=key):
                return self._member(owner, key)
            case nodes.Getitem(node=owner, arg=nodes.Slice()):
                return self._kind(owner)
            case nodes.Getitem(node=owner, arg=nodes.Const(value=key)):
                return self._member(owner, key)
            case nodes.Getitem(node=owner):
                return self._member(owner, 0)
            case nodes.Call(node=nodes.Getattr(node=owner, attr="get"), args=[nodes.Const(value=key), *_]):
                return self._member(owner, key)
            case _:
                return _Kind.OTHER

    def _member(self, owner: nodes.Node, key: object) -> _Kind:
        kind = self._kind(owner)
        if kind is _Kind.MESSAGES and isinstance(key, int):
            return _Kind.MESSAGE
        return _Kind.CONTENT if kind is _Kind.MESSAGE and key == "content" else _Kind.OTHER
