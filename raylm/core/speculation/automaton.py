"""A suffix automaton that counts: every substring of some texts, and how often each occurs."""

from __future__ import annotations

_MAX_LINKS = 32
"""Suffixes of a new token's position that are counted, the longest first. Text that repeats itself has long chains of
them; without a limit a token would cost as much as the text is long."""


class SuffixAutomaton:
    """The smallest automaton of all substrings of the texts (Blumer et al. 1985), built token by token.

    A state stands for the substrings that end at the same places: the longest has length[state] tokens, the shortest
    one more than the longest of link[state], its suffix that occurs at more places. n tokens make at most 2 n states;
    a token costs some microseconds. State 0 is the empty string.
    """

    __slots__ = ("count", "last", "length", "link", "next", "num_tokens")

    def __init__(self) -> None:
        self.length = [0]
        self.link = [-1]
        self.next: list[dict[int, int]] = [{}]
        self.count = [0]
        """How often the state's substrings occur."""
        self.last = 0
        """The state of the whole text so far."""
        self.num_tokens = 0

    @property
    def num_states(self) -> int:
        return len(self.length)

    def begin_text(self) -> None:
        """The next token begins another text."""
        self.last = 0

    def add(self, token: int) -> None:
        """The text goes on with `token`."""
        self.num_tokens += 1
        known = self.next[self.last].get(token)
        if known is None:
            self.last = self._append(token)
        else:  # Only in the second text and later ones.
            straight = self.length[known] == self.length[self.last] + 1
            self.last = known if straight else self._split(self.last, token, known)
        self._count(self.last)

    def follow(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """The state, and the length, of the longest suffix of a text that occurs here, after one more token of it.

        `state` and `matched` are what it was before that token."""
        length, link, following = self.length, self.link, self.next
        state = self.place(state, matched)
        while (target := following[state].get(token)) is None:
            if not state:
                return 0, 0
            state = link[state]
            matched = length[state]
        return target, matched + 1

    def place(self, state: int, matched: int) -> int:
        """The state of the string of `matched` tokens that was of `state` some time ago: a split may have moved it."""
        while state and matched <= self.length[self.link[state]]:
            state = self.link[state]
        return state

    def _append(self, token: int) -> int:
        length, link, following = self.length, self.link, self.next
        new = self._state(length[self.last] + 1, 0, {}, 0)
        state = self.last
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state >= 0:
            known = following[state][token]
            straight = length[known] == length[state] + 1
            link[new] = known if straight else self._split(state, token, known)
        return new

    def _split(self, state: int, token: int, known: int) -> int:
        """Give the substrings of `known` that are at most one token longer than those of `state` a state of their
        own: they occur at more places from now on."""
        following, link = self.next, self.link
        part = self._state(self.length[state] + 1, link[known], following[known].copy(), self.count[known])
        while state >= 0 and following[state].get(token) == known:
            following[state][token] = part
            state = link[state]
        link[known] = part
        return part

    def _state(self, length: int, link: int, following: dict[int, int], count: int) -> int:
        self.length.append(length)
        self.link.append(link)
        self.next.append(following)
        self.count.append(count)
        return len(self.length) - 1

    def _count(self, state: int) -> None:
        count, link = self.count, self.link
        for _ in range(_MAX_LINKS):
            if state <= 0:
                return
            count[state] += 1
            state = link[state]
