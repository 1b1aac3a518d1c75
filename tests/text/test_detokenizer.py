"""Text of a running answer equals the text of all its tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from raylm.errors import ConfigError
from raylm.text.detokenizer import Detokenizer, GluingDetokenizer
from raylm.text.token_table import TokenTable
from tests.text import tiny_tokenizers

BYTE_LEVEL = tiny_tokenizers.byte_level()
SENTENCEPIECE = tiny_tokenizers.sentencepiece()
quick = settings(max_examples=150, deadline=None)


def pieces(backend: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(TokenTable(backend), **options)
    return [detokenizer.push(token) for token in ids] + [detokenizer.finish()]


@quick
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=40))
def test_byte_level_equals_decoding_at_once_for_any_tokens(ids):
    assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@quick
@given(st.data())
def test_smollm_equals_decoding_at_once_for_any_tokens(smollm, data):
    tokenizer = smollm.tokenizer
    # The first 300 ids hold the specials and the single bytes, which make broken characters.
    ids = data.draw(st.lists(st.one_of(st.integers(0, 300), st.integers(0, tokenizer.vocab_size + 9)), max_size=40))
    detokenizer = Detokenizer(tokenizer.table)
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.finish()
    assert text == tokenizer.decode(ids)


@quick
@given(text=st.text(max_size=60))
def test_any_text_comes_back_and_no_character_comes_out_broken(text):
    parts = pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids)
    assert "".join(parts) == text.replace("<|end|>", "")
    assert parts[-1] == ""
    assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")


@quick
@given(text=st.text(max_size=60))
def test_smollm_equals_decoding_at_once_for_any_text(smollm, text):
    # (Not the text itself: SmolLM2's vocabulary lacks some bytes that its training never saw.)
    ids = smollm.tokenizer.encode(text)
    detokenizer = Detokenizer(smollm.tokenizer.table)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == smollm.tokenizer.decode(ids)


@quick
@given(st.text(max_size=40))
def test_sentencepiece_equals_decoding_at_once_for_any_text(text):
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(SENTENCEPIECE, ids)) == SENTENCEPIECE.decode(ids)


def test_a_character_waits_for_its_last_byte():
    ids = BYTE_LEVEL.encode("é🤖!").ids
    assert pieces(BYTE_LEVEL, ids) == ["", "é", "", "", "", "🤖", "!", ""]


def test_a_character_cut_off_at_the_end_is_replaced_then():
    ids = BYTE_LEVEL.encode("a🤖").ids[:-1]
    assert pieces(BYTE_LEVEL, ids) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_are_skipped_and_plain_added_tokens_are_not():
    ids = BYTE_LEVEL.encode("the<|end|>the<think 思>").ids
    assert pieces(BYTE_LEVEL, ids) == ["the", "", "the", "<think 思>", ""]


def test_the_space_before_a_sentencepiece_text_is_dropped_once():
    ids = SENTENCEPIECE.encode("  hello", add_special_tokens=True).ids
    assert "".join(pieces(SENTENCEPIECE, ids)) == "  hello"
    assert "".join(pieces(SENTENCEPIECE, [1, *ids])) == "  hello"  # <s> is no text


def test_an_answer_that_continues_a_prompt_keeps_its_first_space():
    ids = SENTENCEPIECE.encode("hello").ids
    assert "".join(pieces(SENTENCEPIECE, ids, keep_space=True)) == " hello"
    assert "".join(pieces(SENTENCEPIECE, ids)) == "hello"


def test_bytes_of_sentencepiece_wait_for_the_whole_character():
    ids = SENTENCEPIECE.encode("a日b").ids
    assert [piece for piece in pieces(SENTENCEPIECE, ids) if piece] == ["a", "日", "b"]


def test_a_tokenizer_without_a_decoder_joins_by_spaces():
    backend = Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    assert "".join(pieces(backend, [0, 1, 2])) == backend.decode([0, 1, 2]) == "one two ?"


@pytest.mark.parametrize("scheme", ["always", "never"])
def test_metaspace_equals_decoding_at_once(scheme):
    backend = Tokenizer(models.WordLevel({"\u2581one": 0, "two": 1, "\u2581": 2}, unk_token="two"))
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    for ids in ([0, 1, 0], [1, 0], [2, 0, 2], [2, 1]):
        assert "".join(pieces(backend, ids)) == backend.decode(ids)


def test_a_decoder_that_looks_beyond_a_token_is_refused():
    backend = tiny_tokenizers.byte_level()
    backend.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match=r"decoder .*CTC.* is not supported; supported: ByteLevel"):
        TokenTable(backend)


def test_special_tokens_are_text_where_the_table_says_so():
    backend = BYTE_LEVEL
    end = backend.token_to_id("<|end|>")
    table = TokenTable(backend, skip_special_tokens=False)
    assert table[end] == b"<|end|>" and TokenTable(backend)[end] == b""


def test_the_space_between_two_added_tokens_may_be_dropped():
    backend = Tokenizer(models.WordLevel({"the": 0, "cat": 1}))
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<t>", special=True)])
    table = TokenTable(backend, skip_special_tokens=False)
    added = {2: b"<s>", 3: b"<t>"}
    ids = [2, 3, 0, 2, 1, 3, 2]
    spaced, glued = Detokenizer(table), GluingDetokenizer(table, added)
    assert "".join(map(spaced.push, ids)) == "<s> <t> the <s> cat <t> <s>"
    assert "".join(map(glued.push, ids)) == "<s><t> the <s> cat <t><s>"
    skipping = GluingDetokenizer(TokenTable(backend), added)
    assert "".join(map(skipping.push, ids)) == "the cat"
