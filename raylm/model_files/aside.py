"""A folder that appears whole or not at all: written aside under another name, then renamed. Without torch."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raylm.errors import ConfigError

SUFFIX = ".converting"
"""Of the folder aside, behind the name of the folder that it becomes."""
MARKER = ".raylm-convert"
"""A file that tells a folder aside from a user's own folder of that name."""


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """An empty folder beside `out`, which becomes `out` when the block ends without an error; after an error it is
    deleted. A killed process leaves it, and the next call for the same `out` empties it.

    Raises ConfigError where `out` exists, another process is writing it, or the disk is full or fails.
    """
    out = Path(os.path.abspath(out))
    aside = out.with_name(out.name + SUFFIX)
    try:
        _refuse_existing(out)
        lock = _begin(aside)
        try:
            yield aside
            _sync_all(aside)
            _refuse_existing(out)
            os.rename(aside, out)
            # A kill before this line leaves a whole folder that has one empty file more.
            (out / MARKER).unlink()
            _sync(out.parent)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        finally:
            os.close(lock)
    except OSError as error:
        place = f" ({error.filename})" if error.filename is not None else ""
        raise ConfigError(f"{out} was not written: {error.strerror or error}{place}") from None


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists already; allowed: the name of a new folder")
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: the folder {out.parent} does not exist")


def _begin(aside: Path) -> int:
    """Make the folder, or empty the one that a killed process left. The descriptor holds a lock, which ends with the
    process, so that two processes never write into one folder."""
    aside.mkdir(exist_ok=True)
    lock = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _check_same(aside, lock)
        names = os.listdir(aside)
        if names and MARKER not in names:
            raise ConfigError(f"{aside} is needed, but it exists and holds files of others; move it away")
        for name in names:
            if name != MARKER:
                (aside / name).unlink() if not (aside / name).is_dir() else shutil.rmtree(aside / name)
        (aside / MARKER).touch()
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"{aside} is being written by another process") from None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _check_same(aside: Path, lock: int) -> None:
    """The process that held the lock may have renamed or deleted the folder meanwhile."""
    if not aside.is_dir() or os.stat(aside).st_ino != os.fstat(lock).st_ino:
        raise ConfigError(f"{aside} was being written by another process, which has just ended; try again")


def _sync_all(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
