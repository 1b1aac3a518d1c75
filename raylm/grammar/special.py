"""Special tokens in grammars: marks of a model's own format, which no text of an answer can be taken for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from raylm.grammar.ebnf import FIRST_SPECIAL, Expr, Text, Token, seq
from raylm.text.tokenizer import Tokenizer

_NO_TEXT = re.compile(b"[\xf5-\xff]")


def is_text(token: bytes) -> bool:
    """Whether a token can be part of UTF-8. Others would be taken for the beginning of a special token."""
    return _NO_TEXT.search(token) is None


def special_bytes(token_id: int) -> bytes:
    """What stands for a special token in a matcher's vocabulary: a code point beyond Unicode, written as UTF-8 would.
    It is allowed where a grammar names the token, and where calls stand among free text."""
    code = FIRST_SPECIAL + token_id
    return bytes([0xF0 | code >> 18, 0x80 | (code >> 12) & 0x3F, 0x80 | (code >> 6) & 0x3F, 0x80 | code & 0x3F])


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens by their texts: `ids` of those that may stand within an answer, and the texts of `ends`, which
    end it."""

    ids: Mapping[str, int] = field(default_factory=dict)
    ends: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> SpecialTokens:
        ids, ends = {}, set()
        for index, text in tokenizer.added_tokens.items():
            if index in tokenizer.eos_token_ids:
                ends.add(text.decode())
            elif text and index < vocab_size and not tokenizer.table[index]:
                ids[text.decode()] = index
        return cls(ids, frozenset(ends))

    def parts(self, mark: str) -> list[Text | Token]:
        """A mark as texts and tokens, up to the first token that ends the answer."""
        known = sorted((*self.ids, *self.ends), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, known))})", mark) if known else [mark]
        found: list[Text | Token] = []
        for piece in pieces:
            if piece in self.ends:
                break
            if piece:
                found.append(Token(self.ids[piece]) if piece in self.ids else Text(piece))
        return found

    def mark(self, mark: str) -> Expr:
        """`parts` as one expression."""
        return seq(*self.parts(mark))

    def is_end(self, mark: str) -> bool:
        """Whether a mark holds a token that ends the answer."""
        return any(text in mark for text in self.ends)


NO_SPECIAL_TOKENS = SpecialTokens()
