"""A file that an operator changes while the server runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from raylm.errors import ConfigError
from raylm.log import get_logger

logger = get_logger(__name__)

LOOK_EVERY_S = 1.0


class WatchedFile:
    """Has a file read at the start and when it has changed, a second later at most. What can no longer be read, or is
    wrong, leaves in force what was read last."""

    def __init__(
        self, path: str, what: str, take: Callable[[], int], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`what` the log calls its content. `take` reads the file and keeps what it holds, gives the number of things
        in it, and raises ConfigError. `clock` gives seconds. Raises what `take` raises."""
        self._path = path
        self._what = what
        self._take = take
        self._clock = clock
        self._look_at = clock() + LOOK_EVERY_S
        self._problem = ""
        self._seen = _version_or_none(path)
        take()

    def look(self) -> None:
        """Have it read again where it is time to look, and it has changed."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        try:
            # Asked before the file is read: if it changes in between, it is read once more, not once too few.
            version = _version(self._path)
            if version != self._seen:
                count = self._take()
                self._seen = version
                logger.info("the %s have changed: %d in %s", self._what, count, self._path)
            self._problem = ""
        except (ConfigError, OSError) as error:
            if str(error) != self._problem:
                logger.warning("the %s are still those of before: %s", self._what, error)
            self._problem = str(error)


def _version(path: str) -> tuple[int, ...]:
    """What changes with the file: a Secret of Kubernetes is a link that comes to point to another one."""
    status = os.stat(path)
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


def _version_or_none(path: str) -> tuple[int, ...] | None:
    try:
        return _version(path)
    except OSError:
        return None  # `take` says what is wrong.
