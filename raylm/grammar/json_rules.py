"""The rules that every grammar of JSON shares.

xgrammar works out a mask for each state of each rule when it compiles, and looks at single tokens in every step where a
rule may end inside of a token. So what occurs often is one rule, strings are written as a recursion, and what follows
them is said as a lookahead: without it a step took 20 ms (128,000 tokens), with it 0.03 ms.
"""

from __future__ import annotations

from raylm.grammar.ebnf import SPACE, Expr, Rule, Rules, Text, seq
from raylm.grammar.numbers import Bounds, integer, number

STRING = Rule("string")
STRING_END = Rule("string-rest")
"""The rest of any string, and its closing quote."""
INTEGER = Rule("integer")
NUMBER = Rule("number")

_PLAIN = r"[\u0020-\u0021\u0023-\u005b\u005d-\ud7ff\ue000-\U0010ffff]"
_HEX = "[0-9A-Fa-f]"
# Half surrogates only in pairs: alone they are no text.
_ESCAPE = (
    rf'[\u0022\u002f\u005cbfnrt] | "u" ([0-9A-CE-Fa-ce-f] {_HEX} {_HEX} {_HEX} | [Dd] [0-7] {_HEX} {_HEX}'
    rf' | [Dd] [89ABab] {_HEX} {_HEX} "\\u" [Dd] [C-Fc-f] {_HEX} {_HEX})'
)
PYTHON_ESCAPE = r"[\u0022\u002f\u005cbfnrt]"
"""Escapes that JSON and Python share: Python takes a pair of half surrogates for two characters."""
FOLLOWS = r'(=((" " | "\n" [ \t]*)? [,}\]:]))'
"""What follows a string: a lookahead, which xgrammar only uses to rule tokens out early."""
QUOTE_FOLLOWS = FOLLOWS.replace("(=(", r'(=("\"" (', 1).replace("]))", "])))", 1)
_EXACT_CHARS = 20
"""Up to this length every number of characters left is a rule of its own, which takes 30 to 40 ms to compile. Longer
strings count: compiled at once, but a mask near their end takes up to 100 ms."""
MAX_MIN_CHARS = 32


def _then(rule: str) -> str:
    """Any one character of a string, and then this rule."""
    return rf'{_PLAIN} {rule} | "\\" escape {rule}'


def sized_string(rules: Rules, low: int, high: int | None) -> Expr:
    """A string of low..high characters; low is at most MAX_MIN_CHARS."""
    if high is not None and high > _EXACT_CHARS:
        name = f"chars-{high}-{low}"
        content = _open_end(rules, low)
        rules.define(name, content, content, attribute=f"[max_chars={high}]")
        return seq(Text('"'), Rule(name), Text('"'))
    return seq(Text('"'), _counted(rules, low, high))


def _counted(rules: Rules, low: int, high: int | None) -> Rule:
    """The rest of a string and its quote: low..high characters more."""
    if low == 0 and high is None:
        return STRING_END
    name = f"rest-{low}-{'' if high is None else high}"
    if name not in rules:
        options = ['"\\""'] if low == 0 else []
        mentioned = ["escape"]
        if high != 0:
            more = _counted(rules, max(0, low - 1), None if high is None else high - 1).name
            options.append(_then(more))
            mentioned.append(more)
        rules.define(name, f"({' | '.join(options)}) {FOLLOWS}", *mentioned)
    return Rule(name)


def _open_end(rules: Rules, low: int) -> str:
    """A rule for at least `low` characters, without the closing quote."""
    name = f"open-{low}"
    if name not in rules:
        more = name if low == 0 else _open_end(rules, low - 1)
        empty = '"" | ' if low == 0 else ""
        rules.define(name, f"({empty}{_then(more)}) {QUOTE_FOLLOWS}", more, "escape")
    return name


def define_json(rules: Rules, *, escape: str = _ESCAPE) -> None:
    """Add the shared rules; those that are not used are left out of the text. `escape` is what may follow a backslash
    in a string."""
    rules.define(SPACE.name, r'(" " | "\n" [ \t]*)?')
    rules.define("escape", escape)
    rest = STRING_END.name
    rules.define(rest, f'("\\"" | {_then(rest)}) {FOLLOWS}', rest, "escape")
    rules.define(STRING.name, rf'"\"" {rest}', rest)
    rules.add(INTEGER.name, integer(Bounds()))
    rules.add(NUMBER.name, number(Bounds()))


def plain_number(kind: str) -> Expr:
    """Any integer or number."""
    return INTEGER if kind == "integer" else NUMBER
