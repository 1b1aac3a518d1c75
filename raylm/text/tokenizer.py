"""Tokenizer: text to token ids and back, for a model folder or a GGUF file. Needs no transformers and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from raylm.model_files.source import ModelSource
from raylm.text.bound import LengthBound, length_bound
from raylm.text.cache import convert_once, identity
from raylm.text.definition import TokenizerInfo
from raylm.text.folder_tokenizer import load_folder
from raylm.text.token_table import TokenTable

_LONG_CHARS = 4096
"""Longer texts are tokenised without Python's lock, by a thread pool of the library."""
_PROBED_CHARS_PER_TOKEN = 6
"""A text longer than max_tokens times this is tried from its beginning: prose has four characters a token."""
_PROBE_GROWTH = 4


class TooManyTokens(Exception):
    """A text is longer than allowed: it has `least` tokens or more."""

    def __init__(self, least: int) -> None:
        super().__init__(f"the text has {least} tokens or more")
        self.least = least


class Tokenizer:
    """One model's tokenizer. Safe to share between requests and threads."""

    def __init__(self, backend: Backend, info: TokenizerInfo) -> None:
        """`backend` is a tokenizers.Tokenizer; it now belongs to this object."""
        # A published tokenizer.json may carry its training's cut-offs; a prompt is never cut or filled up.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.info = info
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.table = TokenTable(backend)

    @classmethod
    def load(cls, source: ModelSource, *, cache_dir: Path | None = None) -> Tokenizer:
        """Load the tokenizer of a model.

        One that must be converted (a GGUF file, a folder without tokenizer.json) is converted once and kept in
        `cache_dir`, by default the user's cache folder. Raises ConfigError when the model has no tokenizer or one
        that is not supported.
        """
        if source.kind == "folder":
            return cls(*load_folder(source.path, cache_dir))
        return cls(*convert_once(identity([source.path]), lambda: _convert_gguf(source.path), cache_dir))

    @property
    def bos_token_id(self) -> int | None:
        return self.info.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, the main one first."""
        return self.info.eos_token_ids

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`; with add_special_tokens, with what the model wants around a prompt (such as BOS).

        The text of a special token inside `text` becomes that token. Raises TooManyTokens where it is certain early
        that there are more than `max_tokens`; a text that has just a few more may come back whole.
        """
        if len(text) <= _LONG_CHARS:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        if max_tokens is not None:
            self._check_length(text, max_tokens)
        encoding = self._unlocked(text, add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokens(len(encoding))
        ids = encoding.ids
        return ids

    @cached_property
    def table_with_special(self) -> TokenTable:
        """The table for answers whose special tokens are text."""
        return TokenTable(self._backend, skip_special_tokens=False)

    @cached_property
    def added_tokens(self) -> dict[int, bytes]:
        """Tokens beside the trained vocabulary, special ones and others, with their text."""
        return {index: token.content.encode() for index, token in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def _length_bound(self) -> LengthBound | None:
        return length_bound(self._backend)

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Refuse a text by its length, or by a beginning of it that has twice the tokens already: where a text is cut
        changes the tokens at the cut, not half of all."""
        bound = self._length_bound
        if bound is not None and (least := bound.least_tokens(text)) > max_tokens:
            raise TooManyTokens(least)
        length = max_tokens * _PROBED_CHARS_PER_TOKEN
        while length < len(text):
            if (half := len(self._unlocked(text[:length], False)) // 2) > max_tokens:
                raise TooManyTokens(half)
            length *= _PROBE_GROWTH

    def _unlocked(self, text: str, add_special_tokens: bool) -> Encoding:
        """`encode` holds Python's lock all the time; for one text in a batch it is let go."""
        encoding: Encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return encoding

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return text

    def names(self, ids: Sequence[int]) -> list[str]:
        """What the vocabulary calls each token; empty beyond the vocabulary."""
        return [self._backend.id_to_token(token_id) or "" for token_id in ids]


def _convert_gguf(path: Path) -> tuple[Backend, TokenizerInfo]:
    # Imported here, because a start from the cache does not need it.
    from raylm.text.gguf_tokenizer import convert_gguf

    return convert_gguf(path)
