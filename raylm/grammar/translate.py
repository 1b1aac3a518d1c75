"""Every kind of structured output as one of the two that engines take: a grammar, or a structural tag of grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from raylm.core.structure import MAX_STRUCTURE_BYTES, StructuredOutput
from raylm.grammar.calls import calls_grammar
from raylm.grammar.ebnf import EMPTY, Expr, Rules, Text, alt
from raylm.grammar.fault import Fault
from raylm.grammar.json_reader import read_json
from raylm.grammar.linear import Linear, has_wide_loop
from raylm.grammar.regex import regex
from raylm.grammar.schema import object_grammar, schema_grammar
from raylm.grammar.special import NO_SPECIAL_TOKENS, SpecialTokens

MAX_CHOICES = 10_000
_MAX_TAG_DEPTH = 32
_SCHEMA_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "style": ("json",),
    "any_order": (False,),
    "max_whitespace_cnt": (None,),
    "excludes": ([],),
}
"""Fields of a tag's JSON schema beside the schema, and their values that ask for nothing."""


def translate(structure: StructuredOutput, special: SpecialTokens = NO_SPECIAL_TOKENS) -> StructuredOutput:
    """The same as a grammar or a structural tag. Raises Fault."""
    kind, value = structure.kind, structure.value
    if kind == "tool_calls":
        return _ready(*calls_grammar(_with_answer(value), special), structure)
    if kind == "structural_tag":
        return _ready("structural_tag", _structural_tag(value), structure)
    makers: dict[str, Callable[[str], str]] = {
        "json_schema": schema_grammar,
        "regex": regex_grammar,
        "choice": choice_grammar,
        "grammar": str,
    }
    text = object_grammar() if kind == "json_object" else makers[kind](value)
    return _ready("grammar", text, structure)


def _with_answer(value: str) -> str:
    """A form of calls whose answer, if there is one, is a grammar or a structural tag."""
    form = _json(value)
    answer = form.get("answer") if isinstance(form, dict) else None
    if not isinstance(form, dict) or not isinstance(answer, list):
        return value
    kind, text = answer
    found = translate(StructuredOutput(str(kind), str(text)))
    return json.dumps({**form, "answer": [found.kind, found.value]})


def _ready(kind: str, text: str, structure: StructuredOutput) -> StructuredOutput:
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_STRUCTURE_BYTES:
        raise Fault(f"its grammar has {size} bytes, at most {MAX_STRUCTURE_BYTES} are allowed")
    return StructuredOutput(kind, text, structure.begin_after)


def regex_grammar(pattern: str) -> str:
    """The grammar of the texts that a regex matches as a whole."""
    rules = Rules()
    expr = regex(pattern, in_json=False)
    linear: Expr | None = None
    if has_wide_loop(expr):
        linear = Linear(rules, "r", "").write(expr, EMPTY)
    return rules.text(expr if linear is None else linear)


def choice_grammar(value: str) -> str:
    """The grammar of some strings, given as a JSON list."""
    choices = _json(value)
    if not isinstance(choices, list) or not choices:
        raise Fault("a choice must be a list of at least one string")
    if len(choices) > MAX_CHOICES:
        raise Fault(f"a choice has {len(choices)} strings, at most {MAX_CHOICES} are allowed")
    for index, text in enumerate(choices):
        if not isinstance(text, str) or not text:
            raise Fault("a choice must hold non-empty strings", f"position {index}")
    return Rules().text(alt(Text(text) for text in choices))


def _structural_tag(value: str) -> str:
    tag = _json(value)
    if not isinstance(tag, dict):
        raise Fault("a structural tag must be a JSON object")
    if "structures" in tag:
        tag = _from_legacy(tag)
    if tag.get("type") != "structural_tag" or "format" not in tag:
        raise Fault('a structural tag must have type "structural_tag" and a format')
    return json.dumps(_translated(tag, "#", 0), ensure_ascii=False)


def _from_legacy(tag: Mapping[str, object]) -> dict[str, object]:
    """The older form: {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}."""
    structures = tag["structures"]
    if not isinstance(structures, list):
        raise Fault("structures must be a list", "#/structures")
    tags = []
    for index, one in enumerate(structures):
        if not isinstance(one, dict) or not {"begin", "end"} <= one.keys():
            raise Fault("a structure must be an object with begin, schema and end", f"#/structures/{index}")
        content = {"type": "json_schema", "json_schema": one.get("schema", one.get("json_schema", True))}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    form = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    return {"type": "structural_tag", "format": form}


def _translated(value: object, place: str, depth: int) -> object:
    """With a grammar instead of each JSON schema and regex: see raylm.grammar.schema for why."""
    if depth > _MAX_TAG_DEPTH:
        raise Fault(f"the structural tag nests deeper than {_MAX_TAG_DEPTH} levels", place)
    if isinstance(value, list):
        return [_translated(one, f"{place}/{index}", depth + 1) for index, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "json_schema":
        for name, neutral in _SCHEMA_OPTIONS.items():
            if name in value and value[name] not in neutral:
                raise Fault(f"{name} is not supported", place)
        return {"type": "grammar", "grammar": _part(schema_grammar, json.dumps(value.get("json_schema")), place)}
    if "json_schema" in value:
        # xgrammar's own converters of schemas, such as qwen_xml_parameter's, pass over keywords that they do not know.
        raise Fault(f"a json_schema with the type {value.get('type')!r:.100} is not supported", place)
    if value.get("type") == "regex":
        return {"type": "grammar", "grammar": _part(regex_grammar, str(value.get("pattern", "")), place)}
    return {name: _translated(one, f"{place}/{name}", depth + 1) for name, one in value.items()}


def _part(make: Callable[[str], str], text: str, place: str) -> str:
    try:
        return make(text)
    except Fault as fault:
        raise Fault(str(fault), place) from None


def _json(text: str) -> object:
    return read_json(text, "it")
