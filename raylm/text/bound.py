"""How much text one token can stand for: from a text's length alone follows how many tokens it has at least.

Some tokenizers drop text (spaces, accents, control characters, what they do not know): for those there is no bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from raylm.text.token_table import byte_alphabet

_COMPOSED_CHARS = 4
"""Composing (NFC, NFKC) makes at most four characters one: no canonical decomposition is longer."""
_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})


class LengthBound(NamedTuple):
    """A token stands for at most so many characters, of which none is among `dropped`."""

    max_chars_per_token: int
    dropped: str

    def least_tokens(self, text: str) -> int:
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.max_chars_per_token)


def length_bound(backend: Backend) -> LengthBound | None:
    """How a tokenizer bounds the tokens of a text by its length; None where it does not."""
    factor = _shrinkage(_state(backend.normalizer))
    dropped = _dropped(backend)
    if factor is None or dropped is None or not _keeps_text(_state(backend.pre_tokenizer)):
        return None
    if dropped and backend.normalizer is not None:
        return None  # It may make such characters of others.
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # Such a token takes the spaces beside it, however many there are.
    return LengthBound(factor * max(map(len, backend.get_vocab(with_added_tokens=True))), dropped)


def _state(part: Any) -> Mapping[str, object] | None:
    """A normalizer or pre-tokenizer as tokenizer.json writes it."""
    if part is None:
        return None
    state: dict[str, object] = json.loads(part.__getstate__())
    return state


def _shrinkage(normalizer: Mapping[str, object] | None) -> int | None:
    """How many characters this normalizer makes one at most; None where it may drop any number."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind in ("NFC", "NFKC"):
        return _COMPOSED_CHARS
    if kind in ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"):
        return 1
    if kind == "Replace":
        pattern, content = normalizer["pattern"], str(normalizer["content"])
        old = pattern.get("String") if isinstance(pattern, Mapping) else None
        return 1 if isinstance(old, str) and len(old) <= len(content) else None
    if kind != "Sequence":
        return None
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        step_factor = _shrinkage(step)
        if step_factor is None:
            return None
        factor *= step_factor
    return factor


def _keeps_text(pre_tokenizer: Mapping[str, object] | None) -> bool:
    """Whether the pieces are all of the text."""
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(map(_keeps_text, _steps(pre_tokenizer, "pretokenizers")))
    if kind in ("Split", "Punctuation"):
        return pre_tokenizer["behavior"] != "Removed"
    return kind in _KEEPING_PRE_TOKENIZERS


def _steps(sequence: Mapping[str, object], name: str) -> list[Mapping[str, object]]:
    steps = sequence[name]
    assert isinstance(steps, list), "tokenizer.json lists the steps of a sequence"
    return steps


def _dropped(backend: Backend) -> str | None:
    """Characters that become no token, since their byte is none; None where there is no short list of them: tokenizers
    without bytes make one token of any run of unknown characters, or drop it."""
    model = backend.model
    if not isinstance(model, BPE):
        return None
    if model.byte_fallback:
        return "" if all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)) else None
    if not _is_byte_level(_state(backend.normalizer)) and not _is_byte_level(_state(backend.pre_tokenizer)):
        return None
    missing = [byte for char, byte in byte_alphabet().items() if backend.token_to_id(char) is None]
    # A character of several bytes leaves a token if bytes that continue a character are tokens.
    return (
        None if any(0x80 <= byte < 0xC0 for byte in missing) else "".join(chr(byte) for byte in missing if byte < 0x80)
    )


def _is_byte_level(part: Mapping[str, object] | None) -> bool:
    if part is None or part["type"] != "Sequence":
        return part is not None and part["type"] == "ByteLevel"
    name = "normalizers" if "normalizers" in part else "pretokenizers"
    return any(map(_is_byte_level, _steps(part, name)))
