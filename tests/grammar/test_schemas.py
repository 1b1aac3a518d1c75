"""Whatever a grammar allows, its schema validates; a schema that cannot be kept to is refused with its place."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator

from raylm.core.structure import StructuredOutput
from raylm.grammar.fault import Fault
from raylm.grammar.translate import translate
from tests.grammar.schemas import NUM_VALID, REFUSED, Schema, valid_schemas
from tests.grammar.walks import compiled, takes, texts

WALKS = 12
SCHEMAS = valid_schemas()


def of(schema: Schema) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(schema))


def test_there_are_as_many_schemas_as_are_promised() -> None:
    assert len(SCHEMAS) == NUM_VALID
    assert len({json.dumps(schema) for schema in SCHEMAS}) > NUM_VALID * 0.95
    assert len(REFUSED) >= 50


@pytest.mark.parametrize("number", range(0, NUM_VALID, 20))
def test_what_the_mask_allows_validates(number: int) -> None:
    for schema in SCHEMAS[number : number + 20]:
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        found = texts(compiled(of(schema)), WALKS, seed=number)
        assert found, schema
        for text in found:
            validator.validate(json.loads(text.decode()))


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_a_schema_that_cannot_be_kept_to_is_refused(schema: Schema, reason: str) -> None:
    with pytest.raises(Fault) as caught:
        translate(of(schema))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not be empty"),
        ("{", "not valid JSON"),
        ("{'a': 1}", "not valid JSON"),
        ('{"const": NaN}', "NaN"),
        ('{"const": 1' + "0" * 5000 + "}", "at most 4300"),
        ('{"minItems": 1e1000000000}', "over the limit"),
        ('{"type": "string", "enum": [1e1000000000]}', "none of the values"),
        ("[" * 100_000, "too deep"),
    ],
)
def test_what_is_no_json_is_refused(text: str, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        translate(StructuredOutput("json_schema", text))


def test_properties_beside_the_named_ones_cannot_take_their_names() -> None:
    """A name twice in an object would hide the first value from every parser."""
    schema = {
        "properties": {"a": {"type": "integer"}, "ab": {"type": "integer"}},
        "additionalProperties": {"type": "null"},
        "required": ["a"],
    }
    seen = set()
    for text in texts(compiled(of({"type": "object", **schema})), 300):
        pairs = json.loads(text, object_pairs_hook=list)
        for name, value in pairs:
            seen.add(name in ("a", "ab"))
            assert (value is not None) == (name in ("a", "ab")), text
    assert seen == {True, False}


def test_a_string_has_every_character_that_json_allows() -> None:
    """Nothing is taken from a model: escapes, letters of all languages, pairs of surrogates."""
    grammar = compiled(of({"type": "string"}))
    for text in ('"\\u0041\\"\\\\\\/\\b\\f\\n\\r\\t"', '"日本 ü \x7f"', '"\\ud83d\\ude00"', '"😀"'):
        assert takes(grammar, text), text
    for text in ('"\n"', '"\\ud83d"', '"\\x"', '"\t"'):
        assert not takes(grammar, text), text


def test_any_object_is_an_object() -> None:
    for text in texts(compiled(StructuredOutput("json_object")), 50):
        assert isinstance(json.loads(text), dict)
