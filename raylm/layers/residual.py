"""The residual stream: what every layer of a model reads and adds to."""

from __future__ import annotations

from torch import Tensor

from raylm import ops
from raylm.layers.halves import Halves
from raylm.layers.linear import RowParallelLinear
from raylm.layers.norm import LayerNorm, RMSNorm
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext, Sent


class ResidualStream:
    """The residual stream of a step, [T, hidden_size], changed in place.

    What was added last waits: the norm that reads the stream next adds it, and where norms sum (RMSNorm's `sums`) sums
    it over the tensor ranks, in one kernel.
    """

    __slots__ = ("_context", "_hidden", "_multiplier", "_norms_sum", "_waiting")

    def __init__(
        self, hidden: Tensor, context: ParallelContext, *, norms_sum: bool = False, multiplier: float = 1.0
    ) -> None:
        """`multiplier`: of everything that is added."""
        self._hidden = hidden
        self._context = context
        self._norms_sum = norms_sum
        self._multiplier = multiplier
        self._waiting: Tensor | Sent | Halves | None = None

    def normed(self, norm: RMSNorm | LayerNorm) -> Tensor:
        """The norm of the stream; `norm` was made without `scales`."""
        normed = self.rows(norm)
        assert isinstance(normed, Tensor)
        return normed

    def norm_itself(self, norm: RMSNorm | LayerNorm) -> None:
        """The stream becomes its norm; `norm` as in `normed`."""
        self._hidden = self.normed(norm)

    def rows(self, norm: RMSNorm | LayerNorm) -> ops.Rows:
        """The norm of the stream as the products behind it take it."""
        waiting, self._waiting = self._waiting, None
        rows: ops.Rows = norm(self._hidden, waiting)
        return rows

    def add(self, delta: Tensor | Sent | Halves) -> None:
        """Add `delta`, which may be overwritten. Where norms sum, it is what a RowParallelLinear returned."""
        assert self._waiting is None, "the stream is read between two additions"
        assert isinstance(delta, Tensor) or self._multiplier == 1.0, "only a whole sum can be multiplied"
        if isinstance(delta, Tensor) and self._multiplier != 1.0:
            delta = delta.mul_(self._multiplier)
        self._waiting = delta

    def add_product(self, linear: RowParallelLinear, x: ops.Rows) -> None:
        """Add linear(x); of many rows either without another pass over the stream, or with other ranks' rows sent while
        it is computed; of fewer in halves."""
        is_plain = self._multiplier == 1.0
        if is_plain and (sent := linear.send_product(x)) is not None:
            self.add(sent)
        elif is_plain and (halves := linear.product_in_halves(x)) is not None:
            self.add(halves)
        elif not linear.add_product(self._hidden, x, self._multiplier):
            self.add(linear(x))

    def total(self) -> Tensor:
        """The stream itself, with everything added that waits."""
        if (waiting := self._waiting) is not None:
            self._waiting = None
            if isinstance(waiting, Halves):
                waiting = waiting.total()
            assert isinstance(waiting, Tensor), "rows that are sent are summed by a norm"
            # Without a norm behind it, what was left to one is summed here.
            left = self._norms_sum and collectives.norm_sums(waiting, self._context)
            self._hidden.add_(collectives.all_reduce(waiting, self._context) if left else waiting)
        return self._hidden
