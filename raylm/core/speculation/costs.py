"""What steps cost by their number of rows and tokens, as measured."""

from __future__ import annotations

from bisect import bisect_left

_EXACT = 16
"""Numbers up to this one are told apart."""
_PER_OCTAVE = 8
_LARGEST = 1 << 20
_FIRST = 3
"""Of the first so many steps of a size the fastest counts: a new size runs slowly until a CUDA graph, a plan of a
library or a cache is there for it."""
_NEW_HOPE = 0.5
"""Until then a step of the size is expected to take so many times as long as the fastest."""
_MAX_GROWTH = 4
"""A size is tried that has at most so many times the tokens of one that was measured."""
_MEMORY = 0.9
"""Weight of a step of a size when the next one of that size comes, and again for every _FADE steps between the two."""
_FADE = 32
_MAX_AGE = 1024
"""Once another size is measured, sizes that were measured so many steps before are forgotten."""
_OUTLIER = 4
"""A step counts as at most so many times as long as the steps of its size so far."""
_SIMILAR = 2
"""Numbers of rows are similar up to this ratio."""
_SLOPE = 0.02
"""Seconds that twice the tokens cost more, over the seconds of a plain step, before two sizes are measured. Too small
rather than too large: a size that is tried is measured then."""
_LEAST_SLOPE = 1e-3
"""The same, at least, beyond the largest size measured."""


