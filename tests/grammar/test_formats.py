"""String formats: values that real texts hold can be written, and all that is generated is valid."""

from __future__ import annotations

import json
import re

import pytest
from jsonschema import Draft202012Validator

from raylm.core.structure import StructuredOutput
from raylm.grammar import binding
from raylm.grammar.fault import Fault
from raylm.grammar.translate import translate
from tests.grammar.schemas import Schema
from tests.grammar.walks import END, TOKENS, compiled, texts

WRITABLE: dict[str, list[str]] = {
    "date": ["2000-02-29", "1996-02-29", "0476-09-04", "0001-01-01", "9999-12-31"],
    "date-time": ["2000-02-29T23:59:59Z", "0800-12-25T00:00:00.5+01:00"],
    "duration": ["PT86400S", "P1Y2M10DT2H30M", "PT1H30S", "P3W"],
    "email": ["o'brien@x.com", "a.b+c@d-e.f", "{x}/y=z@xn--kln-sna.de"],
    "ipv6": [
        *("::", "::1", "fe80::1", "2001:db8::ff00:42:8329", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8"),
        *("::ffff:192.0.2.1", "1:2:3:4:5:6::8"),
    ],
    "uri": [
        *("https://de.wikipedia.org/wiki/K%C3%B6ln", "http://a.b?b=c%20d", "mailto:a@b.c", "urn:isbn:0451450523"),
        *(
            "http://localhost:27017/x;y=1/#top",
            "postgres://me:p%40@db/name",
            "file:///etc/hosts",
            "http://xn--kln-sna.de/",
        ),
    ],
}
NOT_WRITABLE: dict[str, list[str]] = {
    "date": ["1900-02-29", "2023-02-29", "0000-01-01", "2023-04-31"],
    "duration": ["P", "PT", "P1", "PT0.5S"],
    "email": ["a..b@c", ".a@b", "a@b-", "a b@c"],
    "ipv6": ["1:2:3:4:5:6:7", "1::2::3", "1:2:3:4:5:6:7:8::", "1::2:3:4:5:6:7:8", ":1:2:3:4:5:6:7", "12345::"],
    "uri": ["a", ":a", "a:", "a:?b", "http://a/%2", "http://a b", "x://a:b", "x://a@b@c", "http://a:70000"],
}


def grammar_of(schema: Schema) -> binding.Compiled:
    return compiled(StructuredOutput("json_schema", json.dumps(schema)))


def is_written(grammar: binding.Compiled, value: str) -> bool:
    matcher = binding.matcher(grammar, [END])
    text = json.dumps(value).encode()
    return all(matcher.accept_token(TOKENS.index(bytes([byte])), False) for byte in text) and matcher.accept_token(
        END, False
    )


@pytest.mark.parametrize("name", WRITABLE)
def test_values_of_real_texts_can_be_written(name: str) -> None:
    grammar = grammar_of({"type": "string", "format": name})
    assert [value for value in WRITABLE[name] if not is_written(grammar, value)] == []
    assert [value for value in NOT_WRITABLE.get(name, []) if is_written(grammar, value)] == []


DAY = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-"
    r"(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))"
)
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD = [
    ("email", EMAIL),
    (
        "email",
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    ),
    (
        "uuid",
        r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
        r"|00000000-0000-0000-0000-000000000000)$",
    ),
    (
        "uuid",
        r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
        r"|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$",
    ),
    ("uuid", r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$"),
    ("uuid", r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})$"),
    ("date", rf"{DAY}$"),
    ("date-time", rf"{DAY}T(?:(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z))$"),
    ("date-time", rf"{DAY}T(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z))$"),
    ("date-time", rf"{DAY}T(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d\.\d{{3}}(?:Z))$"),
    ("date-time", rf"{DAY}T(?:(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z|([+-]\d{{2}}:\d{{2}})))$"),
    (
        "date-time",
        rf"{DAY}T(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z|([+-](?:[01]\d|2[0-3]):[0-5]\d)))$",
    ),
    (
        "duration",
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
    ),
    (
        "ipv4",
        r"^(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\.){3}"
        r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])$",
    ),
    (
        "ipv6",
        r"^(([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,7}:|([0-9a-fA-F]{1,4}:){1,6}:[0-9a-fA-F]{1,4}"
        r"|([0-9a-fA-F]{1,4}:){1,5}(:[0-9a-fA-F]{1,4}){1,2}|([0-9a-fA-F]{1,4}:){1,4}(:[0-9a-fA-F]{1,4}){1,3}"
        r"|([0-9a-fA-F]{1,4}:){1,3}(:[0-9a-fA-F]{1,4}){1,4}|([0-9a-fA-F]{1,4}:){1,2}(:[0-9a-fA-F]{1,4}){1,5}"
        r"|[0-9a-fA-F]{1,4}:((:[0-9a-fA-F]{1,4}){1,6})|:((:[0-9a-fA-F]{1,4}){1,7}|:))$",
    ),
]
"""Formats and the patterns beside them that zod 4.0 to 4.6 write."""


@pytest.mark.parametrize(("name", "pattern"), ZOD, ids=lambda value: value[:20])
def test_a_format_goes_with_zods_pattern_of_it(name: str, pattern: str) -> None:
    schema = {"type": "string", "format": name, "pattern": pattern}
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    found = texts(grammar_of(schema), 60)
    assert len(found) > 20
    for text in found:
        validator.validate(json.loads(text))


def test_a_pattern_of_another_format_is_refused() -> None:
    with pytest.raises(Fault, match="together with format"):
        translate(StructuredOutput("json_schema", json.dumps({"format": "hostname", "pattern": EMAIL})))


@pytest.mark.parametrize(
    "schema",
    [
        {"format": "uri", "minLength": 1, "maxLength": 2083},
        {"format": "uri", "maxLength": 30},
        {"format": "email", "maxLength": 20},
        {"format": "email", "minLength": 3, "maxLength": 254},
        {"format": "hostname", "minLength": 1, "maxLength": 10},
        {"format": "email", "pattern": EMAIL, "minLength": 5, "maxLength": 100},
        {"format": "ipv6", "maxLength": 45},
    ],
    ids=str,
)
def test_formats_keep_to_limits_of_their_length(schema: Schema) -> None:
    """The limit holds, every text can be ended within it, and the text is one of the format without a limit."""
    whole = grammar_of({key: value for key, value in schema.items() if not key.endswith("Length")})
    values = [json.loads(text) for text in texts(grammar_of(schema), 150, limit=2500)]
    assert len(values) == 150
    assert max(map(len, values)) <= schema["maxLength"]
    assert min(map(len, values)) >= schema.get("minLength", 0)
    assert all(is_written(whole, value) and re.search(schema.get("pattern", ""), value) for value in values)


def test_equal_formats_are_compiled_once() -> None:
    def size(count: int) -> int:
        schema = {"properties": {f"p{number}": {"type": "string", "format": "uri"} for number in range(count)}}
        return translate(StructuredOutput("json_schema", json.dumps(schema))).value.count("\n")

    assert size(20) < size(1) * 2
