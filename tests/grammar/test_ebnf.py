"""Expressions of grammars: which match the empty text, and what follows from it."""

from __future__ import annotations

import pytest

from raylm.grammar.charset import CharSet
from raylm.grammar.ebnf import EMPTY, NEVER, SPACE, Alt, Chars, Repeat, Rule, Rules, Seq, Text, may_be_empty
from raylm.grammar.fault import Fault
from raylm.grammar.linear import Linear

A = Text("a")
DIGIT = Chars(CharSet(((48, 57),)))


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (EMPTY, True),
        (A, False),
        (DIGIT, False),
        (NEVER, False),
        (SPACE, True),
        (Rule("other"), False),
        (Seq(()), True),
        (Seq((SPACE, Repeat(A, 0, 1))), True),
        (Seq((SPACE, A)), False),
        (Alt((A, SPACE)), True),
        (Alt((A, DIGIT)), False),
        (Repeat(A, 0, None), True),
        (Repeat(A, 1, None), False),
        (Repeat(SPACE, 2, 3), True),
    ],
    ids=str,
)
def test_may_be_empty(expr, expected):
    assert may_be_empty(expr) is expected


def test_a_rule_that_begins_with_itself_behind_white_space_is_refused():
    rules = Rules()
    rules.define("ws", "[ ]*")
    rules.add("list", Seq((SPACE, Rule("list"))))
    with pytest.raises(Fault, match="leads back to itself"):
        rules.text(Alt((A, Rule("list"))))


def test_a_rule_that_comes_back_behind_a_character_is_taken():
    rules = Rules()
    rules.define("ws", "[ ]*")
    rules.add("list", Seq((SPACE, A, Repeat(Rule("list"), 0, 1))))
    assert "list ::= ws" in rules.text(Rule("list"))


@pytest.mark.parametrize("part", [SPACE, Repeat(DIGIT, 0, 1), Seq(())], ids=str)
def test_a_loop_over_what_may_be_empty_is_not_written_right_linear(part):
    """It would lead back to itself without a character between."""
    assert Linear(Rules(), "p", "").write(Repeat(part, 0, None), A) is None
    assert Linear(Rules(), "p", "").write(Repeat(DIGIT, 0, None), A) is not None
