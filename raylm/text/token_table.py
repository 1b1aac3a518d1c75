"""What each token adds to the text, as bytes: the tokenizer's decoder worked out token by token.

Decoders look at tokens one by one, but for two things: bytes of several tokens may make one character, and the text's
first space may be dropped. Both are left to the detokenizer. So a token costs one look-up, however long the text is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from tokenizers import Tokenizer as Backend

from raylm.errors import ConfigError

_SUPPORTED = "ByteLevel, Metaspace, Replace (of a string), ByteFallback, Fuse, Strip (at the left), Sequence, none"


class TokenTable(dict[int, bytes]):
    """Token id -> its bytes; filled as tokens are met. Ids beyond the vocabulary give b"", and so do special tokens
    where skip_special_tokens is on.

    num_strip: spaces that the tokenizer drops at the beginning of a text.
    Raises ConfigError for a decoder that does not work token by token.
    """

    def __init__(self, backend: Backend, *, skip_special_tokens: bool = True) -> None:
        super().__init__()
        added = backend.get_added_tokens_decoder()
        self._text = backend.id_to_token
        self._special = frozenset(index for index, token in added.items() if token.special and skip_special_tokens)
        self._rules = _Rules(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
        self.num_strip = self._rules.num_strip

    def __missing__(self, token_id: int) -> bytes:
        text = None if token_id in self._special else self._text(token_id)
        data = b"" if text is None else self._rules.to_bytes(text)
        self[token_id] = data
        return data


class _Rules:
    """The steps of a decoder, given as the tokenizers library writes it (None: tokens joined by spaces)."""

    def __init__(self, decoder: Mapping[str, object] | None) -> None:
        self.num_strip = 0
        self._replace: list[tuple[str, str]] = []
        self._prefix = ""
        self._byte_level: dict[str, int] | None = None
        self._byte_fallback = False
        if decoder is None:
            self._prefix, self.num_strip = " ", 1
            return
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        if not isinstance(steps, list):
            raise _unsupported(decoder)
        for step in steps:
            self._add(step)

    def to_bytes(self, token: str) -> bytes:
        if self._byte_level is not None:
            try:
                return bytes([self._byte_level[char] for char in token])
            except KeyError:  # an added token, written as plain text
                return token.encode()
        for old, new in self._replace:
            token = token.replace(old, new)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return (self._prefix + token).encode()

    def _add(self, step: Mapping[str, object]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self._byte_level = byte_alphabet()
        elif kind == "Metaspace":
            self._replace.append((str(step["replacement"]), " "))
            self.num_strip = 0 if step.get("prepend_scheme") == "never" else 1
        elif kind == "Replace" and isinstance(pattern := step["pattern"], dict) and "String" in pattern:
            self._replace.append((pattern["String"], str(step["content"])))
        elif kind == "Strip" and step["content"] == " " and not step["stop"]:
            self.num_strip = int(str(step["start"]))
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind != "Fuse":
            raise _unsupported(step)


def _unsupported(step: Mapping[str, object]) -> ConfigError:
    return ConfigError(f"the tokenizer's decoder {json.dumps(step)} is not supported; supported: {_SUPPORTED}")


def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with (Radford et al. 2019, GPT-2): printable bytes are
    themselves, the others are the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