def _make_edges() -> list[int]:
    edges = list(range(1, _EXACT + 1))
    while edges[-1] < _LARGEST:
        edges += [edges[-1] + max(1, (1 << (edges[-1].bit_length() - 1)) // _PER_OCTAVE)]
    return edges


EDGES = _make_edges()
"""Sizes of steps that are told apart: up to 16 all, then eight an octave."""


def edge(number: int) -> int:
    """The smallest size told apart that is at least `number`."""
    return EDGES[bisect_left(EDGES, number)]


class _Mean:
    """An exponentially forgetting mean that begins with the least of the first few values."""

    __slots__ = ("num", "step", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.num = 0
        self.step = 0
        """Of the last value."""

    def add(self, step: int, value: float) -> None:
        self.num += 1
        if self.num == 1:
            self.value = value
        elif self.num <= _FIRST:
            self.value = min(self.value, value)
        else:
            memory = _MEMORY ** (1 + (step - self.step) / _FADE)
            self.value = memory * self.value + (1 - memory) * min(value, _OUTLIER * self.value)
        self.step = step


class RowCosts:
    """Seconds of steps of one number of rows: plain ones, and verifying ones by their tokens.

    Verifying steps are kept as ratios to plain ones: both grow alike with the length of the contexts.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_since_plain = 0
        """Verifying steps since the last plain one."""
        self.guess = 0.0
        """What a plain step takes by those of other numbers of rows, until it is measured; 0 where unknown."""
        self._plain = _Mean()
        self._ratios: dict[int, _Mean] = {}
        self._borrowed: list[tuple[int, float]] = []
        self._curve: list[tuple[int, float]] | None = None

    @property
    def is_known(self) -> bool:
        """Plain steps were measured or can be guessed, to compare others with."""
        return self.guess > 0 or self.is_settled

    @property
    def is_settled(self) -> bool:
        """Enough plain steps were seen."""
        return self._plain.num >= _FIRST

    @property
    def is_measured(self) -> bool:
        """A verifying step was seen."""
        return bool(self._ratios)

    @property
    def last_plain(self) -> int:
        """The number of the step that was the last plain one."""
        return self._plain.step

    @property
    def plain(self) -> float:
        """Seconds of a plain step."""
        return self._plain.value if self._plain.num else self.guess

    def observe_plain(self, step: int, seconds: float) -> None:
        self._plain.add(step, seconds)
        self.num_since_plain = 0

    def observe_verifying(self, step: int, num_tokens: int, seconds: float) -> None:
        self.num_since_plain += 1
        size = edge(num_tokens)
        if size not in self._ratios:
            self._ratios[size] = _Mean()
        self._ratios[size].add(step, seconds / self.plain)
        old = [size for size, mean in self._ratios.items() if step - mean.step > _MAX_AGE]
        for size in old:
            del self._ratios[size]
        self._curve = None

    def is_new(self, num_tokens: int) -> bool:
        """Steps of this size have hardly been measured."""
        mean = self._ratios.get(edge(num_tokens))
        return mean is None or mean.num < _FIRST

    @property
    def largest(self) -> int:
        """The largest size, in tokens, that may be tried."""
        return _MAX_GROWTH * max(self.num_rows, *self._ratios, *(size for size, _ in self._borrowed), 0)

    def borrow(self, other: RowCosts) -> None:
        """Expect another number of rows' ratios, at as many tokens a row, where nothing is measured yet."""
        scale = self.num_rows / other.num_rows
        borrowed: dict[int, float] = {}
        highest = 0.0
        for size, ratio in _rising(other._ratios, other.num_rows):
            highest = max(highest, ratio)
            borrowed[edge(max(self.num_rows + 1, int(size * scale)))] = highest
        self._borrowed = sorted(borrowed.items())
        self._curve = None

    def ratio(self, num_tokens: int) -> float:
        """Seconds of a verifying step of so many tokens, over those of a plain step: between measured sizes on a
        line, beyond them on the last line; never falling with the number of tokens."""
        curve = self._curve or self._make_curve()
        at = max(1, bisect_left(curve, (num_tokens, 0.0)))
        (low, low_ratio), (high, high_ratio) = curve[at - 1], curve[at]
        return low_ratio + (high_ratio - low_ratio) * (num_tokens - low) / (high - low)

    def _make_curve(self) -> list[tuple[int, float]]:
        curve = [(self.num_rows, 1.0), *_rising(self._ratios, self.num_rows)]
        if len(curve) == 1:
            curve += self._borrowed
        high, high_ratio = curve[-1]
        slope = _SLOPE / self.num_rows
        if len(curve) > 2:  # A verifying step may be no graph: a line from the plain step says nothing of its slope.
            low, low_ratio = curve[-2]
            slope = max(_LEAST_SLOPE / self.num_rows, (high_ratio - low_ratio) / (high - low))
        curve.append((2 * _LARGEST, high_ratio + slope * (2 * _LARGEST - high)))
        self._curve = curve
        return curve


def _rising(means: dict[int, _Mean], above: int) -> list[tuple[int, float]]:
    """(size, mean), rising in both: where an older mean contradicts a newer one, the newer one is right."""
    points: list[tuple[int, float]] = []
    for size in sorted((size for size in means if size > above), key=lambda size: -means[size].step):
        mean = means[size]
        value = mean.value if mean.num >= _FIRST else max(1.0, _NEW_HOPE * mean.value)
        at = bisect_left(points, (size, 0.0))
        if at:
            value = max(value, points[at - 1][1])
        if at < len(points):
            value = min(value, points[at][1])
        points.insert(at, (size, value))
    return points


class StepCosts:
    """Costs of steps of every number of rows that there was."""

    def __init__(self) -> None:
        self._of: dict[int, RowCosts] = {}

    def of(self, num_rows: int) -> RowCosts:
        """The costs of steps of about so many rows."""
        size = edge(num_rows)
        costs = self._of.get(size)
        if costs is None:
            costs = self._of[size] = RowCosts(size)
            costs.guess = self._guess(size)
            measured = [other for other in self._of.values() if other.is_measured]
            if measured:
                costs.borrow(min(measured, key=lambda other: max(other.num_rows / size, size / other.num_rows)))
        return costs

    def _guess(self, num_rows: int) -> float:
        """Seconds of a plain step between those of similar numbers of rows. With such ones on one side only, the least
        that it can be: a step of more rows takes no less time, and no less time a row with fewer."""
        known = {other.num_rows: other.plain for other in self._of.values() if other.is_settled}
        less = max((rows for rows in known if num_rows / _SIMILAR <= rows < num_rows), default=0)
        more = min((rows for rows in known if num_rows < rows <= num_rows * _SIMILAR), default=0)
        if less and more:
            return known[less] + (known[more] - known[less]) * (num_rows - less) / (more - less)
        return known[less] if less else known[more] * num_rows / more if more else 0.0
