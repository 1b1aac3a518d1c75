"""Tokenizers converted from GGUF files, compared with transformers' conversion of the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from raylm.errors import ConfigError
from raylm.model_files.source import ModelSource
from raylm.text.chat_options import ChatOptions
from raylm.text.pre_tokenizers import PRE_TOKENIZERS
from raylm.text.tokenizer import Tokenizer
from tests.text import tiny_tokenizers
from tests.text.tiny_tokenizers import CONTROL, NORMAL, USER_DEFINED, write_gguf

TEXTS = [
    "",
    " ",
    "Hello, world! It's John's dog; they'll say WE'RE not DON'T.",
    "naïve café Ångström — “quotes” … 日本語 中文，标点。 한국어 العربية עברית हिन्दी ไทย",
    "🤖🎉👩🏽‍🚀🇩🇪 ❤️ e\u0301 \u200d\ufeff\u00a0\u3000 \U0001f9ff",
    "1234567890 3.14159 1,000,000 2024-01-31 v1.2.3 x2 H2O 0xFF 50% $9.99",
    "a  b   c    d\t\te\n\nf\r\n\r\ng \n h\n \n\n  \n",
    "   leading and trailing   ",
    "def f(x: int) -> int:\n    if x:\n\t\treturn x ** 2  # comment\n    return {'a': [1, 2], \"b\": None}\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|> <|endoftext|>x<|im_start|> <|not_special|><file_sep>",
    "https://example.com/a?b=c&d=%20#e user@example.org C:\\dir\\x.txt",
    "\x01 control ~~~~~~ ====== ------ //////",
]
SPACES_BEFORE_DIGITS = ["½ ² Ⅷ ١٢٣ 五 ①", "list:\n\n1. one\n\n2. two", "a  12   345", "\t\t7", "x =    0;\n\n\n9"]


def load(path: Path, cache: Path) -> Tokenizer:
    return Tokenizer.load(ModelSource(path, "gguf"), cache_dir=cache)


@pytest.fixture(scope="module")
def reference(smollm_source):
    path = smollm_source.path
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def test_smollm_equals_transformers(smollm, reference):
    for text in TEXTS:
        ids = smollm.tokenizer.encode(text)
        assert ids == reference(text)["input_ids"], text
        for skip in (True, False):
            assert smollm.tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), text
    assert smollm.tokenizer.vocab_size == len(reference) == 49152
    assert smollm.tokenizer.eos_token_ids == (reference.eos_token_id,)
    assert smollm.tokenizer.bos_token_id == reference.bos_token_id
    assert smollm.tokenizer.info.special_tokens == reference.special_tokens_map


def test_smollm_chat_equals_transformers(smollm, reference):
    messages = [
        {"role": "user", "content": "Hi  there 🤖"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "2+2?"},
    ]
    for generate in (True, False):
        expected = reference.apply_chat_template(messages, add_generation_prompt=generate)["input_ids"]
        assert smollm.chat(messages, ChatOptions(add_generation_prompt=generate)) == expected


def test_smollm_cuts_digits_off_before_spaces_as_it_was_trained(smollm, reference):
    """transformers' GGUF reader does not know the pre-tokenizer "smollm" and takes GPT-2's; the published tokenizer
    cuts every digit off first, which matters after a run of spaces or line breaks."""
    backend = reference.backend_tokenizer
    taken = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    try:
        for text in TEXTS + SPACES_BEFORE_DIGITS:
            assert smollm.tokenizer.encode(text) == backend.encode(text).ids, text
    finally:
        backend.pre_tokenizer = taken
    assert smollm.tokenizer.encode("\n\n1") == smollm.tokenizer.encode("\n\n") + smollm.tokenizer.encode("1")


def byte_level_values(pre: str) -> dict[str, object]:
    # "中" is written as in a token table, by its bytes' characters.
    merges = [("t", "h"), ("th", "e"), ("1", "2"), ("12", "3"), ("Ġ", "the"), ("Ċ", "Ċ"), ("ä", "¸"), ("ä¸", "Ń")]
    merges += [("e", "Ì"), ("eÌ", "ģ")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *("".join(merge) for merge in merges), "<|endoftext|>", "<|bos|>", "<|end|>", "<think>"]
    types = [NORMAL] * (len(tokens) - 4) + [CONTROL, CONTROL, CONTROL, USER_DEFINED]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": len(tokens) - 3,
        "eos_token_id": len(tokens) - 2,
    }


@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"])
def test_byte_level_equals_transformers(tmp_path, pre):
    path = write_gguf(tmp_path / "m.gguf", "llama", byte_level_values(pre) | {"add_bos_token": True})
    ours, theirs = load(path, tmp_path), AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    texts = [*TEXTS, *SPACES_BEFORE_DIGITS, "a<think>the</think><|end|>b 123456"]
    for text in texts:
        if PRE_TOKENIZERS[pre].nfc and "e\u0301" in text:
            continue  # the published Qwen tokenizers compose characters, transformers' GGUF reader does not
        assert ours.encode(text) == theirs(text)["input_ids"], text
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_glm_cuts_text_like_llama_3(tmp_path):
    """By their published patterns, which are equal; transformers' reader does not know GLM's name."""
    glm, llama = (
        load(write_gguf(tmp_path / f"{pre}.gguf", "llama", byte_level_values(pre)), tmp_path)
        for pre in ("glm4", "llama-bpe")
    )
    for text in (*TEXTS, *SPACES_BEFORE_DIGITS):
        assert glm.encode(text) == llama.encode(text, add_special_tokens=False), text


def test_qwen_text_is_composed(tmp_path):
    tokenizer = load(write_gguf(tmp_path / "m.gguf", "qwen2", byte_level_values("qwen2")), tmp_path)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_llama3_prompts_begin_with_bos_unless_the_file_says_no(tmp_path):
    values = byte_level_values("llama-bpe")
    tokenizer = load(write_gguf(tmp_path / "a.gguf", "llama", values), tmp_path)
    assert tokenizer.encode("the")[0] == tokenizer.bos_token_id
    without = load(write_gguf(tmp_path / "b.gguf", "llama", values | {"add_bos_token": False}), tmp_path)
    assert without.encode("the") == tokenizer.encode("the")[1:]
    framed = load(write_gguf(tmp_path / "c.gguf", "llama", values | {"add_eos_token": True}), tmp_path)
    assert framed.encode("the") == [*tokenizer.encode("the"), tokenizer.eos_token_ids[0]]


def sentencepiece_values() -> dict[str, object]:
    tokens, scores, types = tiny_tokenizers.sentencepiece_pieces()
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


SP_TEXTS = [
    "the cat sat on a mat",
    "naïve 日本 cats and 1 mat",
    "the\n\ncat  sat   on",
    "🤖 the <think>cat",
    "theing <s>the",
]


def test_sentencepiece_equals_transformers(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", sentencepiece_values())
    ours, theirs = load(path, tmp_path), AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    for text in SP_TEXTS[:3]:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ids[0] == 1
        assert ours.decode(ids) == text


def test_sentencepiece_puts_a_space_before_every_text(tmp_path):
    """As SentencePiece and llama.cpp do: also before a text that begins with a space, and after a special token."""
    tokenizer = load(write_gguf(tmp_path / "m.gguf", "llama", sentencepiece_values()), tmp_path)
    the = tokenizer.encode("the", add_special_tokens=False)
    assert len(the) == 1
    assert tokenizer.encode(" the", add_special_tokens=False)[-1:] == the
    assert tokenizer.encode("<s>the", add_special_tokens=False) == [1, *the]
    plain = load(
        write_gguf(tmp_path / "n.gguf", "llama", sentencepiece_values() | {"add_space_prefix": False}), tmp_path
    )
    assert plain.encode(" the", add_special_tokens=False) == the
    assert plain.decode(the) == " the"


def test_the_text_of_a_byte_token_is_not_that_byte(tmp_path):
    tokenizer = load(write_gguf(tmp_path / "m.gguf", "llama", sentencepiece_values()), tmp_path)
    text = "<0x41>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert 3 + 0x41 not in ids
    assert tokenizer.decode(ids) == text


def test_gemma_equals_transformers(tmp_path):
    values = sentencepiece_values()
    tokens, types = list(values["tokens"]), list(values["token_type"])
    for token in ("  ", "   ", "<end_of_turn>"):
        tokens.insert(260, token)
        types.insert(260, CONTROL if token.startswith("<") else USER_DEFINED)
    values |= {"tokens": tokens, "token_type": types, "scores": [0.0] * len(tokens), "add_bos_token": True}
    path = write_gguf(tmp_path / "m.gguf", "gemma2", values)
    ours, theirs = load(path, tmp_path), AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    for text in [*SP_TEXTS, "the cat<end_of_turn>\n", "  the", "a     b"]:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_ids == (2, 260)  # the end of a turn, too, which the file names in no key


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": "rwkv"}, r"tokenizer\.ggml\.model is 'rwkv'; supported: 'gpt2', 'llama'"),
        ({"pre": "viking"}, r"tokenizer\.ggml\.pre 'viking' is not supported; supported: .*qwen2"),
        ({"merges": ["t q"]}, r"tokenizer\.ggml\.merges do not fit the tokens: .*"),
        ({"merges": []}, r"tokenizer\.ggml\.merges is missing"),
        ({"tokens": []}, r"tokenizer\.ggml\.tokens is missing"),
        ({"token_type": [1]}, r"token_type has 1 values for \d+ tokens"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores has 0 values for \d+ tokens"),
    ],
)
def test_a_file_that_cannot_be_converted_is_refused(tmp_path, change, problem):
    values = {key: value for key, value in (byte_level_values("qwen2") | change).items() if value != []}
    path = write_gguf(tmp_path / "m.gguf", "llama", values)
    with pytest.raises(ConfigError, match=problem):
        load(path, tmp_path)


def test_a_file_without_token_types_keeps_its_named_specials(tmp_path):
    values = byte_level_values("gpt-2")
    del values["token_type"]
    tokenizer = load(write_gguf(tmp_path / "m.gguf", "gpt2", values), tmp_path)
    end = tokenizer.eos_token_ids[0]
    assert tokenizer.encode("the<|end|>") == [*tokenizer.encode("the"), end]
    assert tokenizer.decode([end]) == ""


def test_a_special_token_beyond_the_vocabulary_is_taken_as_absent(tmp_path, caplog):
    path = write_gguf(tmp_path / "m.gguf", "llama", byte_level_values("gpt-2") | {"bos_token_id": 2**32 - 1})
    assert load(path, tmp_path).bos_token_id is None
    assert "bos_token_id is 4294967295" in caplog.text
