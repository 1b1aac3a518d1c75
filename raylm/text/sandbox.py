"""Chat templates are programs of somebody else's: here they run without a way out and within limits.

jinja2's own sandbox keeps them from Python's internals. What it leaves open is closed here: a loop, a call, an operator
and a filter each count on the run's Budget, attributes are those of a list, and nothing is computed while a template is
compiled.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import SandboxedFormatter
from jinja2.utils import Cycler, Namespace

from raylm.text.budget import Budget, Counted, Limits, TooMuch
from raylm.text.metering import Filter, MeteredEnvironment, meter, metered_filters, printed
from raylm.text.template_reading import TemplateReading

_MAX_INT_BITS = 65_536
_MAX_PATTERN_CHARS = 256
_DIGITS = re.compile(r"\d+")
_STRING_METHODS = frozenset(
    {
        *("capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "index", "isalnum"),
        *("isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable"),
        *("isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix"),
        *("removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split"),
        *("splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill"),
    }
)
_LOOP_ATTRIBUTES = frozenset(
    {
        *("index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem", "depth"),
        *("depth0", "cycle", "changed"),
    }
)
_ATTRIBUTES: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, _STRING_METHODS),
    (Mapping, frozenset({"copy", "get", "items", "keys", "values"})),
    ((list, tuple), frozenset({"copy", "count", "index"})),
    ((int, float), frozenset({"bit_length", "is_integer", "real", "imag"})),
    (LoopContext, _LOOP_ATTRIBUTES),
    (Macro, frozenset({"name", "arguments", "catch_kwargs", "catch_varargs", "caller"})),
    (Cycler, frozenset({"next", "current", "reset"})),
)
"""What templates may reach of a value; of a namespace, whatever they have set."""


class Sandbox:
    """One template, compiled. Safe to share between threads."""

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateSyntaxError, or anything that a compiler may."""
        self._environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        tree = self._environment.parse(source)
        self.reading = TemplateReading(tree)
        self._code: CodeType = self._environment.compile(meter(tree))
        self._idle: list[_Runner] = []
        """Runs that have ended leave these for others; there are as many as ran at once."""

    def run(self, variables: Mapping[str, object], limits: Limits) -> str:
        """The template's text. `variables` are made of JSON's types. Raises TooMuch, or anything that a program may."""
        runner = self._idle.pop() if self._idle else _Runner(self._environment, self._code)
        try:
            return runner.run(dict(variables), limits)
        finally:
            self._idle.append(runner)


class _Runner:
    """The template for one run at a time: with an environment of its own, which has the run's budget."""

    def __init__(self, environment: _Environment, code: CodeType) -> None:
        self._environment = copy.copy(environment)
        self._template = jinja2.Template.from_code(self._environment, code, self._environment.globals)

    def run(self, variables: dict[str, object], limits: Limits) -> str:
        self._environment.budget = Budget(limits, variables.values())
        try:
            return self._text(variables, limits)
        finally:
            del self._environment.budget

    def _text(self, variables: dict[str, object], limits: Limits) -> str:
        pieces = []
        room = limits.chars
        for piece in self._template.root_render_func(self._template.new_context(variables)):
            room -= len(piece)
            if room < 0:
                raise TooMuch(f"writes more than {limits.chars} characters")
            pieces.append(piece)
        return "".join(pieces)


