"""Words that an answer must not have, as the token sequences that the sampler looks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raylm.core.sampling import MAX_BAD_WORD_TOKENS
from raylm.errors import RequestRejected


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def bad_token_ids(tokenizer: Encoder, words: Sequence[str]) -> list[tuple[int, ...]]:
    """The tokens of each word as it stands at the beginning of a text, and of the word after a space where that makes
    another word of as many tokens (vLLM's rule). Raises RequestRejected for a word of too many tokens."""
    found = []
    for word in words:
        bare = word.lstrip() or word
        first = tuple(tokenizer.encode(bare, False))
        if not first:
            raise RequestRejected(f"bad_words holds {word!r:.100}, which is no token of this model", param="bad_words")
        if len(first) > MAX_BAD_WORD_TOKENS:
            raise RequestRejected(
                f"bad_words holds {word!r:.100} of {len(first)} tokens, at most {MAX_BAD_WORD_TOKENS} are allowed",
                param="bad_words",
            )
        found.append(first)
        spaced = tuple(tokenizer.encode(" " + bare, False))
        if len(spaced) == len(first) and spaced[0] != first[0]:
            found.append(spaced)
    return found
