"""Log probabilities as answers list them: chats as OpenAI's `content`, completions as OpenAI's four parallel lists, and
prompts in vLLM's shape.

An entry is encoded when its token comes, so an answer of any length is joined from bytes at its end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from raylm.core.sampling import ALL_TOKENS, SamplingParams
from raylm.core.step import Logprobs
from raylm.generation.served_model import Detokenizing, Text, TextPiece

_encode = msgspec.json.Encoder().encode
LEAST = -9999.0
"""JSON has no minus infinity; OpenAI and vLLM write this for it."""
_SLICE = 2048
"""Entries of a prompt that are encoded before the event loop has its turn again: some 5 ms."""


class TokenLogprob(msgspec.Struct):
    """A token in a chat's log probabilities."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    """A token of a chat's answer, and the likeliest ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class PromptLogprob(msgspec.Struct):
    """A token in `prompt_logprobs`; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


Entries = tuple[bytes, ...]
"""JSON of some tokens' entries, separated by commas: one part a list of the answer's field (a chat's has one list)."""
_TEXT_LISTS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


class LogprobForm(NamedTuple):
    """What a request wants to read of log probabilities.

    top: of each token of the answer, so many of the likeliest; None: no log probabilities at all.
    prompt: the same of the prompt (`prompt_logprobs`).
    of_echo: `top` holds for the echoed prompt too.
    as_ids: tokens are written as "token_id:123".
    as_chat: entries are those of a chat's `content`, not the four lists of a completion.
    """

    top: int | None = None
    prompt: int | None = None
    of_echo: bool = False
    as_ids: bool = False
    as_chat: bool = False

    @property
    def of_prompt(self) -> int | None:
        """What the engine is asked for of the prompt: enough for both."""
        wanted = [self.prompt, self.top if self.of_echo else None]
        given = [count for count in wanted if count is not None]
        return (ALL_TOKENS if ALL_TOKENS in given else max(given)) if given else None


def joined(parts: Sequence[Entries]) -> Entries:
    """Entries of several pieces, in order, as one; at least one piece, which may have no tokens."""
    filled = [part for part in parts if part[0]]
    return tuple(map(b",".join, zip(*filled, strict=True))) if len(filled) > 1 else (filled or parts)[0]


def field(entries: Entries) -> bytes:
    """The JSON of an answer's field `logprobs`."""
    if len(entries) == 1:
        return b'{"content":[' + entries[0] + b'],"refusal":null}'
    lists = (f'"{name}":['.encode() + part + b"]" for name, part in zip(_TEXT_LISTS, entries, strict=True))
    return b"{" + b",".join(lists) + b"}"


class TokenNames:
    """How a token is written in an answer. One whose bytes are no text by themselves, such as a part of a character, is
    written as those bytes, as OpenAI does: `bytes:\\xe2\\x80` in completions, without `bytes:` in chats. So no two
    tokens of a position are mixed up by their names, unless their texts are equal."""

    def __init__(self, text: Text, *, chat: bool, as_ids: bool) -> None:
        self._text = text
        self._prefix = "" if chat else "bytes:"
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._text.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return self._prefix + "".join(f"\\x{byte:02x}" for byte in data)

    def data(self, token_id: int) -> list[int]:
        """The token's bytes."""
        return list(self._text.token_bytes(token_id))


class _Token(NamedTuple):
    """One token and what the engine says of it."""

    token_id: int
    value: float
    rank: int
    top_ids: list[int]
    top_values: list[float]

    def with_top(self, count: int) -> _Token:
        """With this many of the likeliest tokens at most."""
        if count == ALL_TOKENS or count >= len(self.top_ids):
            return self
        return self._replace(top_ids=self.top_ids[:count], top_values=self.top_values[:count])


class ChatEntries:
    """Entries of `choices[].logprobs.content`."""

    num_lists = 1

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def encode(self, token: _Token, offset: int) -> Entries:
        """`offset` counts in completions only."""
        top = [self._one(*pair) for pair in zip(token.top_ids, token.top_values, strict=True)]
        own = self._one(token.token_id, token.value)
        return (_encode(ContentLogprob(own.token, own.logprob, own.bytes, top)),)

    def _one(self, token_id: int, value: float) -> TokenLogprob:
        return TokenLogprob(self._names.name(token_id), max(value, LEAST), self._names.data(token_id))


class TextEntries:
    """Entries of the four lists of a completion's `logprobs`."""

    num_lists = len(_TEXT_LISTS)

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def encode(self, token: _Token, offset: int) -> Entries:
        """`offset`: characters of the choice's text before the token."""
        names = self._names
        own, value = names.name(token.token_id), max(token.value, LEAST)
        top: dict[str, float] = {}
        # Of tokens with the same text the likeliest counts, and that is the first.
        for token_id, logprob in zip(token.top_ids, token.top_values, strict=True):
            top.setdefault(names.name(token_id), max(logprob, LEAST))
        top.setdefault(own, value)
        return b"%d" % offset, _encode(value), _encode(own), _encode(top)

    def first(self, token_id: int) -> Entries:
        """Of a prompt's first token, which follows none."""
        return b"0", b"null", _encode(self._names.name(token_id)), b"null"


class AnswerList:
    """The entries of one sequence as its text grows.

    An entry comes with the text that its token begins, so a stream's chunks have texts and entries of the same tokens.
    The tokens of a stop string that is cut from the text are left out; a token that ends an answer by itself, such as
    an end-of-sequence token, has an entry at the end of the text.
    """

    def __init__(self, entries: ChatEntries | TextEntries, detokenizer: Detokenizing, start: int) -> None:
        """`start`: characters of the choice's text before the first token (the echoed prompt)."""
        self._entries = entries
        self._detokenizer = detokenizer
        self._start = start
        self._end = 0
        """Characters of the tokens so far; those of the text that is decided are fewer while some are held back."""
        self._decided = 0
        self._waiting: deque[tuple[int, Entries]] = deque()

    def push(self, token_ids: list[int], logprobs: Logprobs, piece: TextPiece) -> Entries | None:
        """The entries that are due with a piece of text, of these tokens; at its end also where there are none."""
        by_string = isinstance(piece.stop_reason, str)
        spoken = len(token_ids) - (piece.finish_reason == "stop" and not by_string)
        for index, token in enumerate(_tokens(token_ids, logprobs)):
            self._waiting.append((self._end, self._entries.encode(token, self._start + self._end)))
            if index < spoken:
                self._end += len(self._detokenizer.push(token.token_id))
        self._decided += len(piece.text)
        takes_all = piece.finish_reason is not None and not by_string
        due = []
        while self._waiting and (takes_all or self._waiting[0][0] < self._decided):
            due.append(self._waiting.popleft()[1])
        if due:
            return joined(due)
        return (b"",) * self._entries.num_lists if piece.finish_reason is not None else None


class PromptEntries(NamedTuple):
    """What an answer says of its prompt: the entries of the echoed tokens, and the JSON of `prompt_logprobs`."""

    echoed: Entries | None
    listed: bytes | None


async def prompt_entries(
    form: LogprobForm, text: Text, prompt_ids: list[int], echo: str, logprobs: Logprobs | None
) -> PromptEntries:
    """What the engine says of a prompt (nothing, where it has one token), as the request wants to read it. `echo` is
    the prompt's text. The event loop has its turn in between."""
    tokens = _tokens(prompt_ids[1:], logprobs) if logprobs is not None else []
    turn = _Turns(1 + (len(logprobs.top_ids[0]) if logprobs is not None and logprobs.top_ids else 0))
    echoed = listed = None
    if form.of_echo and form.top is not None:
        entries = TextEntries(TokenNames(text, chat=False, as_ids=form.as_ids))
        places = _Places(text, echo)
        places.next(prompt_ids[0])
        found = [entries.first(prompt_ids[0])]
        for token in tokens:
            found.append(entries.encode(token.with_top(form.top), places.end))
            places.next(token.token_id)
            await turn.taken()
        echoed = joined(found)
    if form.prompt is not None:
        names = TokenNames(text, chat=True, as_ids=False)
        items = [b"null"]
        for token in tokens:
            items.append(_prompt_item(names, token.with_top(form.prompt)))
            await turn.taken()
        listed = b"[" + b",".join(items) + b"]"
    return PromptEntries(echoed, listed)


def _tokens(token_ids: list[int], logprobs: Logprobs) -> list[_Token]:
    return [_Token(*one) for one in zip(token_ids, *logprobs, strict=True)]


def _prompt_item(names: TokenNames, token: _Token) -> bytes:
    """vLLM's entry of a prompt's token: it and the likeliest ones, by their ids."""
    found = {token.token_id: PromptLogprob(max(token.value, LEAST), token.rank, names.name(token.token_id))}
    for rank, (token_id, value) in enumerate(zip(token.top_ids, token.top_values, strict=True), start=1):
        if token_id not in found:
            found[token_id] = PromptLogprob(max(value, LEAST), rank, names.name(token_id))
    return _encode(found)


class _Places:
    """Where in a prompt's text each of its tokens begins."""

    def __init__(self, text: Text, prompt: str) -> None:
        self._text = text
        self._prompt = prompt
        self._detokenizer = text.detokenizer(SamplingParams(), continues_prompt=False)
        self.end = 0
        """Characters of the tokens so far."""

    def next(self, token_id: int) -> None:
        """Another token."""
        written = len(self._detokenizer.push(token_id))
        if not written:
            # A special token is part of the text where the client has written it, and not where the model wants it.
            own = self._text.token_bytes(token_id).decode(errors="replace")
            written = len(own) if self._prompt.startswith(own, self.end) else 0
        self.end = min(self.end + written, len(self._prompt))


class _Turns:
    """Gives the event loop its turn after every _SLICE entries."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._left = _SLICE

    async def taken(self) -> None:
        """Another token's `each` entries were encoded."""
        self._left -= self._each
        if self._left < 0:
            self._left = _SLICE
            await asyncio.sleep(0)
