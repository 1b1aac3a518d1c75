"""Drafts from a suffix automaton of the request's own text and of recent outputs (SuffixDecoding, arXiv:2411.04975)."""

from __future__ import annotations

from collections import OrderedDict, deque

from raylm.core.speculation.automaton import SuffixAutomaton
from raylm.core.speculation.proposer import LONGEST_COUNTED, NO_DRAFTS, Drafts, evidence_of

_LEAST_LIKELY = 0.2
"""Drafting ends where the drafts so far are all right with less than this probability, by the counts."""
_MAX_BRANCHES = 64
"""A context that was followed by more different tokens than this says too little."""


class _Generation:
    """Part of the recent outputs of one space: whole outputs, until there are enough."""

    __slots__ = ("automaton",)

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()


class _Match:
    """How much of a request's text, from its end backwards, occurs in a generation."""

    __slots__ = ("generation", "length", "num_seen", "state")

    def __init__(self, generation: _Generation) -> None:
        self.generation = generation
        self.num_seen = 0
        self.state = 0
        self.length = 0

    def advance(self, tokens: list[int]) -> None:
        """Follow the tokens that came since; after many of them only the newest, since longer matches count no more."""
        automaton = self.generation.automaton
        follow = automaton.follow
        if len(tokens) - self.num_seen > LONGEST_COUNTED:
            self.state, self.length, self.num_seen = 0, 0, len(tokens) - LONGEST_COUNTED
        state, length = self.state, self.length
        for position in range(self.num_seen, len(tokens)):
            state, length = follow(state, length, tokens[position])
        self.state, self.length, self.num_seen = automaton.place(state, length), length, len(tokens)


class _Text:
    __slots__ = ("automaton", "matches", "num_indexed", "num_prompt", "space", "token_ids")

    def __init__(self, token_ids: list[int], space: str) -> None:
        self.token_ids = token_ids
        self.num_prompt = len(token_ids)
        self.num_indexed = 0
        self.space = space
        self.automaton = SuffixAutomaton()
        self.matches: list[_Match] = []


