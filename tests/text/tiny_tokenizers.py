"""Small tokenizers and GGUF files for tests: built here, so that nothing is downloaded."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
WORDS = ["▁the", "▁cat", "▁sat", "▁on", "▁a", "▁mat", "▁and", "▁naïve", "▁日本", "▁1", "ing", "ed", "er"]


def byte_level() -> Tokenizer:
    """Every byte a token, two merges, one special and one plain added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "th", "the"])}
    backend = Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<think 思>", normalized=False)])
    return backend


def sentencepiece() -> Tokenizer:
    """Characters, with bytes as the last resort and a space before the text, as Llama 2 has it."""
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *bytes_, "\u2581", *"abcdehlot"])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return backend


def sentencepiece_pieces() -> tuple[list[str], list[float], list[int]]:
    """tokens, scores and types of a small SentencePiece vocabulary: specials, bytes, pieces of words, characters."""
    pieces: dict[str, None] = {}
    for word in WORDS:
        for length in range(2, len(word) + 1):
            pieces[word[:length]] = None
    characters = sorted({char for piece in pieces for char in piece})
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "<think>"]
    learned = [piece for piece in sorted(pieces, key=len) if piece not in characters]
    tokens = [*specials, *learned, *characters]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * (len(learned) + len(characters))]
    scores = [0.0] * len(specials) + [-float(rank) for rank in range(len(learned) + len(characters))]
    return tokens, scores, types


def write_gguf(path: Path, architecture: str, values: dict[str, object]) -> Path:
    """A GGUF file with `values` as metadata ("model" means tokenizer.ggml.model) and no tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def sentencepiece_model(pieces: list[tuple[str, float, int]]) -> bytes:
    """A tokenizer.model: SentencePiece's BPE with bytes as the last resort, of pieces (text, score, type), in the wire
    format of its sentencepiece_model.proto."""

    def field(number: int, content: bytes) -> bytes:
        assert len(content) < 128
        return bytes([number << 3 | 2, len(content)]) + content

    def piece(text: str, score: float, kind: int) -> bytes:
        return field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([3 << 3, kind]))

    trainer = field(2, bytes([3 << 3, 2]) + b"\x98\x02\x01")  # model_type 2, byte_fallback (field 35) true
    normalizer = field(3, field(1, b"identity") + bytes([3 << 3, 1]))
    return b"".join(piece(*each) for each in pieces) + trainer + normalizer
