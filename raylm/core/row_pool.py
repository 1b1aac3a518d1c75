"""The rows that running requests take in the workers' tables."""

from __future__ import annotations

from collections.abc import Iterable

from raylm.core.request import Request


class RowPool:
    """Gives each running request a row of its own."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self._held: list[Request | None] = [None] * num_rows

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request) -> None:
        """Give it a row; there must be one."""
        request.row = self._free.pop()
        self._held[request.row] = request

    def give_back(self, request: Request) -> None:
        self._free.append(request.row)
        self._held[request.row] = None
        request.row = -1

    def every(self, size: int, step: int) -> Iterable[Request]:
        """Those in every size-th row: of `size` steps that follow each other, each row is in one."""
        return filter(None, self._held[step % size :: size])

    def check(self, running: Iterable[Request]) -> None:
        """Assert that these hold all rows that are not free."""
        rows = {request.row: request for request in running}
        assert all(rows.get(row) is held for row, held in enumerate(self._held)), "rows"
        assert sorted([*rows, *self._free]) == list(range(len(self._held))), "rows"
