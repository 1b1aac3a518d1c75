"""TextProcessor: everything between strings and tokens, for the ingress and for offline use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from raylm.core.sampling import SamplingParams
from raylm.model_files.source import ModelSource
from raylm.text.bad_words import bad_token_ids
from raylm.text.chat import ChatTemplate, Message
from raylm.text.chat_options import ChatOptions
from raylm.text.chat_settings import ChatSettings
from raylm.text.definition import TokenizerInfo
from raylm.text.detokenizer import Detokenizer, GluingDetokenizer
from raylm.text.stop import StopStrings, StopTable
from raylm.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What one push gave: text (may be empty: held back), the reason if the answer is over, and the tokens counted.

    num_tokens: the tokens pushed, up to and including the one that completed a stop string.
    stop_reason: the stop string, or the one of the request's stop_token_ids, that ended the answer.
    """

    text: str
    finish_reason: str | None
    num_tokens: int
    stop_reason: str | int | None = None


class TextStream:
    """The text of one answer, from its tokens as the engine gives them.

    `stopped` becomes True when a stop string ended the answer: the caller then aborts the engine's request, and
    whatever is still pushed gives empty deltas.
    """

    __slots__ = ("_detokenizer", "_includes_stop", "_num_free", "_stop_tokens", "_stops", "stopped")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopTable | None = None,
        *,
        stop_tokens: frozenset[int] = frozenset(),
        includes_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """stop_tokens: tokens that are told as the reason of a stop. includes_stop: what ends the answer, a string or a
        token, is part of its text. min_tokens: no stop string ends the answer with these."""
        self._detokenizer = detokenizer
        self._stops = None if stops is None else StopStrings(stops)
        self._stop_tokens = stop_tokens
        self._includes_stop = includes_stop
        self._num_free = min_tokens if stops is not None else 0
        self.stopped = False

    def push(self, token_ids: list[int], finish_reason: str | None) -> TextDelta:
        """Take the engine's next tokens; after a `finish_reason` nothing more may follow.

        With "stop" the last token is the one that ended the answer: it counts, but is no part of the text unless
        includes_stop.
        """
        if self.stopped:
            return TextDelta("", None, 0)
        by_token = finish_reason == "stop" and bool(token_ids)
        spoken = token_ids[:-1] if by_token and not self._includes_stop else token_ids
        pieces = []
        for count, token_id in enumerate(spoken, start=1):
            text = self._detokenizer.push(token_id)
            pieces.append(self._pass_stops(text) if self._num_free else self._decide(text))
            if self.stopped:
                return self._stopped_delta(pieces, count)
        if finish_reason is None:
            return TextDelta("".join(pieces), None, len(token_ids))
        pieces.append(self._end())
        if self.stopped:
            return self._stopped_delta(pieces, len(token_ids))
        last = token_ids[-1] if by_token else None
        return TextDelta("".join(pieces), finish_reason, len(token_ids), last if last in self._stop_tokens else None)

    def _pass_stops(self, text: str) -> str:
        """The text of one of the first min_tokens, which no stop string ends; the next token may complete one."""
        assert self._stops is not None, "without stop strings no token is free of them"
        self._num_free -= 1
        self._stops.is_armed = False
        decided, _ = self._stops.push(text)
        self._stops.is_armed = True
        return decided

    def _stopped_delta(self, pieces: list[str], num_tokens: int) -> TextDelta:
        assert self._stops is not None, "only a stop string sets stopped"
        stop = self._stops.found
        return TextDelta("".join([*pieces, stop] if self._includes_stop else pieces), "stop", num_tokens, stop)

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

    def __init__(self, tokenizer: Tokenizer, settings: ChatSettings | None = None) -> None:
        self.tokenizer = tokenizer
        info = tokenizer.info
        self.chat_template = ChatTemplate(info.chat_template, info.special_tokens, settings, info.named_templates)

    @classmethod
    def load(
        cls, source: ModelSource, settings: ChatSettings | None = None, *, cache_dir: Path | None = None
    ) -> TextProcessor:
        """Load a model's tokenizer and chat template; `settings` are the configuration's, for chats. Raises ConfigError
        as Tokenizer.load does."""
        return cls(Tokenizer.load(source, cache_dir=cache_dir), settings)

    def encode(self, prompt: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of a prompt, with what the model wants around it (such as BOS), which a rendered chat has already.
        Raises TooManyTokens as Tokenizer.encode does."""
        return self.tokenizer.encode(prompt, add_special_tokens, max_tokens=max_tokens)

    def render(self, messages: Sequence[Message], options: ChatOptions | None = None) -> str:
        """A conversation as text, by the model's chat template. Raises RequestRejected as ChatTemplate.render does."""
        return self.chat_template.render(messages, options)

    def chat(self, messages: Sequence[Message], options: ChatOptions | None = None) -> list[int]:
        """Token ids of a conversation. Raises RequestRejected as ChatTemplate.render does."""
        # The template writes BOS and its like itself.
        return self.encode(self.render(messages, options), add_special_tokens=False)

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
        ends = () if params.ignore_eos else self.tokenizer.eos_token_ids
        return TextStream(
            self.detokenizer(params, continues_prompt=continues_prompt),
            self.stop_table(params) if stops is None else stops,
            stop_tokens=frozenset(params.stop_token_ids).difference(ends),
            includes_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def detokenizer(self, params: SamplingParams, *, continues_prompt: bool) -> Detokenizer:
        """Text of one answer as its tokens come, stop strings and all; the options are those of `stream`."""
        keep_space = continues_prompt
        if params.skip_special_tokens:
            return Detokenizer(self.tokenizer.table, keep_space=keep_space)
        table = self.tokenizer.table_with_special
        if params.spaces_between_special_tokens:
            return Detokenizer(table, keep_space=keep_space)
        return GluingDetokenizer(table, self.tokenizer.added_tokens, keep_space=keep_space)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token is by itself, special tokens too; nothing beyond the vocabulary."""
        return self.tokenizer.table_with_special[token_id]

    def prepare(self, params: SamplingParams) -> SamplingParams:
        """What an engine can take: bad_words as tokens too. Raises RequestRejected for a word of too many tokens."""
        if not params.bad_words:
            return params
        found = bad_token_ids(self.tokenizer, params.bad_words)
        return replace(params, bad_words=(), bad_token_ids=(*params.bad_token_ids, *found))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a prompt's tokens, by default without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens)

    def token_names(self, ids: Sequence[int]) -> list[str]:
        """What the vocabulary calls each token, such as "\u0120Paris"; empty beyond the vocabulary."""
        return self.tokenizer.names(ids)

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        """What the model says of its tokenizer beside the vocabulary."""
        return self.tokenizer.info
