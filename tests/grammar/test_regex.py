"""Regular expressions, choices, grammars and tags: what their grammars allow matches."""

from __future__ import annotations

import json
import random
import re

import pytest

from raylm.core.structure import StructuredOutput
from raylm.errors import RequestRejected
from raylm.grammar.charset import CharSet
from raylm.grammar.fault import Fault
from raylm.grammar.numbers import Bounds, integer, number
from raylm.grammar.translate import translate
from tests.grammar.schemas import PATTERNS
from tests.grammar.walks import compiled, texts


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_whole_answer_matches(pattern: str) -> None:
    found = texts(compiled(StructuredOutput("regex", pattern or "x?")), 20)
    assert found
    for text in found:
        assert re.fullmatch(pattern or "x?", text.decode()) is not None


def test_a_named_group_may_be_written_as_in_ecmascript() -> None:
    for text in texts(compiled(StructuredOutput("regex", "(?<year>[12][0-9]{3})-x")), 20):
        assert re.fullmatch(b"[12][0-9]{3}-x", text)


def test_a_choice_is_exactly_one_of_its_strings() -> None:
    choices = ["ja", "nein", "ja nein", 'q"uote', "日本"]
    found = texts(compiled(StructuredOutput("choice", json.dumps(choices))), 200)
    assert {text.decode() for text in found} == set(choices)


@pytest.mark.parametrize(
    ("value", "reason"),
    [("{", "not valid JSON"), ("[]", "at least one"), ('["a", ""]', "position 1"), ("5", "at least one")],
)
def test_a_choice_must_be_a_list_of_strings(value: str, reason: str) -> None:
    with pytest.raises(Fault, match=reason):
        translate(StructuredOutput("choice", value))


def test_a_grammar_goes_through_as_it_is() -> None:
    grammar = StructuredOutput("grammar", 'root ::= "a" [0-9]{2} "b"?')
    assert translate(grammar) == grammar
    for text in texts(compiled(grammar), 50):
        assert re.fullmatch(b"a[0-9]{2}b?", text)


TAG = {"begin": "<f>", "schema": {"type": "object", "required": ["z"]}, "end": "</f>"}
NEW_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": TAG["schema"]}, "end": "</f>"}],
        "at_least_one": True,
        "stop_after_first": True,
    },
}


def test_a_tag_holds_its_schema_and_leaves_the_rest_free() -> None:
    for text in texts(compiled(StructuredOutput("structural_tag", json.dumps(NEW_TAG))), 50):
        inside = re.fullmatch(b"<f>(.*)</f>", text, re.DOTALL)
        assert inside is not None
        assert "z" in json.loads(inside[1])


def test_the_older_form_of_a_tag_is_the_newer_one() -> None:
    old = {"structures": [TAG], "triggers": ["<f"]}
    made = json.loads(translate(StructuredOutput("structural_tag", json.dumps(old))).value)
    assert made["format"]["tags"][0]["content"]["type"] == "grammar"
    assert compiled(StructuredOutput("structural_tag", json.dumps(old)))


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ([], "must be a JSON object"),
        ({"type": "x"}, 'type "structural_tag"'),
        ({"structures": 5}, "structures must be a list"),
        ({"structures": [{"begin": "a"}]}, "begin, schema and end"),
        ({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}, "#/format: #: "),
        ({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}, "style": "glm_xml"}}, "style"),
        ({"type": "structural_tag", "format": {"type": "regex", "pattern": "(?=a)"}}, "lookahead"),
        (
            {"type": "structural_tag", "format": {"type": "qwen_xml_parameter", "json_schema": {"type": "object"}}},
            "#/format: a json_schema with the type 'qwen_xml_parameter' is not supported",
        ),
    ],
)
def test_a_tag_that_cannot_be_kept_to_is_refused(tag: object, reason: str) -> None:
    with pytest.raises(Fault, match=re.escape(reason)):
        translate(StructuredOutput("structural_tag", json.dumps(tag)))


