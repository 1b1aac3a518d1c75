"""How many drafts each request's next step verifies."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, chain
from operator import neg

from raylm.core.speculation.costs import EDGES, RowCosts, StepCosts

_ALLOWANCE = 0.012
"""Share of the time that verification may lose against plain steps."""
_MAX_CREDIT = 8
"""Plain steps' time that the account holds at most, and at first: new sizes of steps are slow the first times."""
_PLAIN_EVERY = 64
"""One of so many steps is plain, so that verifying ones are compared with what a plain step costs now."""
_PLAIN_EVERY_AT_FIRST = 8
"""The same while a plain step's time is a guess by other numbers of rows."""
_PLAIN_AGE = 1024
"""A plain step's measured time is used for so many steps."""
_PROBE_EVERY = 256
"""Steps between two that verify although nothing is expected of it, to see whether the costs have changed."""
_PROBE_HOPE = 0.7
"""Such a step is tried where it would pay if it cost so many times what was measured."""
_MARGIN = 1.01
"""A verifying step must be expected to give so many times the tokens a second of a plain one."""
_OUTLIER = 8
"""A step is charged at most so many times a plain step's time: a hiccup is not the drafts' fault."""
_NEW = 0.95
"""A size that was not measured must be expected to be better than the others by so much."""


class DraftLengths:
    """Shares drafts out to requests so that a step gives the most tokens a second.

    A draft is worth the probability that it and all before it are accepted; drafts are taken by their worth, as long as
    expected tokens over the expected time of the step grow. What steps cost is measured (StepCosts), not assumed, and
    an account keeps verification from losing against plain steps, whatever the estimates say: each verifying step
    is charged its time, and credited the time in which plain steps give as many tokens. The account earns 1.2 % of all
    time besides; while it is overdrawn, steps are plain. So throughput is never lower than about 0.98 of plain
    decoding's, after a first debt of some 8 plain steps.
    """

    def __init__(self) -> None:
        self._costs = StepCosts()
        self._credit: float | None = None
        """Seconds; None before a plain step was seen."""
        self._step = 0
        self._last_verifying = 0
        self._wait: dict[int, int] = {}
        """By number of rows: before this step nothing is expected of drafts, and they are not asked for."""

    def is_on(self, num_rows: int) -> bool:
        """Whether the next step may verify drafts. False costs nothing but this call."""
        if self._credit is None or self._credit < 0:
            return False
        costs = self._costs.of(num_rows)
        if not costs.is_known or costs.num_since_plain >= (_PLAIN_EVERY if costs.is_settled else _PLAIN_EVERY_AT_FIRST):
            return False
        if costs.is_settled and self._step - costs.last_plain > _PLAIN_AGE:
            return False
        return self._step >= self._wait.get(costs.num_rows, 0)

    def choose(self, values: list[list[float]]) -> list[int]:
        """The number of drafts of each row.

        `values`: for each row of the step, for each draft that it has, the probability that it and all before it are
        accepted, as Acceptance.values gives them.
        """
        num_rows = len(values)
        costs = self._costs.of(num_rows)
        worth = sorted(chain.from_iterable(values), reverse=True)
        count, gain = _best(worth, num_rows, costs, 1.0)
        if gain < _MARGIN:
            count = self._probe(worth, num_rows, costs)
        if count:
            return _shares(values, worth, count)
        # With many rows, asking all of them for drafts costs the scheduler more, and their mean changes less.
        self._wait[costs.num_rows] = self._step + max(1, num_rows // 8)
        return [0] * num_rows

    def observe(self, num_rows: int, num_tokens: int, num_sampled: int, seconds: float) -> None:
        """A step of `num_rows` decoding rows and nothing else computed `num_tokens` tokens and gave `num_sampled`.

        It was plain when it computed one token a row."""
        if num_rows <= 0 or seconds <= 0:
            return
        self._step += 1
        costs = self._costs.of(num_rows)
        if num_tokens <= num_rows:
            costs.observe_plain(self._step, seconds)
            if self._credit is None:
                self._credit = _MAX_CREDIT * seconds
        elif costs.is_known and self._credit is not None:
            self._last_verifying = self._step
            costs.observe_verifying(self._step, num_tokens, seconds)
            spent = min(seconds, _OUTLIER * costs.plain)
            self._credit += costs.plain * num_sampled / num_rows - spent
        if self._credit is not None:
            self._credit = min(self._credit + _ALLOWANCE * seconds, _MAX_CREDIT * max(costs.plain, seconds))

    def _probe(self, worth: list[float], num_rows: int, costs: RowCosts) -> int:
        """The drafts of a step that is to find out what it costs; 0 where none is due or can pay."""
        if self._step - self._last_verifying < _PROBE_EVERY or (self._credit or 0.0) < _MAX_CREDIT / 2 * costs.plain:
            return 0
        count, gain = _best(worth, num_rows, costs, _PROBE_HOPE)
        if gain >= _MARGIN:
            self._last_verifying = self._step
            return count
        return 0


def _best(worth: list[float], num_rows: int, costs: RowCosts, hope: float) -> tuple[int, float]:
    """How many drafts, the most valuable first, give the most tokens a second, and how many times a plain step's that
    is. Steps differ in size only by EDGES, so that few shapes of steps occur."""
    best, best_gain = 0, 1.0
    most = min(len(worth), costs.largest - num_rows)
    sums = list(accumulate(worth[:most], initial=float(num_rows)))
    at = bisect_right(EDGES, num_rows)
    count = 0
    while count < most:
        count = min(EDGES[at] - num_rows, most)
        at += 1
        num_tokens = num_rows + count
        gain = sums[count] / num_rows / max(1.0, hope * costs.ratio(num_tokens))
        if costs.is_new(num_tokens):
            gain *= _NEW
        if gain > best_gain:
            best, best_gain = count, gain
    return best, best_gain


def _shares(values: list[list[float]], worth: list[float], count: int) -> list[int]:
    """How many of the `count` most valuable drafts are of each row; of equal ones those of the first rows."""
    least = worth[count - 1]
    num_equal = count - bisect_left(worth, -least, key=neg)
    lengths = []
    for row_values in values:
        length = 0
        for value in row_values:
            if value < least:
                break
            if value == least:
                if not num_equal:
                    break
                num_equal -= 1
            length += 1
        lengths.append(length)
    return lengths
