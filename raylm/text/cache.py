"""Converted tokenizers, kept in the user's cache folder: one folder a tokenizer, with tokenizer.json and info.json.

Each file is written beside its place and moved there in one step, info.json last, with a digest of both.
So another process sees a whole tokenizer or none, two that convert at once leave the same bytes, and anything else
(a half-written, damaged or foreign file) reads as "not there" and is written anew.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as Backend

from raylm.log import get_logger
from raylm.model_files.user_cache import user_cache
from raylm.text.definition import TokenizerInfo

logger = get_logger(__name__)

FORMAT = 2
"""Part of every key: raise it when a conversion changes what it makes."""
_HEAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Record:
    """The content of info.json."""

    digest: str
    info: TokenizerInfo


def default_cache_dir() -> Path:
    """raylm/tokenizers in the user's cache folder."""
    return user_cache("tokenizers")


def identity(files: Iterable[Path]) -> str:
    """A key for these files: name, size, time of change and the first 64 KiB of each."""
    digest = hashlib.sha256(f"raylm tokenizer {FORMAT}".encode())
    for path in files:
        stat = path.stat()
        with path.open("rb") as file:
            head = hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()
        digest.update(f"\n{path.name}\n{stat.st_size}\n{stat.st_mtime_ns}\n{head}".encode())
    return digest.hexdigest()


def convert_once(
    key: str, convert: Callable[[], tuple[Backend, TokenizerInfo]], cache_dir: Path | None
) -> tuple[Backend, TokenizerInfo]:
    """The tokenizer kept under `key`, or what `convert` makes, kept for the next time.

    A cache folder that cannot be written costs a conversion at every start, and a warning, but no error.
    """
    folder = (cache_dir or default_cache_dir()) / key
    if (kept := _read(folder)) is not None:
        return kept
    backend, info = convert()
    try:
        _write(folder, backend.to_str().encode(), info)
    except OSError as error:
        logger.warning("the converted tokenizer is not kept, %s cannot be written: %s", folder, error.strerror)
    return backend, info


def _read(folder: Path) -> tuple[Backend, TokenizerInfo] | None:
    try:
        record = msgspec.json.decode((folder / "info.json").read_bytes(), type=_Record)
        data = (folder / "tokenizer.json").read_bytes()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if _digest(data, record.info) != record.digest:
        return None
    try:
        return Backend.from_buffer(data), record.info
    except ValueError:  # written by another version of the library
        return None


def _write(folder: Path, tokenizer_json: bytes, info: TokenizerInfo) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = _Record(_digest(tokenizer_json, info), info)
    _put(folder / "tokenizer.json", tokenizer_json)
    _put(folder / "info.json", msgspec.json.encode(record))


def _digest(tokenizer_json: bytes, info: TokenizerInfo) -> str:
    return hashlib.sha256(tokenizer_json + msgspec.json.encode(info)).hexdigest()


def _put(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
