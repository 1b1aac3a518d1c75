"""Prompt lookup: drafts are copied from an earlier place of the request's own text (Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding)."""

from __future__ import annotations

from raylm.core.speculation.proposer import LONG_MATCHES, NO_DRAFTS, Drafts, evidence_of

_FEW = 8
"""Up to so many new tokens are indexed one by one, more of them by columns, which has a higher fixed cost."""


class _Text:
    """One request's tokens and where its n-grams ended last."""

    __slots__ = ("indexes", "num_indexed", "token_ids")

    def __init__(self, token_ids: list[int], orders: list[int]) -> None:
        self.token_ids = token_ids
        self.indexes: list[tuple[int, dict[tuple[int, ...], int]]] = [(n, {}) for n in orders]
        self.num_indexed = 0
        """N-grams that end here or earlier are indexed. The last token stays out, so that the n-gram at the text's end
        does not find itself."""


class NgramProposer:
    """Finds the longest n-gram (min_n to max_n tokens) at the text's end that stands earlier in the text too, at its
    most recent place, and drafts the tokens that followed it there.

    A draft that reaches the text's end goes on in itself: periodic text is continued. Indexing costs one entry of a
    dictionary a token and order n, some 150 bytes; requests that begin while `max_tokens` are indexed get no drafts.
    """

    index_budget = 2048

    def __init__(self, min_n: int, max_n: int, *, max_tokens: int = 2_000_000) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n {min_n} must be at least 1 and at most max_n {max_n}")
        self._orders = list(range(max_n, min_n - 1, -1))
        self._max_n = max_n
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._texts: dict[str, _Text] = {}

    @property
    def num_indexed(self) -> int:
        """Tokens indexed now, over all requests."""
        return self._num_tokens

    def begin(self, key: str, token_ids: list[int], space: str) -> None:
        self._texts[key] = _Text(token_ids, self._orders)

    def prepare(self, key: str, limit: int) -> int:
        text = self._texts[key]
        done = text.num_indexed
        count = min(len(text.token_ids) - 1 - done, limit, self._max_tokens - self._num_tokens)
        if count <= 0:
            return 0
        if count <= _FEW:
            tokens = text.token_ids
            for at in range(done + 1, done + count + 1):
                for n, index in text.indexes:
                    if at >= n:
                        index[tuple(tokens[at - n : at])] = at
        else:
            self._index_many(text, done, done + count)
        text.num_indexed = done + count
        self._num_tokens += count
        return count

    def propose(self, key: str, count: int) -> Drafts:
        text = self._texts[key]
        tokens = text.token_ids
        if text.num_indexed < len(tokens) - 1 or count <= 0:
            return NO_DRAFTS
        for n, index in text.indexes:
            at = index.get(tuple(tokens[-n:]))
            if at is not None:
                found = tokens[at : at + count]
                while len(found) < count:  # The text's end is reached, and the draft goes on in itself.
                    found += found[: count - len(found)]
                return Drafts(found, evidence_of(n) if n < self._max_n else _evidence(tokens, at, n))
        return NO_DRAFTS

    def end(self, key: str) -> None:
        text = self._texts.pop(key, None)
        if text is not None:
            self._num_tokens -= text.num_indexed

    def _index_many(self, text: _Text, begin: int, end: int) -> None:
        tokens = text.token_ids
        for n, index in text.indexes:
            first = max(begin + 1, n)
            columns = [tokens[first - n + i : end - n + 1 + i] for i in range(n)]
            index.update(zip(zip(*columns, strict=True), range(first, end + 1), strict=True))


def _evidence(tokens: list[int], at: int, length: int) -> int:
    """The class of the match of the tokens before `at` with those at the text's end, `length` of them known to."""
    for begin in LONG_MATCHES:
        if length >= begin or (at >= begin and tokens[at - begin : at] == tokens[-begin:]):
            return evidence_of(max(begin, length))
    return evidence_of(length)
