"""Numbers between bounds: what a bound costs, and that an exclusive one is kept to by floats."""

from __future__ import annotations

import json

import pytest

from raylm.core.structure import StructuredOutput
from raylm.grammar.translate import translate
from tests.grammar.walks import compiled, takes, texts

SAFE = 2**53 - 1
BOUNDED = [
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": 0.01, "maximum": 99999.99},
    {"type": "number", "minimum": -180, "maximum": 180},
    {"type": "integer", "exclusiveMinimum": 0},
    {"type": "integer", "minimum": -SAFE, "maximum": SAFE},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
]


def grammar(schema: object) -> str:
    return translate(StructuredOutput("json_schema", json.dumps(schema))).value


@pytest.mark.parametrize("schema", BOUNDED, ids=json.dumps)
def test_a_bounded_number_is_one_short_rule(schema: dict[str, object]) -> None:
    """Each is most of a schema's numbers in some generator: a positive float, an integer that JavaScript can hold."""
    assert len(grammar(schema)) < 1000
    two, fifty = ({"properties": {f"p{i}": schema for i in range(count)}} for count in (2, 50))
    plain = {"properties": {f"p{i}": {"type": "integer"} for i in range(50)}}
    assert grammar(two).count("[0-9]") == grammar(schema).count("[0-9]")
    assert len(grammar(fifty)) < len(grammar(plain)) + 1000


def test_a_positive_float_is_under_500_bytes() -> None:
    assert len(grammar({"type": "number", "exclusiveMinimum": 0})) < 500


@pytest.mark.parametrize("bound", [0, 1, -1, 0.1, 1e-30, 1e15, 2.0**53, 123456789012345, -1e17, 1e30])
@pytest.mark.parametrize("name", ["exclusiveMinimum", "exclusiveMaximum"])
def test_an_exclusive_bound_is_kept_to_by_floats(name: str, bound: float) -> None:
    """What lies nearer than a float tells apart would be read as the bound itself."""
    sign = 1 if name == "exclusiveMinimum" else -1
    beside = {"minimum": bound, "maximum": bound + abs(bound) + 1} if sign > 0 else {"maximum": bound}
    found = texts(compiled(StructuredOutput("json_schema", json.dumps({"type": "number", name: bound, **beside}))), 60)
    assert found
    for text in found:
        assert (float(text) - bound) * sign > 0, text


def test_small_positive_numbers_and_symmetric_ranges_are_allowed() -> None:

    for schema, allowed, refused in [
        (BOUNDED[0], ["0.5", "0.0000001", "3", "17.25"], ["0", "0.0", "-1", "00.5"]),
        (BOUNDED[3], ["180", "-180", "180.0", "-0.5", "179.99"], ["180.01", "-180.5", "181"]),
        (BOUNDED[5], ["0", str(SAFE), str(-SAFE), "-7"], [str(SAFE + 1), str(-SAFE - 1), "-0"]),
    ]:
        made = compiled(StructuredOutput("json_schema", json.dumps(schema)))
        for text in allowed + refused:
            assert takes(made, text, whole=True) == (text in allowed), text
