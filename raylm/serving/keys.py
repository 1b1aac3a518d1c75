"""API keys: who may ask. A file holds them, one a line, and is read again when it changes."""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from raylm.api.errors import HttpError
from raylm.errors import ConfigError
from raylm.log import get_logger

logger = get_logger(__name__)

FIELD = "http.api_keys_file"
LOOK_EVERY_S = 1.0
_CHALLENGE = ((b"www-authenticate", b"Bearer"),)


class ApiKeys:
    """The keys in a file as it is now, a second old at most.

    A file that can no longer be read, or that holds no keys, leaves the last ones in force: half of a rotation must
    lock nobody out, and must let nobody in. Only hashes are kept, and no log line or error says what a key is.
    """

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds. Raises ConfigError when the file holds no keys."""
        self._path = path
        self._clock = clock
        self._look_at = clock() + LOOK_EVERY_S
        self._problem = ""
        self._take(_read(path, FIELD))

    def check(self, authorization: bytes) -> None:
        """Return where the value of the header Authorization is `Bearer KEY` with one of the keys, else raise
        HttpError 401."""
        scheme, _, given = authorization.partition(b" ")
        key = given.strip()
        if scheme.lower() != b"bearer" or not key:
            raise _unauthorized("An API key is required; send it in the header Authorization, as 'Bearer KEY'")
        self._look()
        digest = sha256(key).digest()
        # All are compared, whichever it is, and in constant time: how long it takes tells nothing of the keys.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise _unauthorized("Incorrect API key: it is none of this server's keys")

    def _look(self) -> None:
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        try:
            if _version(self._path) != self._seen:
                self._take(_read(self._path, FIELD))
                logger.info("the API keys have changed: %d in %s", len(self._digests), self._path)
            self._problem = ""
        except (ConfigError, OSError) as error:
            if str(error) != self._problem:
                logger.warning("the API keys are still those of before: %s", error)
            self._problem = str(error)

    def _take(self, reading: _Reading) -> None:
        self._seen = reading.version
        self._digests = [sha256(key).digest() for key in reading.keys]


def read_keys(path: str, *, field: str = FIELD) -> list[str]:
    """The keys in a file. Raises ConfigError, which names the `field` that the path comes from, when there are none."""
    return [key.decode() for key in _read(path, field).keys]


class _Reading(NamedTuple):
    version: tuple[int, ...]
    keys: list[bytes]


def _read(path: str, field: str) -> _Reading:
    try:
        # Asked before the file is read: if it changes in between, it is read once more, not once too few.
        version = _version(path)
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{field} is {path!r}, which cannot be read: {error.strerror}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        key, *rest = line.split(maxsplit=1) or [b"#"]
        if key.startswith(b"#"):
            continue
        if not all(0x21 <= byte <= 0x7E for byte in key) or not all(text.startswith(b"#") for text in rest):
            raise ConfigError(
                f"{field} is {path!r}, whose line {number} is not a key; a line holds one, in printable ASCII and "
                "without spaces, and a # comment or nothing after it"
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"{field} is {path!r}, which holds no keys; it must hold one at least, one a line")
    return _Reading(version, keys)


def _version(path: str) -> tuple[int, ...]:
    """What changes with the file: a Secret of Kubernetes is a link that comes to point to another one."""
    status = os.stat(path)
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


def _unauthorized(message: str) -> HttpError:
    return HttpError(401, message, code="invalid_api_key", headers=_CHALLENGE)