class OutputPool:
    """Recent outputs of ended requests, apart for each space, bounded over all of them.

    A space has up to two generations. When the younger one is full, the older one goes and a new one begins; when all
    spaces together hold too much, the oldest generation of the space that was used longest ago goes.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._spaces: OrderedDict[str, list[_Generation]] = OrderedDict()
        self._pending: deque[tuple[str, list[int]]] = deque()
        self._num_pending = 0
        self._done = 0
        self.num_tokens = 0

    def generations(self, space: str) -> list[_Generation]:
        """The space's generations, the oldest first."""
        found = self._spaces.get(space)
        if found is None:
            return []
        self._spaces.move_to_end(space)
        return found

    def put(self, space: str, output: list[int]) -> None:
        """Note an output; index() takes it in. Under load that leaves no time for it, the oldest notes are dropped."""
        if not output:
            return
        self._pending.append((space, output[-self._max_tokens // 2 :]))
        self._num_pending += len(self._pending[-1][1])
        while self._num_pending > self._max_tokens and len(self._pending) > 1:
            self._num_pending -= len(self._pending.popleft()[1])
            self._done = 0

    def index(self, limit: int) -> int:
        """Take in up to `limit` tokens of noted outputs; returns how many."""
        left = limit
        while left > 0 and self._pending:
            space, output = self._pending[0]
            automaton = self._young(space).automaton
            if not self._done:
                automaton.begin_text()
            piece = output[self._done : self._done + left]
            for token in piece:
                automaton.add(token)
            self._done += len(piece)
            self.num_tokens += len(piece)
            left -= len(piece)
            if self._done == len(output):
                self._pending.popleft()
                self._num_pending -= len(output)
                self._done = 0
        self._evict()
        return limit - left

    def _young(self, space: str) -> _Generation:
        """The generation of the space that takes outputs in; a new one only between two outputs."""
        generations = self._spaces.setdefault(space, [])
        self._spaces.move_to_end(space)
        full = generations and not self._done and generations[-1].automaton.num_tokens >= self._max_tokens // 2
        if not generations or full:
            generations.append(_Generation())
            if len(generations) > 2:
                self._drop(generations.pop(0))
        return generations[-1]

    def _evict(self) -> None:
        busy = self._pending[0][0] if self._done else None
        while self.num_tokens > self._max_tokens:
            for space, generations in self._spaces.items():
                if space != busy or len(generations) > 1:
                    break
            else:
                return  # Only the generation that is being filled is left, which is at most half of all.
            self._drop(generations.pop(0))
            if not generations:
                del self._spaces[space]

    def _drop(self, generation: _Generation) -> None:
        self.num_tokens -= generation.automaton.num_tokens


class SuffixProposer:
    """Drafts what most often followed the longest suffix of the text that occurred before, in the text itself or in
    recent outputs of other requests of its space.

    A suffix automaton a request finds that suffix at no cost: it is the link of the last state. Token after token the
    likeliest continuation by the counts is drafted, until the drafts become unlikely: certain text gets long drafts.
    An automaton costs some 700 bytes a token; requests that begin while `max_tokens` are indexed get no drafts of
    their own text, and `max_pool_tokens` bounds the outputs of others.
    """

    index_budget = 512

    def __init__(self, *, min_match: int = 2, max_tokens: int = 500_000, max_pool_tokens: int = 200_000) -> None:
        self._min_match = min_match
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._pool = OutputPool(max_pool_tokens)
        self._texts: dict[str, _Text] = {}

    @property
    def num_indexed(self) -> int:
        """Tokens of running requests and of recent outputs that are indexed now."""
        return self._num_tokens + self._pool.num_tokens

    def begin(self, key: str, token_ids: list[int], space: str) -> None:
        self._texts[key] = _Text(token_ids, space)

    def prepare(self, key: str, limit: int) -> int:
        text = self._texts[key]
        tokens, done = text.token_ids, text.num_indexed
        count = max(0, min(len(tokens) - done, limit, self._max_tokens - self._num_tokens))
        add = text.automaton.add
        for position in range(done, done + count):
            add(tokens[position])
        text.num_indexed = done + count
        self._num_tokens += count
        return count + self._pool.index(limit - count)

    def propose(self, key: str, count: int) -> Drafts:
        text = self._texts[key]
        if count <= 0:
            return NO_DRAFTS
        automaton, state, length = text.automaton, 0, 0
        if text.num_indexed == len(text.token_ids):
            state = max(0, automaton.link[automaton.last])
            length = automaton.length[state]
        for match in self._matches(text):
            if match.length > length:
                automaton, state, length = match.generation.automaton, match.state, match.length
        if length < self._min_match:
            return NO_DRAFTS
        own = automaton is text.automaton
        token_ids, share = _likeliest(automaton, state, count, self._min_match, own=own)
        return Drafts(token_ids, evidence_of(min(length, LONGEST_COUNTED) * share)) if token_ids else NO_DRAFTS

    def end(self, key: str) -> None:
        text = self._texts.pop(key, None)
        if text is not None:
            self._num_tokens -= text.num_indexed
            self._pool.put(text.space, text.token_ids[text.num_prompt :])

    def _matches(self, text: _Text) -> list[_Match]:
        """The text's matches with the generations that there are now, brought up to its end."""
        generations = self._pool.generations(text.space)
        if [match.generation for match in text.matches] != generations:
            kept = {id(match.generation): match for match in text.matches}
            text.matches = [kept.get(id(one)) or _Match(one) for one in generations]
        for match in text.matches:
            match.advance(text.token_ids)
        return text.matches


def _likeliest(
    automaton: SuffixAutomaton, state: int, count: int, min_match: int, *, own: bool
) -> tuple[list[int], float]:
    """Up to `count` tokens, each the one that most often followed those before it, and the share of the first one.

    `own`: the text's end is in the automaton, so it can be reached; drafting goes on from its longest suffix that
    occurred before."""
    length, link, following, counts = automaton.length, automaton.link, automaton.next, automaton.count
    token_ids: list[int] = []
    first = probability = 1.0
    while len(token_ids) < count:
        while not following[state] and length[link[state]] >= min_match and own:
            state = link[state]
        branches = following[state]
        if not branches or len(branches) > _MAX_BRANCHES:
            break
        if len(branches) == 1:
            ((token, target),) = branches.items()
            share = 1.0
        else:
            token, target = max(branches.items(), key=lambda branch: counts[branch[1]])
            share = counts[target] / sum(counts[branch] for branch in branches.values())
        probability *= share
        if probability < _LEAST_LIKELY:
            break
        if not token_ids:
            first = share
        token_ids.append(token)
        state = target
    return token_ids, first
