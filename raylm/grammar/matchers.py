"""GrammarMatchers: where the texts of rows stand in their grammars, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from raylm.core.structure import StructuredOutput
from raylm.grammar import binding
from raylm.grammar.compiled import CompiledGrammars
from raylm.log import get_logger

logger = get_logger(__name__)

ALL_TOKENS = -1
"""A word of a mask that allows every token."""


class _Text:
    """The text of one row, from its first generated token on."""

    __slots__ = ("begin_after", "compiled", "has_begun", "is_broken", "is_over", "matcher", "stop_ids", "tail")

    def __init__(self, structure: StructuredOutput, compiled: Future[binding.Compiled], stop_ids: list[int]) -> None:
        self.begin_after = structure.begin_after
        self.tail: tuple[int, ...] = ()
        """The last tokens before the grammar begins, as many as begin_after has at most."""
        self.has_begun = not self.begin_after
        self.compiled = compiled
        self.matcher: binding.Matcher | None = None
        self.stop_ids = stop_ids
        self.is_over = False
        """It has ended."""
        self.is_broken = False
        """It does not meet the grammar, or there is none: only its end is allowed."""

    def accept(self, token: int) -> None:
        """The text goes on with a token."""
        if self.is_over or self.is_broken:
            self.is_over |= token in self.stop_ids
            return
        if not self.has_begun:
            self.tail = (*self.tail, token)[-len(self.begin_after) :]
            self.has_begun = self.tail == self.begin_after
            return
        matcher = self.get_matcher()
        if matcher is not None and not matcher.accept_token(token, False):
            logger.error("A grammar does not allow token %d, which its mask let through: its text is ended", token)
            self.is_broken = True
        self.is_over = token in self.stop_ids

    def get_matcher(self) -> binding.Matcher | None:
        """Waits until the grammar is compiled; None where that has failed."""
        if self.matcher is None:
            try:
                self.matcher = binding.matcher(self.compiled.result(), self.stop_ids)
            except Exception:
                if not self.is_broken:
                    logger.exception("A grammar that was checked does not compile here: its text is ended")
                self.is_broken = True
        return self.matcher

    def is_masked(self) -> bool:
        """Whether not every token may come next."""
        return self.has_begun and not self.is_over


class GrammarMatchers:
    """The grammars of rows. Used by one thread.

    A mask is ceil(vocab_size / 32) words of int32: bit t % 32 of word t // 32 allows token t.
    """

    def __init__(self, grammars: CompiledGrammars, vocab_size: int, *, threads: int = 1) -> None:
        """`threads` fill masks at the same time."""
        self._grammars = grammars
        self._vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        self._num_threads = threads
        self._batch: binding.Batch | None = None
        self._texts: dict[int, _Text] = {}

    def begin(self, row: int, structure: StructuredOutput, stop_ids: Sequence[int], tokens: Sequence[int] = ()) -> None:
        """A row begins, or again after it was preempted, when it has generated `tokens`. It may only end with
        `stop_ids`, at least one. Returns before the grammar is compiled."""
        stops = [token for token in stop_ids if token < self._vocab_size]
        text = self._texts[row] = _Text(structure, self._grammars.get(structure), stops)
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

    def fill(self, rows: Sequence[int], drafts: Sequence[Sequence[int]], masks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Masks of the next token of each row and of those behind its drafts: 1 + len(drafts[i]) masks a row.

        Returns which of the masks count: what may come behind a draft that is not allowed does not matter, nor
        before a grammar has begun. The others are not written.
        """
        first = np.concatenate([[0], np.cumsum([1 + len(tokens) for tokens in drafts])])
        counts = np.zeros(int(first[-1]), dtype=np.bool_)
        # Rows whose grammar has begun advance together, so that each round fills its masks in parallel.
        open_: list[tuple[_Text, int, Sequence[int]]] = []
        for row, at, tokens in zip(rows, first.tolist(), drafts, strict=False):
            open_.append((self._texts[row], at, tokens))
        walked: dict[int, int] = {}
        saved = [(text, text.tail, text.has_begun, text.is_over) for text, _, _ in open_]
        turn = 0
        while open_:
            masked = [(text, at) for text, at, _ in open_ if text.is_masked()]
            self._fill_turn([text for text, _ in masked], [at + turn for _, at in masked], masks)
            counts[[at + turn for _, at in masked]] = True
            open_ = [one for one in open_ if turn < len(one[2]) and self._advance(one[0], one[2][turn], walked)]
            turn += 1
        for text, tail, has_begun, is_over in saved:
            if num := walked.get(id(text)):
                assert text.matcher is not None
                text.matcher.rollback(num)
            text.tail, text.has_begun, text.is_over = tail, has_begun, is_over
        return counts

    def forced_text(self, row: int) -> str:
        """What the text certainly goes on with, as far as whole characters of it are certain."""
        text = self._texts[row]
        matcher = text.get_matcher() if text.is_masked() and not text.is_broken else None
        return "" if matcher is None else str(matcher.find_jump_forward_string())

    def _fill_turn(self, texts: list[_Text], places: list[int], masks: NDArray[np.int32]) -> None:
        matchers, matched = [], []
        for text, place in zip(texts, places, strict=True):
            matcher = None if text.is_broken else text.get_matcher()
            if matcher is None:
                self._allow_only(text.stop_ids, masks[place])
            else:
                matchers.append(matcher)
                matched.append(place)
        if len(matchers) < 2 or self._num_threads == 1:
            for matcher, place in zip(matchers, matched, strict=True):
                matcher.fill_next_token_bitmask(masks, place, False)
        else:
            if self._batch is None:
                self._batch = binding.batch(self._num_threads)
            self._batch.batch_fill_next_token_bitmask(matchers, masks, matched, False)

    def _allow_only(self, tokens: list[int], mask: NDArray[np.int32]) -> None:
        """Without any token every token is allowed: a text that cannot end runs to its length."""
        bits = np.zeros(32 * self.num_words, dtype=np.uint8)
        bits[tokens or slice(None)] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def _advance(self, text: _Text, token: int, walked: dict[int, int]) -> bool:
        """Go on with a draft; False where the grammar does not allow it, or the text is over with it."""
        if text.is_over or text.is_broken or token in text.stop_ids:
            return False
        if not text.has_begun:
            text.accept(token)
            return True
        matcher = text.get_matcher()
        if matcher is None or not matcher.accept_token(token, False):
            return False
        walked[id(text)] = walked.get(id(text), 0) + 1
        return True
