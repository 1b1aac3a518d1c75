"""TextProcessor: everything between strings and tokens, for the ingress and for offline use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from raylm.config.source import ModelSource
from raylm.core.sampling import SamplingParams
from raylm.text.chat import ChatTemplate, Message
from raylm.text.detokenizer import Detokenizer
from raylm.text.stop import StopStrings, StopTable
from raylm.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What one push gave: text (may be empty: held back), the reason if the answer is over, and the tokens counted.

    num_tokens: the tokens pushed, up to and including the one that completed a stop string.
    """

    text: str
    finish_reason: str | None
    num_tokens: int


class TextStream:
    """The text of one answer, from its tokens as the engine gives them.

    `stopped` becomes True when a stop string ended the answer: the caller then aborts the engine's request, and
    whatever is still pushed gives empty deltas.
    """

    __slots__ = ("_detokenizer", "_stops", "stopped")

    def __init__(self, detokenizer: Detokenizer, stops: StopTable | None = None) -> None:
        self._detokenizer = detokenizer
        self._stops = None if stops is None else StopStrings(stops)
        self.stopped = False

    def push(self, token_ids: list[int], finish_reason: str | None) -> TextDelta:
        """Take the engine's next tokens; after a `finish_reason` nothing more may follow.

        With "stop" the last token is the one that ended the answer: it counts, but is no part of the text.
        """
        if self.stopped:
            return TextDelta("", None, 0)
        spoken = token_ids[:-1] if finish_reason == "stop" else token_ids
        pieces = []
        for count, token_id in enumerate(spoken, start=1):
            pieces.append(self._decide(self._detokenizer.push(token_id)))
            if self.stopped:
                return TextDelta("".join(pieces), "stop", count)
        if finish_reason is not None:
            pieces.append(self._end())
            if self.stopped:
                finish_reason = "stop"
        return TextDelta("".join(pieces), finish_reason, len(token_ids))

    def _decide(self, text: str) -> str:
        if self._stops is None:
            return text
        decided, self.stopped = self._stops.push(text)
        return decided

    def _end(self) -> str:
        decided = self._decide(self._detokenizer.finish())
        if self._stops is None or self.stopped:
            return decided
        return decided + self._stops.finish()


class TextProcessor:
    """Prompts and messages to tokens, tokens to text, for one model. Safe to share between requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._chat = ChatTemplate(tokenizer.info.chat_template, tokenizer.info.special_tokens)

    @classmethod
    def load(cls, source: ModelSource, *, cache_dir: Path | None = None) -> TextProcessor:
        """Load a model's tokenizer and chat template. Raises ConfigError as Tokenizer.load does."""
        return cls(Tokenizer.load(source, cache_dir=cache_dir))

    def encode(self, prompt: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of a prompt, with what the model wants around it (such as BOS), which a rendered chat has already.
        Raises TooManyTokens as Tokenizer.encode does."""
        return self.tokenizer.encode(prompt, add_special_tokens, max_tokens=max_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """A conversation as text, by the model's chat template. Raises RequestRejected(param="messages")."""
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt)

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. Raises RequestRejected(param="messages")."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        # The template writes BOS and its like itself.
        return self.encode(text, add_special_tokens=False)

    def stop_table(self, params: SamplingParams) -> StopTable | None:
        """What the answers to one request share to look for its stop strings; None where it has none."""
        return StopTable(params.stop) if params.stop else None

    def stream(
        self, params: SamplingParams, *, continues_prompt: bool = False, stops: StopTable | None = None
    ) -> TextStream:
        """The text side of one answer (one for each of n). `stops` is stop_table's, where several answers share it.

        continues_prompt: the answer goes on from a raw prompt, so a space at its beginning belongs to the text even
        where the tokenizer would drop that of a whole text.
        """
        detokenizer = Detokenizer(self.tokenizer.table, keep_space=continues_prompt)
        return TextStream(detokenizer, self.stop_table(params) if stops is None else stops)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a prompt's tokens, without special tokens."""
        return self.tokenizer.decode(ids)