class _Environment(MeteredEnvironment):
    """jinja2's sandbox, with a budget: each run has a copy of it, and a budget of its own."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=printed, **options)
        self.filters: dict[str, Filter] = metered_filters(FILTERS)
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_new_dict, namespace=_new_namespace
        )

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        if attr.startswith("_"):
            return False
        if isinstance(obj, Namespace):
            return True
        return any(attr in names for kind, names in _ATTRIBUTES if isinstance(obj, kind))

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        text = getattr(value, "__self__", None)
        if type(text) is not str or getattr(value, "__name__", None) not in ("format", "format_map"):
            return None
        formatter, by_map = _Formatter(self), getattr(value, "__name__", None) == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            return formatter.vformat(text, () if by_map else args, args[0] if by_map else kwargs)

        return formatted

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = self.budget
        budget.spend()
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str):
            args = _string_arguments(budget, owner, getattr(called, "__name__", ""), args, kwargs)
        elif isinstance(called, LoopContext) and args:
            args = (Counted(budget, args[0]), *args[1:])
        elif isinstance(called, Macro):
            # Beyond its parameters they come together as a tuple and a dictionary.
            budget.spend_on([args[len(called.arguments) :], kwargs])
        result = super().call(context, called, *args, **kwargs)
        if isinstance(result, str | list | tuple | dict):
            budget.spend_on(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            # By far the most frequent one.
            self.budget.spend(len(left) + len(right))
            return left + right
        self.budget.spend(_size_of_result(self.budget, operator, left, right))
        return super().call_binop(context, operator, left, right)


class _Formatter(SandboxedFormatter):
    """str.format, each field of which counts."""

    def __init__(self, environment: _Environment) -> None:
        super().__init__(environment)
        self._budget = environment.budget

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._budget.spend_on(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._budget.spend_on(value)
        self._budget.spend(_widths(format_spec))
        text = super().format_field(value, format_spec)
        self._budget.spend_on(text)
        return text


def _widths(pattern: str) -> int:
    """All numbers of a pattern together: none of its fields gets wider."""
    return sum(int(digits[:12]) for digits in _DIGITS.findall(pattern))


def _size_of_result(budget: Budget, operator: str, left: Any, right: Any) -> int:
    """How large an operator's result becomes, at most about."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(operator, left, right)
        return 0
    if operator == "+":
        return budget.size(left) + budget.size(right)
    if operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int):
                return budget.size(value) * max(times, 0)
    if operator == "%" and isinstance(left, str):
        return _percent_size(budget, left, right)
    return 0


def _check_bits(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() + right.bit_length() if operator == "*" else 0
    if operator == "**" and right > 0:
        bits = left.bit_length() * right
    if bits > _MAX_INT_BITS:
        raise TooMuch(f"makes a number of {bits} bits, at most {_MAX_INT_BITS} are allowed")


def _percent_size(budget: Budget, pattern: str, values: object) -> int:
    given: Sequence[object] = values if isinstance(values, tuple) else [values]
    if isinstance(values, Mapping):
        given = list(values.values())
    widest = max((budget.size(value) for value in given), default=0)
    if "*" in pattern:
        # A width may be one of the values.
        widest += max((abs(value) for value in given if isinstance(value, int)), default=0)
    return len(pattern) + _widths(pattern) + pattern.count("%") * widest


def _string_arguments(
    budget: Budget, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Count what a string's method is about to make; its arguments, of which an iterable may have become a list."""
    size = len(text)
    given = (*args, *kwargs.values())
    if name in ("center", "ljust", "rjust", "zfill"):
        size += max((value for value in given if isinstance(value, int)), default=0)
    elif name == "expandtabs":
        size += text.count("\t") * max((value for value in given if isinstance(value, int)), default=8)
    elif name == "replace" and all(isinstance(value, str) for value in given[:2]) and len(given) > 1:
        size += text.count(given[0]) * len(given[1])
    elif name == "join" and args:
        items = list(Counted(budget, args[0]))
        size = budget.size(items) + size * len(items)
        args = (items,)
    budget.spend(size)
    return args


class _Namespace(Namespace):
    """No name of Python's internals can be set on it."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no attribute {name!r}")
        super().__setitem__(name, value)


def _new_namespace(*args: Any, **kwargs: Any) -> Namespace:
    made = _Namespace()
    for name, value in dict(*args, **kwargs).items():
        made[name] = value
    return made


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise TooMuch(f"asks for a date of {len(pattern)} characters, at most {_MAX_PATTERN_CHARS} are allowed")
    return datetime.now().strftime(pattern)


class _Generation(jinja2.ext.Extension):
    """{% generation %}: marks an answer's text for training; a prompt takes it as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)
