"""What makes a chat template count what it does: its syntax tree with counting steps, and filters that count."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from raylm.text.budget import Budget, Counted, TooMuch

Filter = Callable[..., Any]

_EACH, _BUILT, _CONCAT = "~each", "~built", "~concat"
"""Filters that only `meter` writes into a tree."""
_PASSING = frozenset(
    {
        *("attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr"),
        *("reverse", "select", "selectattr"),
    }
)
"""Filters that give on what they get, or go through it once: what is inside of it does not count again."""
_LISTING = frozenset({"batch", "groupby", "list", "map", "max", "min", "reject", "select", "slice", "sort", "unique"})
"""Filters that make items of a text's characters."""
_SLOW = frozenset({"pprint", "striptags", "title", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"})
_SIEVES = frozenset({"reject", "rejectattr", "select", "selectattr"})
"""Filters that look at more items than they give on."""
_MAX_SLOW_CHARS = 65_536
_MAX_COUNT = 10_000
"""Of what a filter's number asks for: a width, the length of a batch."""
_MAX_NUMBER_CHARS = 4_300
_MAX_DIGITS = 300
_MAX_INDENT = 32
_NUMBERS = frozenset({"batch", "center", "indent", "pprint", "slice", "truncate", "urlize", "wordwrap"})


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with the budget of one run."""

    budget: Budget


def meter(tree: nodes.Template) -> nodes.Template:
    """The tree with counting steps in it."""
    is_escaping = tree.find(nodes.ScopedEvalContextModifier) is not None
    metered: nodes.Template = _Meter(is_escaping).visit(tree)
    return metered


class _Meter(NodeTransformer):
    """Loops count their turns; lists, slices and joined texts count when they are made, and so does printed text.

    (Operators, calls and printed values come to the environment by themselves.)
    """

    def __init__(self, is_escaping: bool) -> None:
        self._is_escaping = is_escaping

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through(_EACH, node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self._as_value(child) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(_CONCAT, nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._built(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._built(node, [value for pair in node.items for value in (pair.key, pair.value)])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._built(node, node.items) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through(_BUILT, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        return self._with_counted_arguments(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        return self._with_counted_arguments(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return self._with_counted_arguments(node)

    def _with_counted_arguments(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _through(_EACH, node.dyn_args)
        return node

    def _built(self, node: nodes.Expr, items: Sequence[nodes.Node]) -> nodes.Node:
        if all(isinstance(item, nodes.Const) for item in items):
            return node
        self.generic_visit(node)
        return _through(_BUILT, node)

    def _as_value(self, child: nodes.Expr) -> nodes.Expr:
        """The template's own text as a value, which is counted wherever it is printed to."""
        if not isinstance(child, nodes.TemplateData):
            return child
        text = nodes.Const(child.data, lineno=child.lineno)
        return nodes.MarkSafeIfAutoescape(text, lineno=child.lineno) if self._is_escaping else text


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def printed(context: Context, value: object) -> object:
    """Counts what is printed. That it takes a context keeps jinja2 from printing constants while it compiles."""
    _budget(context).spend_on(value)
    return value


@pass_context
def each(context: Context, items: Iterable[object]) -> Counted:
    return Counted(_budget(context), items)


@pass_context
def _built(context: Context, value: object) -> object:
    _budget(context).spend_on(value)
    return value


@pass_context
def _concat(context: Context, values: list[object]) -> str:
    _budget(context).spend_on(values)
    return "".join(map(str, values))


def metered_filters(filters: Mapping[str, Filter]) -> dict[str, Filter]:
    """Filters that count, in place of jinja2's own. (That all take a context keeps jinja2 from running them while it
    compiles a template.)"""
    ours: dict[str, Filter] = {"tojson": _tojson, "sum": _sum}
    ours |= {"join": _join(filters["join"]), "map": _map(filters["map"])}
    found = {name: _metered(name, filters[name]) for name in filters if name not in ours}
    return {**found, **ours, _EACH: each, _BUILT: _built, _CONCAT: _concat}


def _metered(name: str, run: Filter) -> Filter:
    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        given = (*args, *kwargs.values())
        _check_arguments(name, value, given)
        budget.spend(_size_before(budget, name, value, given))
        if isinstance(value, Iterator) or name in _SIEVES:
            value = Counted(budget, value)
        result = run(*_first(run, context), value, *args, **kwargs)
        if name in ("batch", "groupby", "slice"):
            result = list(Counted(budget, result))
            budget.spend_on(result)
        elif isinstance(result, str):
            budget.spend(len(result))
        return result

    return counted


def _first(run: Filter, context: Context) -> tuple[Any, ...]:
    """What one of jinja2's filters wants before its value."""
    wanted = getattr(getattr(run, "jinja_pass_arg", None), "name", None)
    return {
        None: (),
        "context": (context,),
        "eval_context": (context.eval_ctx,),
        "environment": (context.environment,),
    }[wanted]


def _check_arguments(name: str, value: object, given: tuple[object, ...]) -> None:
    """Refuse numbers that are sizes, and texts that a filter reads slowly."""
    numbers = [abs(number) for number in given if isinstance(number, int)]
    most = _MAX_DIGITS if name == "round" else _MAX_COUNT
    if (name in _NUMBERS or name == "round") and max(numbers, default=0) > most:
        raise TooMuch(f"gives {max(numbers)} to the filter {name}, at most {most} is allowed")
    limit = {"int": _MAX_NUMBER_CHARS, "float": _MAX_NUMBER_CHARS}.get(name, _MAX_SLOW_CHARS)
    if (name in _SLOW or name in ("int", "float")) and isinstance(value, str) and len(value) > limit:
        raise TooMuch(f"gives {len(value)} characters to the filter {name}, at most {limit} are allowed")


def _size_before(budget: Budget, name: str, value: Any, given: tuple[Any, ...]) -> int:
    """What a filter is about to make, at most about."""
    if name in _PASSING and not isinstance(value, str):
        return 16 * len(value) if isinstance(value, list | tuple | dict) else 0
    size = budget.size(value) * (16 if isinstance(value, str) and name in _LISTING else 1)
    if name in _SLOW and size > _MAX_SLOW_CHARS:
        raise TooMuch(f"gives {size} characters to the filter {name}, at most {_MAX_SLOW_CHARS} are allowed")
    if name == "format":
        # `value % given`
        text = str(value)
        widest = max((budget.size(one) for one in given), default=0)
        numbers = max((abs(one) for one in given if isinstance(one, int)), default=0) if "*" in text else 0
        return len(text) + text.count("%") * (widest + numbers) + _numbers_in(text)
    if name == "replace" and len(given) > 1:
        return size + str(value).count(str(given[0])) * budget.size(given[1])
    if name == "indent":
        width = max((len(one) if isinstance(one, str) else int(one) for one in given[:1]), default=4)
        return size + (str(value).count("\n") + 1) * width
    return size


def _numbers_in(pattern: str) -> int:
    digits = "".join(char if char.isdigit() else " " for char in pattern)
    return sum(int(number[:12]) for number in digits.split())


def _join(run: Filter) -> Filter:
    @pass_context
    def joined(context: Context, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
        budget = _budget(context)
        items = list(Counted(budget, value))
        if attribute is not None:
            items = list(map(make_attrgetter(context.environment, attribute), items))
        budget.spend(budget.size(items) + len(items) * budget.size(d))
        return run(context.eval_ctx, items, d)

    return joined


@pass_context
def _sum(context: Context, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    items: Iterable[Any] = Counted(_budget(context), iterable)
    if attribute is not None:
        items = map(make_attrgetter(context.environment, attribute), items)
    for item in items:
        start = _environment(context).call_binop(context, "+", start, item)
    return start


def _map(run: Filter) -> Filter:
    @pass_context
    def mapped(context: Context, value: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        budget = _budget(context)
        for item in run(context, Counted(budget, value), *args, **kwargs):
            # Items that are taken from elsewhere may be one and the same again and again.
            budget.spend_on(item)
            yield item

    return mapped


@pass_context
def _tojson(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter escapes for HTML, which no model was trained on."""
    budget = _budget(context)
    budget.spend_on(value)
    if max((len(separator) for separator in separators or ()), default=0) > _MAX_INDENT:
        raise TooMuch(f"gives the filter tojson separators of more than {_MAX_INDENT} characters")
    if indent is None:
        text = json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
        budget.spend(len(text))
        return text
    if (indent > _MAX_INDENT) if isinstance(indent, int) else (len(indent) > _MAX_INDENT):
        raise TooMuch(f"gives the filter tojson an indent of more than {_MAX_INDENT}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces = []
    for piece in encoder.iterencode(value):
        budget.spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _environment(context: Context) -> MeteredEnvironment:
    environment = context.environment
    assert isinstance(environment, MeteredEnvironment), "templates are compiled for the sandbox alone"
    return environment


def _budget(context: Context) -> Budget:
    return _environment(context).budget
