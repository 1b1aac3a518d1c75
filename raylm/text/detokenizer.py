"""Text of a running answer, token by token."""

from __future__ import annotations

import codecs
from collections.abc import Mapping

from raylm.text.token_table import TokenTable

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns the tokens of one answer into text as they come, in constant time a token.

    A character whose bytes are spread over tokens comes out once it is whole; bytes that can no longer become one come
    out as U+FFFD. The table says whether special tokens are text. The pieces joined are what decoding all tokens at
    once gives.

    keep_space: the text goes on from a prompt, so its first space is kept even where the tokenizer drops that of a
    whole text (SentencePiece models with a prefix space).
    """

    __slots__ = ("_decoder", "_num_strip", "_table")

    def __init__(self, table: TokenTable, *, keep_space: bool = False) -> None:
        self._table = table
        self._decoder = _utf8_decoder("replace")
        self._num_strip = 0 if keep_space else table.num_strip

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        text = self._decoder.decode(self._table[token_id])
        return self._strip(text) if self._num_strip and text else text

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _strip(self, text: str) -> str:
        kept = text
        while self._num_strip and kept.startswith(" "):
            kept = kept[1:]
            self._num_strip -= 1
        if kept:
            self._num_strip = 0
        return kept


class GluingDetokenizer(Detokenizer):
    """Writes no space between two added tokens (such as special ones); some tokenizers put one before every token."""

    __slots__ = ("_added", "_follows_added")

    def __init__(self, table: TokenTable, added: Mapping[int, bytes], *, keep_space: bool = False) -> None:
        """`added` holds the bytes of added tokens as they stand in the vocabulary."""
        super().__init__(table, keep_space=keep_space)
        self._added = added
        self._follows_added = False

    def push(self, token_id: int) -> str:
        own = self._added.get(token_id)
        follows_added, self._follows_added = self._follows_added, own is not None
        if own is not None and follows_added and self._table[token_id]:
            return self._decoder.decode(own)
        return super().push(token_id)
