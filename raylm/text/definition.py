"""What a model says of its tokenizer beside the vocabulary, and where both are found again (the cache's files)."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """Facts of one tokenizer.

    special_tokens: name -> text, as chat templates see them ("bos_token", "eos_token", ...).
    eos_token_ids: the tokens that end an answer, the main one first; empty when the model names none.
    chat_template: jinja2 source, or None for a model without one.
    named_templates: its other templates by name, such as tool_use and rag.
    """

    special_tokens: dict[str, str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    named_templates: dict[str, str] = field(default_factory=dict)


def add_specials(backend: Backend, texts: list[str]) -> None:
    """Make these texts special tokens of `backend`: matched whole in a prompt, skipped in an answer.

    Texts that are no part of the vocabulary are left out, so that no id is made that the model lacks.
    """
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in dict.fromkeys(texts) if text not in known and backend.token_to_id(text) is not None]
    if missing:
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])
