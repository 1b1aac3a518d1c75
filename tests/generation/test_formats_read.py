"""Every format: what its family's template prints is read back, wherever the stream is cut; what is malformed stays."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.generation.parsing import ModelFormat
from raylm.generation.parsing.formats import CALL_FORMATS, REASONING_FORMATS, THINK, CallFormat
from raylm.generation.pieces import CallArguments, CallBegin, Text
from tests.generation.formats import CALLS, CALLS_ALONE, TEMPLATES, calls_of, read, rendered, written

FORMS = {form.name: form for form in CALL_FORMATS}


@pytest.mark.parametrize("content", ["", "Let me look.", "First line.\n\nSecond:  "])
@pytest.mark.parametrize("name", FORMS)
def test_what_the_family_prints_is_read_back(name, content):
    content = "" if name in CALLS_ALONE else content
    calls = CALLS[:1] if name == "llama3_json" else CALLS
    pieces = read(ModelFormat(FORMS[name]), list(rendered(name, content, calls)))
    assert calls_of(pieces) == list(calls)
    text = content.rstrip() if FORMS[name].strips_text else content
    assert [piece for piece in pieces if isinstance(piece, Text)] == ([Text(text)] if text else [])


@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.name)
def test_what_its_data_says_is_read_back(form):
    pieces = read(ModelFormat(form), list(written(form, CALLS)))
    assert calls_of(pieces) == list(CALLS)
    assert all(isinstance(piece, CallBegin | CallArguments) for piece in pieces)


def test_every_format_has_a_template():
    assert set(TEMPLATES) == set(FORMS)


# What stands between the marks of all formats.
_BETWEEN = (
    '{"name": ', '"f"', '"arguments": ', ", ", "{", "}", "[", "]", "(", ")", "k=", "f(k='", '"', "\\", "'", "<", " ",
    "\n", "<think>", "functions.f:0", "</think>", "[ARGS]", "[CALL_ID]", "function<｜tool▁sep｜>", "call:f{",
    "k:<escape>",
)  # fmt: skip
_HARMONY_HEADER = re.compile(
    r"<\|(start|channel)\|>((?!<\|(message|start|end|call|return)\|>).)*<\|message\|>", re.DOTALL
)


def _words_of(form: CallFormat) -> list[str]:
    """Texts that a fuzzed output is made of."""
    marks = [*form.opens, *form.closes, *form.noise, *form.section, form.call_end, form.separator, form.bare]
    if (tags := form.tags) is not None:
        marks += [tags.name_begin, tags.name_end, tags.key_begin, tags.key_end, tags.value_begin, tags.value_end]
    return [text for text in [*marks, form.before_name, form.after_name, *_BETWEEN] if text]


def _outputs(form: CallFormat) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from([*_words_of(form), *["word"] * 4]), max_size=25)


@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.name)
@settings(max_examples=60)
@given(data=st.data())
def test_any_text_is_read_alike_wherever_it_is_cut_and_none_is_lost(form, data):
    numbered = enumerate(data.draw(_outputs(form)))
    words = [f"word{number}." if text == "word" else text for number, text in numbered]
    text = "".join(words)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    model = ModelFormat(form, THINK)
    in_reasoning = data.draw(st.booleans())
    whole = read(model, [text], in_reasoning=in_reasoning)
    assert read(model, parts, in_reasoning=in_reasoning) == whole
    assert read(model, list(text), in_reasoning=in_reasoning) == whole
    said = "".join(f"{piece.id}{piece.name}" if isinstance(piece, CallBegin) else piece.text for piece in whole)
    if form.name == "harmony":
        text = _HARMONY_HEADER.sub("", text)
    assert [word for word in re.findall(r"word\d+\.", text) if word not in said] == []


@settings(max_examples=300)
@given(form=st.sampled_from(CALL_FORMATS), reasoning=st.sampled_from([None, *REASONING_FORMATS]), text=st.text())
def test_any_text_at_all(form, reasoning, text):
    read(ModelFormat(form, reasoning), list(text))
    assert read(ModelFormat(), list(text)) == ([Text(text)] if text else [])