def test_integers_between_bounds_are_all_of_them() -> None:
    from decimal import Decimal

    rng = random.Random(4)
    for _ in range(60):
        low = rng.randint(-300, 300)
        high = low + rng.randint(0, 260)
        found = set(_language(integer(Bounds(Decimal(low), Decimal(high)))))
        assert found == {str(value) for value in range(low, high + 1)}


def test_numbers_between_bounds_keep_to_them() -> None:
    from decimal import Decimal

    rng = random.Random(5)
    for _ in range(80):
        low = Decimal(rng.randint(-3000, 3000)) / Decimal(10 ** rng.randint(0, 3))
        high = low + Decimal(rng.randint(1, 3000)) / 1000
        bounds = Bounds(low, high, rng.random() < 0.5, rng.random() < 0.5)
        pattern = re.compile(_as_regex(number(bounds)))
        for _ in range(200):
            value = float(low) + (rng.random() * 1.4 - 0.2) * float(high - low)
            text = f"{value:.{rng.randint(0, 5)}f}"
            exact = Decimal(text)
            inside = (low < exact if bounds.low_open else low <= exact) and (
                exact < high if bounds.high_open else exact <= high
            )
            assert (pattern.fullmatch(text) is not None) <= inside, (text, bounds)
            if low < exact < high and not (bounds.low_open or bounds.high_open) and exact:
                assert pattern.fullmatch(text), (text, bounds)


def _as_regex(expr: object) -> str:
    from raylm.grammar.ebnf import Alt, Chars, Repeat, Seq, Text

    if isinstance(expr, Text):
        return re.escape(expr.value)
    if isinstance(expr, Chars):
        return "[" + "".join(f"{re.escape(chr(a))}-{re.escape(chr(b))}" for a, b in expr.chars.ranges) + "]"
    if isinstance(expr, Seq):
        return "".join(map(_as_regex, expr.parts))
    if isinstance(expr, Alt):
        return "(?:" + "|".join(map(_as_regex, expr.options)) + ")"
    assert isinstance(expr, Repeat)
    return f"(?:{_as_regex(expr.part)}){{{expr.low},{'' if expr.high is None else expr.high}}}"


def _language(expr: object) -> list[str]:
    """All texts of an expression without loops."""
    from raylm.grammar.ebnf import Alt, Chars, Repeat, Seq, Text

    if isinstance(expr, Text):
        return [expr.value]
    if isinstance(expr, Chars):
        return list(expr.chars.chars())
    if isinstance(expr, Alt):
        return [text for option in expr.options for text in _language(option)]
    if isinstance(expr, Repeat):
        assert expr.high is not None
        counts = range(expr.low, expr.high + 1)
        return [text for count in counts for text in _language(Seq((expr.part,) * count))]
    assert isinstance(expr, Seq)
    found = [""]
    for part in expr.parts:
        found = [text + more for text in found for more in _language(part)]
    return found


def test_sets_of_characters() -> None:
    letters, vowels = CharSet.of([(97, 122)]), CharSet.text("aeiou")
    assert (letters - vowels).ranges[0] == (98, 100)
    assert "e" not in letters - vowels
    assert (letters - vowels) | vowels == letters
    assert letters.inverse().inverse() == letters
    assert not letters & CharSet.text("A")


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (lambda: StructuredOutput("xml", "a"), "structure.kind"),
        (lambda: StructuredOutput("regex", ""), "structure.value"),
        (lambda: StructuredOutput("regex", 5), "structure.value"),  # type: ignore[arg-type]
        (lambda: StructuredOutput("json_object", "a"), "structure.value"),
        (lambda: StructuredOutput("regex", "a" * (2 << 20)), "structure.value"),
        (lambda: StructuredOutput("regex", "\ud800"), "structure.value"),
        (lambda: StructuredOutput("regex", "a", (-1,)), "structure.begin_after"),
        (lambda: StructuredOutput("regex", "a", (True,)), "structure.begin_after"),
        (lambda: StructuredOutput("regex", "a", tuple(range(100))), "structure.begin_after"),
    ],
)
def test_a_structure_is_checked_when_it_is_made(made: object, field: str) -> None:
    with pytest.raises(RequestRejected, match=field):
        made()  # type: ignore[operator]
