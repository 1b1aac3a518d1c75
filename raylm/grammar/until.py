"""Free text up to a mark."""

from __future__ import annotations

from raylm.grammar.charset import ANY, CharSet
from raylm.grammar.ebnf import EMPTY, NEVER, Chars, Expr, Rule, Rules, Token, alt, is_never, seq
from raylm.grammar.special import SpecialTokens


def text_until(rules: Rules, name: str, mark: str, special: SpecialTokens, avoid: tuple[str, ...] = ()) -> Expr:
    """Any text up to and with the first place of `mark`, in which none of `avoid` stands before it. `name` begins the
    names of its rules."""
    first, *others = special.parts(mark)
    if isinstance(first, Token):
        # A token ends it, so the text before it is free.
        rules.add(name, alt([seq(Chars(ANY), Rule(name)), seq(first, *others)]))
        return Rule(name)
    if f"{name}-0" not in rules:
        _add_states(rules, name, first.value, avoid)
    return seq(Rule(f"{name}-0"), *others)


def _add_states(rules: Rules, name: str, end: str, avoid: tuple[str, ...]) -> None:
    """A rule for each beginning of a mark that a text may have come to (Aho and Corasick, 1975)."""
    marks = (end, *avoid)
    begins = sorted({mark[:length] for mark in marks for length in range(len(mark))}, key=lambda one: (len(one), one))
    number = {begin: index for index, begin in enumerate(begins)}
    letters = sorted({letter for mark in marks for letter in mark})
    for begin in begins:
        options = [seq(Chars(ANY - CharSet.text("".join(letters))), Rule(f"{name}-0"))]
        turns: dict[Expr, str] = {}
        for letter in letters:
            said = begin + letter
            if said.endswith(end):
                turns[EMPTY] = turns.get(EMPTY, "") + letter
            elif not any(said.endswith(mark) for mark in avoid):
                longest = next(said[at:] for at in range(len(said) + 1) if said[at:] in number)
                rest = Rule(f"{name}-{number[longest]}")
                turns[rest] = turns.get(rest, "") + letter
        options += [seq(Chars(CharSet.text(chars)), rest) for rest, chars in turns.items()]
        rules.add(f"{name}-{number[begin]}", alt(option for option in options if not is_never(option)) or NEVER)
