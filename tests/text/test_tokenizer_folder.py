"""Tokenizers of model folders: what stands beside tokenizer.json counts as it does for transformers."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers, processors
from transformers import AutoTokenizer

from raylm.core.sampling import SamplingParams
from raylm.errors import ConfigError, RequestRejected
from raylm.model_files.source import ModelSource
from raylm.text.processor import TextProcessor
from tests.text import tiny_tokenizers

END = tiny_tokenizers.byte_level().token_to_id("<|end|>")
THINK = END + 1


def write(folder: Path, **files: object) -> ModelSource:
    """A model folder: tiny tokenizer.json, config.json, and `files` (name without .json -> content)."""
    folder.mkdir(exist_ok=True)
    tiny_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    for name, content in {"config": {"model_type": "llama", "eos_token_id": 7}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return ModelSource(folder, "folder")


def test_specials_and_template_come_from_the_folder(tmp_path):
    config = {
        "bos_token": {"content": "<|end|>", "lstrip": False},
        "eos_token": "<|end|>",
        "pad_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    processor = TextProcessor.load(write(tmp_path, tokenizer_config=config))
    info = processor.tokenizer.info
    assert info.special_tokens == {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    assert info.bos_token_id == END
    assert info.eos_token_ids == (7, END)
    assert processor.chat([{"role": "user", "content": "the"}]) == [END, *processor.encode("the")]


def test_generation_config_names_the_ends_of_an_answer(tmp_path):
    source = write(
        tmp_path, generation_config={"eos_token_id": [9, 8]}, tokenizer_config={"eos_token": {"content": "<|end|>"}}
    )
    assert TextProcessor.load(source).tokenizer.eos_token_ids == (9, 8, END)


@pytest.mark.parametrize("opens", [True, False])
def test_tokenizer_json_says_what_goes_around_a_prompt(tmp_path, opens):
    source = write(tmp_path, tokenizer_config={"bos_token": "<|end|>", "add_bos_token": not opens})
    if opens:
        backend = tiny_tokenizers.byte_level()
        backend.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", END)])
        backend.save(str(tmp_path / "tokenizer.json"))
    processor = TextProcessor.load(source)
    assert processor.encode("the") == AutoTokenizer.from_pretrained(str(tmp_path))("the")["input_ids"]
    assert (processor.encode("the")[0] == END) == opens
    assert processor.tokenizer.encode("the", add_special_tokens=False)[0] != END


def test_a_named_special_token_becomes_special_though_tokenizer_json_forgot_it(tmp_path):
    source = write(tmp_path, special_tokens_map={"eos_token": "<think 思>"})
    processor = TextProcessor.load(source)
    stream = processor.stream(SamplingParams())
    assert stream.push([*processor.encode("the"), THINK], "length").text == "the"
    assert processor.decode([THINK]) == ""


def test_a_template_file_goes_before_tokenizer_config(tmp_path):
    source = write(tmp_path, tokenizer_config={"chat_template": "old"})
    assert TextProcessor.load(source).tokenizer.info.chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert TextProcessor.load(source).tokenizer.info.chat_template == "new"


def test_the_default_of_several_named_templates_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    source = write(tmp_path, tokenizer_config={"chat_template": named})
    assert TextProcessor.load(source).tokenizer.info.chat_template == "plain"


def test_a_model_without_template_takes_prompts_only(tmp_path):
    processor = TextProcessor.load(write(tmp_path))
    with pytest.raises(RequestRejected, match="has no chat template"):
        processor.chat([{"role": "user", "content": "x"}])
    assert processor.encode("the")


def test_a_prompt_is_never_cut_or_filled_up(tmp_path):
    source = write(tmp_path)
    backend = tiny_tokenizers.byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(TextProcessor.load(source).encode("abcdef")) == 6


def test_a_folder_without_tokenizer_json_is_converted_once(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    source = write(folder, tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    (folder / "tokenizer.json").unlink()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "th", "the", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    first = TextProcessor.load(source, cache_dir=tmp_path / "cache")
    assert first.encode("the<|endoftext|>") == [vocab["the"], vocab["<|endoftext|>"]]
    assert first.tokenizer.eos_token_ids == (7, vocab["<|endoftext|>"])
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)  # a second conversion would fail
    second = TextProcessor.load(source, cache_dir=tmp_path / "cache")
    assert second.tokenizer.info == first.tokenizer.info
    assert second.encode("the cat") == first.encode("the cat")


def test_a_folder_without_any_tokenizer_is_refused(tmp_path):
    source = write(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, tokenizer\.model, tekken\.json or vocab\.json"):
        TextProcessor.load(source)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(tmp_path, name):
    source = write(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read"):
        TextProcessor.load(source)


def without_tokenizer_json(folder: Path, **files: object) -> ModelSource:
    source = write(folder, **files)
    (folder / "tokenizer.json").unlink()
    return source


def test_a_sentencepiece_model_is_converted(tmp_path):
    pytest.importorskip("sentencepiece")
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    source = without_tokenizer_json(tmp_path, tokenizer_config=config)
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    words = ["\u2581t", "he", "\u2581the", *"\u2581acehimt"]
    pieces += [(word, -float(rank), 1) for rank, word in enumerate(words)]
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model(pieces))
    processor = TextProcessor.load(source, cache_dir=tmp_path / "cache")
    ids = processor.encode("the cat é")
    assert ids == AutoTokenizer.from_pretrained(str(tmp_path))("the cat é")["input_ids"]
    assert processor.token_names(ids)[:2] == ["\u2581the", "\u2581"]
    assert processor.token_names(ids)[-2:] == ["<0xC3>", "<0xA9>"]
    assert processor.decode(ids) == "the cat é"


def test_what_a_tokenizer_model_needs_is_named(tmp_path, monkeypatch):
    source = without_tokenizer_json(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"any")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tokenizer\.model needs the package sentencepiece: pip install"):
        TextProcessor.load(source, cache_dir=tmp_path / "cache")


def test_a_tiktoken_file_is_converted(tmp_path):
    pytest.importorskip("tiktoken")
    source = without_tokenizer_json(tmp_path, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"})
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the"]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (tmp_path / "tiktoken.model").write_bytes(b"".join(lines))
    processor = TextProcessor.load(source, cache_dir=tmp_path / "cache")
    assert processor.encode("the the") == [257, 258]
    assert processor.decode([257, 258, *"é".encode()]) == "the theé"


def tekken(**changes: object) -> dict[str, object]:
    """Mistral's tokenizer file: ten special tokens, then bytes and three longer tokens."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the"]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    special = [{"rank": rank, "token_str": text, "is_control": True}
               for rank, text in enumerate(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])]  # fmt: skip
    config = {"pattern": r" ?\p{L}+|\s+|.", "default_vocab_size": 10 + len(tokens), "default_num_special_tokens": 10}
    return {"config": config, "vocab": vocab, "special_tokens": special, **changes}


def test_mistral_s_tekken_file_is_converted(tmp_path):
    source = without_tokenizer_json(tmp_path, tekken=tekken(), chat_template={"chat_template": "[INST]{{ messages }}"})
    processor = TextProcessor.load(source, cache_dir=tmp_path / "cache")
    assert processor.encode("the the[/INST]") == [1, 10 + 257, 10 + 258, 4]
    assert processor.decode([1, 10 + 257, *(10 + byte for byte in "é".encode()), 2]) == "theé"
    info = processor.tokenizer.info
    assert (info.bos_token_id, info.eos_token_ids) == (1, (7, 2))
    assert info.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert info.chat_template == "[INST]{{ messages }}"


@pytest.mark.parametrize("changes", [{"vocab": [{}]}, {"config": {}}, {"special_tokens": [{"rank": 5}]}, {"vocab": 1}])
def test_a_damaged_tekken_file_is_named(tmp_path, changes):
    source = without_tokenizer_json(tmp_path, tekken=tekken(**changes))
    with pytest.raises(ConfigError, match=r"tekken\.json: transformers cannot read this tokenizer: \w+Error"):
        TextProcessor.load(source, cache_dir=tmp_path / "cache")
