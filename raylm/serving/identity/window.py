"""What has been used of a limit, counted in whole seconds."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60
_SOON_S = 2


class Window:
    """What was used in the last 60 seconds. A second's use counts until 60 whole seconds have gone by after it, so that
    no 60 seconds, wherever they begin, hold more than the total ever was."""

    def __init__(self) -> None:
        self._slots: deque[list[int]] = deque()
        """Second and amount, the oldest first."""
        self.total = 0

    def add(self, second: int, amount: int) -> None:
        if not self._slots or self._slots[-1][0] != second:
            self._slots.append([second, 0])
        self._slots[-1][1] += amount
        self.total += amount

    def take_back(self, second: int, amount: int) -> int:
        """Undo some of what was used in a second; how much of it still counted."""
        for slot in self._slots:
            if slot[0] == second:
                slot[1] -= amount
                self.total -= amount
                return amount
        return 0

    def move(self, second: int) -> None:
        """It is this second now: forget what no longer counts."""
        while self._slots and self._slots[0][0] + WINDOW_S < second:
            self.total -= self._slots.popleft()[1]

    def soon(self, second: int) -> int:
        """About what the next seconds will use: as much as the last ones."""
        return sum(slot[1] for slot in self._slots if slot[0] > second - _SOON_S)

    def wait_for(self, amount: int, second: int) -> int:
        """Seconds until so much less of it counts; until nothing does, where there is not so much."""
        freed = 0
        for slot in self._slots:
            freed += slot[1]
            if freed >= amount:
                return max(1, slot[0] + WINDOW_S + 1 - second)
        return self.until_free(second)

    def until_free(self, second: int) -> int:
        """Seconds until nothing of it counts."""
        return max(0, self._slots[-1][0] + WINDOW_S + 1 - second) if self._slots else 0


class Level:
    """What is in use now, as a Window that nothing leaves by itself."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, second: int, amount: int) -> None:
        self.total += amount

    def take_back(self, second: int, amount: int) -> int:
        self.total -= amount
        return amount

    def move(self, second: int) -> None:
        return

    def soon(self, second: int) -> int:
        return -(-self.total // 4)

    def wait_for(self, amount: int, second: int) -> int:
        return 1

    def until_free(self, second: int) -> int:
        return 1 if self.total else 0
