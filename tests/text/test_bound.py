"""A text's length says how many tokens it has at least, where the tokenizer keeps all of a text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from raylm.text.bound import length_bound
from raylm.text.definition import TokenizerInfo
from raylm.text.processor import TextProcessor
from raylm.text.token_table import byte_alphabet
from raylm.text.tokenizer import Tokenizer, TooManyTokens
from tests.text.tiny_tokenizers import byte_level, sentencepiece

INFO = TokenizerInfo({}, None, (), None)


def composing() -> Backend:
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return backend


def without_some_bytes() -> Backend:
    alphabet = [char for char, byte in byte_alphabet().items() if byte not in (0x04, 0x41, 0xC3, 0xE6, 0xF0)]
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def digits() -> Backend:
    backend = byte_level()
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return backend


KEEPING = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "composing": composing,
    "digits": digits,
    "bytes": without_some_bytes,
}
TEXTS = st.one_of(
    st.text(max_size=60),
    # Characters that compose, of three code points and more.
    st.text(
        st.sampled_from("eA\x04\u0301\u0323\u0302\u1100\u1161\u11a8\u03b1\u0313\u0342\u0345\u212a\ufb03 "), max_size=60
    ),
    st.lists(st.sampled_from(["the", "<|end|>", "<think 思>", " ", "a"]), max_size=20).map("".join),
)


@pytest.mark.parametrize("name", KEEPING)
@settings(deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_its_length_says(name: str, text: str) -> None:
    backend = KEEPING[name]()
    bound = length_bound(backend)
    assert bound is not None
    assert bound.least_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)


@given(text=TEXTS.map(lambda text: text * 90))
@settings(deadline=None, max_examples=50)
def test_the_bound_refuses_nothing_of_the_demo_model_that_fits(smollm: TextProcessor, text: str) -> None:
    ids = smollm.encode(text)
    assert smollm.encode(text, max_tokens=len(ids)) == ids


DROPPING = {
    "strip": lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
    "accents": lambda backend: setattr(backend, "normalizer", normalizers.StripAccents()),
    "bert": lambda backend: setattr(backend, "normalizer", normalizers.BertNormalizer()),
    "replaced runs": lambda backend: setattr(backend, "normalizer", normalizers.Replace(Regex(" +"), " ")),
    "replaced": lambda backend: setattr(backend, "normalizer", normalizers.Replace("aa", "b")),
    "in a sequence": lambda backend: setattr(backend, "normalizer", normalizers.Sequence([normalizers.Nmt()])),
    "spaces": lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
    "removed": lambda backend: setattr(
        backend,
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]),
    ),
    "a token that takes spaces": lambda backend: backend.add_special_tokens([AddedToken("<mask>", lstrip=True)]),
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_tokenizer_that_drops_text_has_no_bound(name: str) -> None:
    backend = byte_level()
    DROPPING[name](backend)
    assert length_bound(backend) is None


def test_a_tokenizer_that_drops_what_it_does_not_know_has_no_bound() -> None:
    backend = sentencepiece()
    backend.model.byte_fallback = False
    assert length_bound(backend) is None


@pytest.mark.parametrize(
    "text", ["a b " * 3000, "naïve 日本 😀\n\n" * 900, " " * 9000, "<|im_end|>\n" * 900, "7" * 9000]
)
@pytest.mark.parametrize("special", [False, True])
def test_long_texts_have_the_tokens_that_encode_gives(smollm: TextProcessor, text: str, special: bool) -> None:
    backend = smollm.tokenizer._backend
    assert smollm.encode(text, add_special_tokens=special) == backend.encode(text, add_special_tokens=special).ids


def test_a_text_too_long_by_its_length_is_not_tokenised(smollm: TextProcessor) -> None:
    with pytest.raises(TooManyTokens) as caught:
        smollm.encode(" " * 1_000_000, max_tokens=1000)
    assert caught.value.least == -(-1_000_000 // 81)


def test_characters_that_the_demo_model_drops_do_not_count(smollm: TextProcessor) -> None:
    assert smollm.encode("\x04" * 500_000 + "hi", max_tokens=10) == smollm.encode("hi")


def test_where_length_says_nothing_a_beginning_does() -> None:
    backend = byte_level()
    backend.normalizer = normalizers.Strip()
    tokenizer = Tokenizer(backend, INFO)
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode("x" * 100_000, max_tokens=1000)
    assert caught.value.least == 3000
    spaces = " " * 100_000
    assert tokenizer.encode(spaces + "x" * 999, max_tokens=1000) == tokenizer.encode("x" * 999)
