"""Files on this machine and at any URL that fsspec knows; what is written appears whole or not at all."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from raylm.errors import ConfigError

TEMPORARY = ".tmp-"
"""In the name of a file that is being written; one that a killed process left behind means nothing."""


class Place(NamedTuple):
    """A file or folder: a path on this machine or an fsspec URL such as s3://bucket/key."""

    url: str

    def __truediv__(self, name: str) -> Place:
        return Place(f"{self.url.rstrip('/')}/{name}")

    def absolute(self) -> Place:
        """The same place for a process with another working folder."""
        fs, path = _find(self.url)
        return Place(str(fs.unstrip_protocol(path)))

    def exists(self) -> bool:
        fs, path = _find(self.url)
        return bool(fs.exists(path))

    def names(self) -> set[str]:
        """Names of the files in this folder; none where there is no folder."""
        fs, path = _find(self.url)
        try:
            return {entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(path, detail=False)}
        except FileNotFoundError:
            return set()

    def make_folder(self) -> None:
        fs, path = _find(self.url)
        fs.makedirs(path, exist_ok=True)

    def remove(self) -> None:
        """Remove the file, if it is there."""
        fs, path = _find(self.url)
        if fs.exists(path):
            fs.rm_file(path)

    def inputs(self) -> list[Place]:
        """The files that this names: itself, what matches its * and ?, or all of a folder. Raises ConfigError."""
        fs, path = _find(self.url)
        if "*" in path or "?" in path:
            found = fs.glob(path)
        else:
            found = fs.find(path, maxdepth=1) if fs.isdir(path) else [path] if fs.exists(path) else []
        if not found:
            raise ConfigError(f"--input {self.url!r}: there is no such file")
        return [Place(str(fs.unstrip_protocol(name))) for name in sorted(found)]

    @contextmanager
    def reader(self) -> Iterator[BinaryIO]:
        """The bytes from the start, buffered; seekable."""
        fs, path = _find(self.url)
        with fs.open(path, "rb") as file, io.BufferedReader(cast(Any, file), 2**20) as buffered:
            yield cast(BinaryIO, buffered)

    def read(self) -> bytes:
        with self.reader() as file:
            return file.read()

    @contextmanager
    def writer(self, *, drafts: Place | None = None) -> Iterator[BinaryIO]:
        """Write the whole file. It has its name once the block has ended well; killed earlier, it never was.

        What a killed process leaves behind is in `drafts`, a folder of the same storage, or beside the file.
        """
        fs, path = _find(self.url)
        draft = _find((drafts / path.rsplit("/", 1)[-1]).url)[1] if drafts is not None else path
        temporary = f"{draft}{TEMPORARY}{uuid.uuid4().hex}"
        try:
            with fs.open(temporary, "wb") as file:
                yield cast(BinaryIO, file)
                if isinstance(fs, LocalFileSystem):
                    file.flush()
                    os.fsync(file.fileno())
            if isinstance(fs, LocalFileSystem):
                os.replace(temporary, path)
            else:
                # Copies appear whole in object stores.
                fs.mv(temporary, path)
        except BaseException:
            if fs.exists(temporary):
                fs.rm_file(temporary)
            raise


def _find(url: str) -> tuple[Any, str]:
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{url!r} cannot be opened: {error}") from None
    # Some keep listings for as long as they live, and others write to the same folders.
    fs.invalidate_cache()
    return fs, str(path)
