"""Patterns inside of JSON strings in a form that costs little in each step.

A grammar is right-linear where every rule ends with at most one other rule: each is left only at the end of the whole
pattern, where a lookahead says what may follow. A pattern with a loop over many characters is written so: a step takes
0.1 ms then. Written as a loop, xgrammar tries thousands of tokens in each step: 100 ms of 128,000 tokens.
"""

from __future__ import annotations

from raylm.grammar.ebnf import Alt, Chars, Expr, Repeat, Rule, Rules, Seq, alt, may_be_empty, parts_of, seq

_MANY_CHARS = 128
_MOST_COPIES = 64


def has_wide_loop(expr: Expr) -> bool:
    """True where it repeats a class of many characters without end."""
    if isinstance(expr, Repeat):
        return (expr.high is None and _is_wide(expr.part)) or has_wide_loop(expr.part)
    return any(has_wide_loop(part) for part in parts_of(expr))


def _is_wide(expr: Expr) -> bool:
    if isinstance(expr, Chars):
        return sum(high - low + 1 for low, high in expr.chars.ranges) > _MANY_CHARS
    return any(_is_wide(part) for part in parts_of(expr))


class Linear:
    """Writes one pattern so. `name` begins the names of its rules, `lookahead` stands behind each."""

    def __init__(self, rules: Rules, name: str, lookahead: str) -> None:
        self._rules = rules
        self._name = name
        self._lookahead = lookahead
        self._count = 0

    def write(self, expr: Expr, end: Expr) -> Expr | None:
        """The expression, then `end`; None where it cannot be written so."""
        if not _is_linear(expr):
            return None
        return self._then(expr, self._rule(end))

    def _rule(self, expr: Expr) -> Rule:
        self._count += 1
        return self._rules.add(f"{self._name}-{self._count}", expr, self._lookahead)

    def _then(self, expr: Expr, rest: Rule) -> Expr:
        if isinstance(expr, Seq):
            for part in reversed(expr.parts[1:]):
                rest = self._rule(self._then(part, rest))
            return self._then(expr.parts[0], rest)
        if isinstance(expr, Alt):
            return alt(self._then(option, rest) for option in expr.options)
        if not isinstance(expr, Repeat):
            return seq(expr, rest)
        if expr.high is None:
            loop = self._rule(rest)
            self._rules.add(loop.name, alt([self._then(expr.part, loop), rest]), self._lookahead)
            rest = loop
        else:
            for _ in range(expr.high - expr.low):
                rest = self._rule(alt([self._then(expr.part, rest), rest]))
        for _ in range(expr.low):
            rest = self._rule(self._then(expr.part, rest))
        return rest


def _is_linear(expr: Expr) -> bool:
    if isinstance(expr, Rule):
        return False
    if isinstance(expr, Repeat):
        copies = expr.low if expr.high is None else expr.high
        return copies <= _MOST_COPIES and not may_be_empty(expr.part) and _is_linear(expr.part)
    return all(_is_linear(part) for part in parts_of(expr))
