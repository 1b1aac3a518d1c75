"""The tokenizer inside a GGUF file, as a tokenizer of the tokenizers library.

Two kinds: "gpt2" is byte-level BPE with its merges; "llama" is SentencePiece's BPE, whose merges follow from the
tokens' scores, with bytes as the last resort. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from raylm.errors import ConfigError
from raylm.log import get_logger
from raylm.model_files.gguf_header import GGUFValue, read_gguf
from raylm.text.definition import TokenizerInfo, add_specials
from raylm.text.pre_tokenizers import PRE_TOKENIZERS

logger = get_logger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Texts that end a turn; older files do not name them in a key (llama.cpp finds them so, too)."""
Item = TypeVar("Item", str, int, float)
_SPACE = "\u2581"  # how SentencePiece writes a space


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The checked parts of the metadata: tokens[id], types[id] (empty when the file has none), scores[id]."""

    path: Path
    architecture: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]

    def of_type(self, kind: int) -> list[str]:
        """The tokens marked so; none when the file has no types."""
        return [self.tokens[index] for index, type_ in enumerate(self.types) if type_ == kind and self.tokens[index]]


_NAMED_TEMPLATE = "tokenizer.chat_template."


def convert_gguf(path: Path) -> tuple[Backend, TokenizerInfo]:
    """Build the tokenizer of a GGUF file. Raises ConfigError when it has none, or one that is not supported."""
    metadata = read_gguf(path).metadata
    vocabulary = _vocabulary(path, metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, add_bos = _byte_level(vocabulary, _text(metadata, "tokenizer.ggml.pre") or "default")
    elif kind == "llama":
        backend, add_bos = _sentencepiece(vocabulary, _flag(metadata, "add_space_prefix", True)), True
    else:
        raise ConfigError(f"{path}: tokenizer.ggml.model is {kind!r}; supported: 'gpt2', 'llama'")
    info = _info(metadata, vocabulary)
    add_specials(backend, [*info.special_tokens.values(), *vocabulary.of_type(_CONTROL)])
    known = backend.get_vocab()
    plain = [AddedToken(text, normalized=False) for text in vocabulary.of_type(_USER_DEFINED) if text in known]
    backend.add_tokens(plain)
    before = _flag(metadata, "add_bos_token", add_bos) and "bos_token" in info.special_tokens
    after = _flag(metadata, "add_eos_token", False) and "eos_token" in info.special_tokens
    _frame_prompt(backend, (["bos_token"] if before else []), (["eos_token"] if after else []), info.special_tokens)
    return backend, info


def _frame_prompt(backend: Backend, before: list[str], after: list[str], texts: Mapping[str, str]) -> None:
    """Have `encode(..., add_special_tokens=True)` put these special tokens, given by name, around a prompt."""
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(name, backend.token_to_id(texts[name])) for name in before + after],
    )


def _byte_level(vocabulary: _Vocabulary, pre: str) -> tuple[Backend, bool]:
    if pre not in PRE_TOKENIZERS:
        allowed = ", ".join(sorted(PRE_TOKENIZERS))
        raise ConfigError(f"{vocabulary.path}: tokenizer.ggml.pre {pre!r} is not supported; supported: {allowed}")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    if not merges:
        raise ConfigError(f"{vocabulary.path}: tokenizer.ggml.merges is missing; a 'gpt2' tokenizer needs it")
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    cut = PRE_TOKENIZERS[pre]
    try:
        backend = Backend(models.BPE(ids, merges, ignore_merges=cut.ignore_merges))
    except Exception as error:  # the library raises bare Exception for merges that do not fit the vocabulary
        raise ConfigError(f"{vocabulary.path}: tokenizer.ggml.merges do not fit the tokens: {error}") from None
    cut.install(backend)
    backend.decoder = decoders.ByteLevel()
    return backend, cut.add_bos


def _sentencepiece(vocabulary: _Vocabulary, prefix_space: bool) -> Backend:
    gemma = vocabulary.architecture.startswith("gemma")
    tokens = vocabulary.tokens
    scores = vocabulary.scores
    if gemma:
        # Runs of spaces are stored as spaces, and the order of merges is the order of tokens, not that of scores.
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        scores = [-float(index) for index in range(len(tokens))]
        prefix_space = False
    elif len(scores) != len(tokens):
        raise ConfigError(
            f"{vocabulary.path}: tokenizer.ggml.scores has {len(scores)} values for {len(tokens)} tokens; "
            "a 'llama' tokenizer needs one a token"
        )
    ids = {token: index for index, token in enumerate(tokens)}
    mergeable = {_NORMAL, _USER_DEFINED}
    pieces = {
        token: index for token, index in ids.items() if not vocabulary.types or vocabulary.types[index] in mergeable
    }
    unknown = vocabulary.of_type(_UNKNOWN)
    merges = _merges_from_scores(pieces, scores)
    backend = Backend(
        models.BPE(ids, merges, unk_token=unknown[0] if unknown else None, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix_space else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix_space else []))
    return backend


def _merges_from_scores(pieces: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best-scored product first.

    SentencePiece joins the neighbours whose product has the best score, which BPE does with merges in this order.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, index in pieces.items():
        for border in range(1, len(piece)):
            left, right = piece[:border], piece[border:]
            if left in pieces and right in pieces:
                ranked.append((-scores[index], -len(left), -len(right), left, right))
    # The longer left part first among equals; the sort is stable, so the vocabulary's order decides the rest.
    ranked.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in ranked]


def _vocabulary(path: Path, metadata: Mapping[str, GGUFValue]) -> _Vocabulary:
    tokens = _list(metadata, "tokens", str)
    if not tokens:
        raise ConfigError(f"{path}: tokenizer.ggml.tokens is missing, so the file has no tokenizer")
    types = _list(metadata, "token_type", int)
    if types and len(types) != len(tokens):
        raise ConfigError(f"{path}: tokenizer.ggml.token_type has {len(types)} values for {len(tokens)} tokens")
    return _Vocabulary(
        path=path,
        architecture=_text(metadata, "general.architecture") or "",
        tokens=tokens,
        types=types,
        scores=_list(metadata, "scores", float),
        merges=_list(metadata, "merges", str),
    )


def _info(metadata: Mapping[str, GGUFValue], vocabulary: _Vocabulary) -> TokenizerInfo:
    tokens = vocabulary.tokens
    ids = {name: _token_id(metadata, f"{key}_token_id", len(tokens)) for name, key in _SPECIALS.items()}
    ends = [_token_id(metadata, key, len(tokens)) for key in _END_KEYS]
    marked = {*vocabulary.of_type(_CONTROL), *vocabulary.of_type(_USER_DEFINED)}
    ends += [tokens.index(text) for text in _END_OF_TURN if text in marked]
    return TokenizerInfo(
        special_tokens={name: tokens[index] for name, index in ids.items() if index is not None},
        bos_token_id=ids["bos_token"],
        eos_token_ids=tuple(dict.fromkeys(index for index in ends if index is not None)),
        chat_template=_text(metadata, "tokenizer.chat_template"),
        named_templates={
            key.removeprefix(_NAMED_TEMPLATE): value
            for key, value in metadata.items()
            if key.startswith(_NAMED_TEMPLATE) and isinstance(value, str)
        },
    )


def _token_id(metadata: Mapping[str, GGUFValue], key: str, limit: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if isinstance(value, int) and 0 <= value < limit:
        return value
    if value is not None:  # some writers put 2**32 - 1 for "none"
        logger.warning("tokenizer.ggml.%s is %r, which is no token of the %d: taken as absent", key, value, limit)
    return None


def _flag(metadata: Mapping[str, GGUFValue], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    return bool(value)


def _text(metadata: Mapping[str, GGUFValue], key: str) -> str | None:
    value = metadata.get(key)
    return value if isinstance(value, str) else None


def _list(metadata: Mapping[str, GGUFValue], key: str, kind: type[Item]) -> list[Item]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    return [item for item in value if isinstance(item, kind)] if isinstance(value, list) else []
