"""GrammarMatchers: where the texts of rows stand in their grammars, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raylm.core.structure import StructuredOutput
from raylm.grammar import binding
from raylm.grammar.compiled import CompiledGrammars
from raylm.log import get_logger

logger = get_logger(__name__)

_MOST_FORCED = 32
"""Forced tokens that are looked for at a time."""
_MOST_WAYS = 32
"""Words of a mask that allow any token, where a text is forced: its beginnings are few."""


_BROKEN = (
    "structure: the text does not meet its grammar any more, as happens where a logits processor forbids all tokens "
    "that the grammar allows"
)
_NO_GRAMMAR = "structure: its grammar does not compile in a worker, though it did before"


class Filled(NamedTuple):
    """What filling masks told.

    counts: which of the masks count. What may come behind a draft that is not allowed does not matter, nor before a
    grammar has begun; their masks are not written. forced: (i, number of drafts, tokens) of a row i that is forced to
    say these tokens behind so many of its drafts. broken: (i, why) of a row i whose text has no mask any more.
    """

    counts: NDArray[np.bool_]
    forced: list[tuple[int, int, list[int]]]
    broken: list[tuple[int, str]]


class _Text:
    """The text of one row, from its first generated token on."""

    __slots__ = ("begin_after", "compiled", "fault", "grammars", "has_begun", "is_over", "matcher", "stop_ids", "tail")

    def __init__(self, structure: StructuredOutput, grammars: CompiledGrammars, stop_ids: list[int]) -> None:
        self.begin_after = structure.begin_after
        self.tail: tuple[int, ...] = ()
        """The last tokens before the grammar begins, as many as begin_after has at most."""
        self.has_begun = not self.begin_after
        self.grammars = grammars
        self.compiled = grammars.get(structure)
        self.matcher: binding.Matcher | None = None
        self.stop_ids = stop_ids
        self.is_over = False
        """It has ended."""
        self.fault = ""
        """Why it has no mask any more: it does not meet the grammar, or there is none."""

    def accept(self, token: int) -> None:
        """The text goes on with a token."""
        if self.is_over or self.fault:
            self.is_over |= token in self.stop_ids
            return
        if not self.has_begun:
            self.tail = (*self.tail, token)[-len(self.begin_after) :]
            self.has_begun = self.tail == self.begin_after
            return
        matcher = self.get_matcher()
        self.is_over = token in self.stop_ids
        # No mask allows a token without text, but a matcher takes it anywhere.
        is_text = self.is_over or bool(self.grammars.pieces[token])
        if matcher is not None and not (is_text and matcher.accept_token(token, False)):
            self.fault = _BROKEN

    def get_matcher(self) -> binding.Matcher | None:
        """Waits until the grammar is compiled; None where that has failed."""
        if self.matcher is None:
            try:
                self.matcher = binding.matcher(self.compiled.result(), self.stop_ids)
            except Exception:
                if not self.fault:
                    logger.exception("A grammar that was checked does not compile here: its request ends")
                self.fault = _NO_GRAMMAR
        return self.matcher

    def is_masked(self) -> bool:
        """Whether not every token may come next."""
        return self.has_begun and not self.is_over and not self.fault


class GrammarMatchers:
    """The grammars of rows. No two threads may use it at the same time.

    A mask is ceil(vocab_size / 32) words of int32: bit t % 32 of word t // 32 allows token t.
    """

    def __init__(self, grammars: CompiledGrammars, vocab_size: int, *, threads: int = 1) -> None:
        """`threads` fill masks at the same time."""
        self._grammars = grammars
        self._vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        self._num_threads = threads
        self._batch: binding.Batch | None = None
        self._ahead = np.empty((1, self.num_words), dtype=np.int32)
        self._texts: dict[int, _Text] = {}

    def begin(self, row: int, structure: StructuredOutput, stop_ids: Sequence[int], tokens: Sequence[int] = ()) -> None:
        """A row begins, or again after it was preempted, when it has generated `tokens`. It may only end with
        `stop_ids`, at least one. Returns before the grammar is compiled."""
        stops = [token for token in stop_ids if token < self._vocab_size]
        text = self._texts[row] = _Text(structure, self._grammars, stops)
        for token in tokens:
            text.accept(token)

    def forget(self, row: int) -> None:
        """The row has no grammar any more."""
        self._texts.pop(row, None)

    def accept(self, row: int, tokens: Sequence[int]) -> None:
        """The row's text goes on with these tokens."""
        text = self._texts[row]
        for token in tokens:
            text.accept(token)

    def fill(
        self,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        masks: NDArray[np.int32],
        looks: Sequence[bool] | None = None,
    ) -> Filled:
        """Masks of the next token of each row and of those behind its drafts: 1 + len(drafts[i]) masks a row. With
        looks[i] it is found out what row i is forced to say behind its drafts."""
        first = np.concatenate([[0], np.cumsum([1 + len(tokens) for tokens in drafts])])
        counts = np.zeros(int(first[-1]), dtype=np.bool_)
        texts = [self._texts[row] for row in rows]
        saved = [(text, text.tail, text.has_begun, text.is_over) for text in texts]
        walked = [0] * len(texts)
        """Drafts of each row that are allowed, and how many of them its matcher has taken."""
        matched = [0] * len(texts)
        # Rows whose grammar has begun advance together, so that each round fills its masks in parallel.
        open_ = list(range(len(texts)))
        while open_:
            masked = [(i, int(first[i]) + walked[i]) for i in open_ if texts[i].is_masked()]
            self._fill_turn([(texts[i], place) for i, place in masked], masks, counts)
            going = [i for i in open_ if walked[i] < len(drafts[i])]
            open_ = []
            for i in going:
                if self._advance(texts[i], drafts[i][walked[i]], matched, i):
                    walked[i] += 1
                    open_.append(i)
        forced = []
        for i, text in enumerate(texts):
            place = int(first[i]) + walked[i]
            if looks is not None and looks[i] and counts[place] and (tokens := self._forced(text, masks[place])):
                forced.append((i, walked[i], tokens))
        for (text, tail, has_begun, is_over), num in zip(saved, matched, strict=True):
            if num:
                assert text.matcher is not None
                text.matcher.rollback(num)
            text.tail, text.has_begun, text.is_over = tail, has_begun, is_over
        return Filled(counts, forced, [(i, text.fault) for i, text in enumerate(texts) if text.fault])

    def _fill_turn(self, places: list[tuple[_Text, int]], masks: NDArray[np.int32], counts: NDArray[np.bool_]) -> None:
        matchers, matched = [], []
        for text, place in places:
            matcher = text.get_matcher()
            if matcher is not None:
                matchers.append(matcher)
                matched.append(place)
        counts[matched] = True
        if len(matchers) < 2 or self._num_threads == 1:
            for matcher, place in zip(matchers, matched, strict=True):
                matcher.fill_next_token_bitmask(masks, place, False)
        else:
            if self._batch is None:
                self._batch = binding.batch(self._num_threads)
            self._batch.batch_fill_next_token_bitmask(matchers, masks, matched, False)

    def _advance(self, text: _Text, token: int, matched: list[int], index: int) -> bool:
        """Go on with a draft; False where the grammar does not allow it, or the text is over with it."""
        if text.is_over or text.fault or token in text.stop_ids:
            return False
        if not text.has_begun:
            text.accept(token)
            return True
        matcher = text.get_matcher()
        if matcher is None or not matcher.accept_token(token, False):
            return False
        matched[index] += 1
        return True

    def _forced(self, text: _Text, mask: NDArray[np.int32]) -> list[int]:
        """What a text must go on with, `mask` being that of its next token: the longest tokens."""
        matcher, found = text.matcher, list[int]()
        if matcher is None:
            return found
        while len(found) < _MOST_FORCED and (token := self._only_way(mask)) is not None:
            # A token with text may end a request too; behind its end a matcher says nothing.
            if token in text.stop_ids or not matcher.accept_token(token, False):
                break
            found.append(token)
            mask = self._ahead[0]
            matcher.fill_next_token_bitmask(self._ahead, 0, False)
        matcher.rollback(len(found))
        return found

    def _only_way(self, mask: NDArray[np.int32]) -> int | None:
        """The longest of the tokens that a mask allows, where each of the others is a beginning of it."""
        words = np.flatnonzero(mask)
        if not 0 < len(words) <= _MOST_WAYS:
            return None
        bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
        tokens = (words[:, None] * 32 + np.arange(32))[bits.astype(np.bool_)].tolist()
        pieces = self._grammars.pieces
        texts = [pieces[token] for token in tokens]
        longest = max(range(len(texts)), key=lambda i: len(texts[i]))
        # A token without text ends it.
        is_only = all(text and texts[longest].startswith(text) for text in texts)
        return tokens[longest] if is_only else None
