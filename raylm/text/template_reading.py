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
        found = list(tree.find_all((nodes.For, nodes.Assign, nodes.Call, nodes.Macro, nodes.Test, nodes.Const)))
        loops = [node for node in found if isinstance(node, nodes.For)]
        self._kinds: dict[str, _Kind] = {"messages": _Kind.MESSAGES}
        assignments = list(_assignments(found))
        while self._spread(assignments, loops):
            pass
        self.takes_parts = any(self._kind(loop.iter) is _Kind.CONTENT for loop in loops)
        """It goes through the parts of a content, so that a list reaches it as a list."""
        self.takes_strings = any(isinstance(node, nodes.Test) and node.name == "string" for node in found)
        """It asks whether something is a string, so that a content may be one where it takes parts too."""
        constants = [node.value for node in found if isinstance(node, nodes.Const)]
        self.knows_developer = any(isinstance(value, str) and "developer" in value for value in constants)
        """One of its expressions mentions the role "developer". Text that it prints does not count."""
        names = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}
        self.reads_tools = "tools" in names
        self.reads_documents = "documents" in names
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        self.reads_tool_calls = "tool_calls" in attributes or "tool_calls" in constants
        """It shows the calls of earlier answers."""
        self.reads_tool_results = self.reads_tool_calls or "tool" in constants or "tool_call_id" in attributes
        """It knows messages of the role "tool"."""

    def _spread(self, assignments: list[tuple[str, nodes.Node]], loops: list[nodes.For]) -> bool:
        """Follow every assignment once; True where that taught a name's kind."""
        before = len(self._kinds)
        for name, value in assignments:
            kind = self._kind(value)
            if kind is not _Kind.OTHER:
                self._kinds.setdefault(name, kind)
        for loop in loops:
            if isinstance(loop.target, nodes.Name) and self._kind(loop.iter) is _Kind.MESSAGES:
                self._kinds.setdefault(loop.target.name, _Kind.MESSAGE)
        return len(self._kinds) > before

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


def _assignments(found: list[nodes.Node]) -> Iterator[tuple[str, nodes.Node]]:
    """Names and what they are set to, parameters of macros too."""
    macros = {node.name: node for node in found if isinstance(node, nodes.Macro)}
    for node in found:
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            yield node.target.name, node.node
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name in macros:
            for parameter, value in zip(macros[node.node.name].args, node.args, strict=False):
                yield parameter.name, value
            for keyword in node.kwargs:
                yield keyword.key, keyword.value
