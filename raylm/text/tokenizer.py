"""Tokenizer: text to token ids and back, for a model folder or a GGUF file. Needs no transformers and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend

from raylm.config.source import ModelSource
from raylm.text.cache import convert_once, identity
from raylm.text.definition import TokenizerInfo
from raylm.text.folder_tokenizer import load_folder
from raylm.text.token_table import TokenTable


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

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with add_special_tokens, with what the model wants around a prompt (such as BOS).

        The text of a special token inside `text` becomes that token.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def _convert_gguf(path: Path) -> tuple[Backend, TokenizerInfo]:
    # Imported here, because a start from the cache does not need it.
    from raylm.text.gguf_tokenizer import convert_gguf

    return convert_gguf(path)
