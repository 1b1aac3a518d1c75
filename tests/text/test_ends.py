"""Stop strings inside an engine end a text where the text's own stream does."""

from __future__ import annotations

import random

import pytest

from raylm.core.sampling import SamplingParams
from raylm.model_files.source import ModelSource
from raylm.text.ends import text_ends
from raylm.text.processor import TextProcessor
from tests.support import checkpoints


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    checkpoints.write_tokenizer(folder)
    return TextProcessor.load(ModelSource(folder, "folder"))


def stops_at(text, params, tokens):
    """The token with which the stream of the answer ends; None where none does."""
    stream = text.stream(params, continues_prompt=True)
    return next((count for count, token in enumerate(tokens, 1) if stream.push([token], None).finish_reason), None)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize(
    "stop", [("é",), ("hel", "lo h"), ("he hello",), ("aaa",), ("<|end|>", "zz"), ("x" * 40,), ("é" * 9 + "a",)]
)
def test_a_text_ends_with_the_token_that_its_stream_ends_with(text, stop, skips):
    params = SamplingParams(stop=stop, skip_special_tokens=skips)
    ends = text_ends(text, params)
    draw = random.Random(str((stop, skips)))
    pieces = [*text.encode("é hello aax ", add_special_tokens=False), *text.encode("<|end|>", add_special_tokens=False)]
    pieces += [token for piece in stop for token in text.encode(piece, add_special_tokens=False)]
    found = set()
    for _ in range(200):
        tokens = draw.choices(pieces, k=30)
        if draw.random() < 0.5:
            start = draw.randrange(30)
            tokens[start:start] = text.encode(draw.choice(stop), add_special_tokens=False)
        last = stops_at(text, params, tokens)
        found.add(last is None)
        before = range(1, (len(tokens) if last is None else last - 1) + 1)
        assert not any(ends(tokens[:count]) for count in before)
        assert last is None or ends(tokens[:last])
    assert False in found, "the test is meant to end texts"


def test_what_is_looked_at_does_not_grow_with_the_text(text, monkeypatch):
    pushed = []
    stream = text.stream
    monkeypatch.setattr(text, "stream", lambda *args, **options: Counting(stream(*args, **options), pushed))
    ends = text_ends(text, SamplingParams(stop=("hello there",)))
    tokens = text.encode("one two three " * 100, add_special_tokens=False)
    assert not ends(tokens)
    assert pushed[0] < 30


def test_a_candidate_costs_no_check_of_its_request(text, monkeypatch):
    params = SamplingParams(stop=("x",), stop_token_ids=(1, 2), beam_width=2)
    ends = text_ends(text, params)
    made = []
    monkeypatch.setattr(SamplingParams, "__post_init__", made.append)
    tokens = text.encode("one two x", add_special_tokens=False)
    assert ends(tokens) and not ends(tokens[:-1])
    assert made == []


class Counting:
    def __init__(self, stream, pushed):
        self._stream, self._pushed = stream, pushed

    @property
    def stopped(self):
        return self._stream.stopped

    def push(self, token_ids, finish_reason):
        self._pushed.append(len(token_ids))
        return self._stream.push(token_ids, finish_reason)
