"""Models in object stores (s3://, gs:// and whatever else fsspec knows), copied into raylm's cache folder.

A copy has the state of the store's folder in its name: the names, sizes and tags of all objects. So a model that has
changed is another copy, and a copy never mixes two states. Each file appears in it whole or not at all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from raylm.errors import ConfigError
from raylm.log import get_logger
from raylm.model_files.gguf_shards import shard_patterns
from raylm.model_files.source import ModelSource, is_model
from raylm.model_files.text_files import FALLBACK_FILES, TEXT_FILES, has_tokenizer
from raylm.model_files.user_cache import user_cache

logger = get_logger(__name__)

_NAME = re.compile(r"(additional_chat_templates/)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Objects that may be files of a model: in its folder itself, so that none is written beside the copy."""
_TAGS = ("ETag", "etag", "md5Hash", "crc32c", "content_md5", "LastModified", "updated", "mtime", "created")
"""What stores say by which a changed object is told."""
_PART = ".part"
_THREADS = 8


@dataclass(frozen=True, slots=True)
class StoreFolder:
    """A folder of an object store in one state, and its copy."""

    name: str
    """Its URL."""
    revision: str
    """A digest of the state."""
    path: Path
    files: tuple[tuple[str, int], ...]
    """Names and sizes of its objects."""
    field: str
    """The field of the configuration that names it."""

    def fetch(self, patterns: Sequence[str], *, exclude: Sequence[str] = ()) -> None:
        wanted = [file for file in self.files if _matches(file[0], patterns) and not _matches(file[0], exclude)]
        if all((self.path / name).is_file() for name, _ in wanted):
            return
        with _told(self.name, self.field, self.path), _locked(self.path):
            for stale in self.path.rglob(f"*{_PART}"):  # of a process that was killed: this one has the lock
                stale.unlink()
            missing = [file for file in wanted if not (self.path / file[0]).is_file()]
            if missing:
                size = sum(size for _, size in missing) / 1e9
                logger.info("%s: %d files of %.2f GB into %s", self.name, len(missing), size, self.path)
            with ThreadPoolExecutor(min(_THREADS, len(missing) or 1)) as pool:
                for done in [pool.submit(self._copy, name, size) for name, size in missing]:
                    done.result()

    def _copy(self, name: str, size: int) -> None:
        fs, root = url_to_fs(self.name)
        place = self.path / name
        part = place.with_name(place.name + _PART)
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            fs.get_file(f"{root.rstrip('/')}/{name}", str(part))
            if (found := part.stat().st_size) != size:
                raise OSError(errno.EIO, f"{name} has {found} bytes, not {size}: it has changed meanwhile")
            os.replace(part, place)
        finally:
            part.unlink(missing_ok=True)


def locate_in_store(url: str, *, field: str) -> ModelSource:
    """The model of a folder or .gguf file in a store, with everything but its weights on this machine; a GGUF file
    whole. Raises ConfigError."""
    if url.endswith(".gguf"):
        parent, _, file = url.rpartition("/")
        remote = _state_of(parent, field)
        remote.fetch(shard_patterns(file))
        if not (remote.path / file).is_file():
            raise ConfigError(f"{field} {url!r}: there is no such object")
        return ModelSource(remote.path / file, "gguf", remote)
    remote = _state_of(url.rstrip("/"), field)
    remote.fetch(TEXT_FILES)
    if not is_model(remote.path):
        raise ConfigError(
            f"{field} {url!r}: has no object config.json; allowed: the URL of a model's folder or .gguf file"
        )
    if not has_tokenizer(remote.path):
        remote.fetch(FALLBACK_FILES)
    return ModelSource(remote.path, "folder", remote)


def _state_of(url: str, field: str) -> StoreFolder:
    """What is at the URL now. Raises ConfigError."""
    with _told(url, field, user_cache("models")):
        fs, root = url_to_fs(url)
        fs.invalidate_cache()
        objects: dict[str, dict[str, Any]] = {}
        with suppress(FileNotFoundError):
            # A listing that is refused must raise, and not look like an empty folder.
            objects = fs.find(root, maxdepth=2, detail=True, on_error="raise")
    digest, files = sha256(url.encode()), []
    for key, about in sorted(objects.items()):
        name = key.removeprefix(root.rstrip("/") + "/")
        if _NAME.fullmatch(name) and not name.endswith(_PART):
            digest.update(repr((name, about["size"], [str(about.get(tag)) for tag in _TAGS])).encode())
            files.append((name, int(about["size"])))
    state = digest.hexdigest()[:32]
    label = re.sub(r"[^A-Za-z0-9_.-]", "_", url.rsplit("/", 1)[-1])
    return StoreFolder(url, state, user_cache("models") / f"{label}-{state}", tuple(files), field)


@contextmanager
def _told(url: str, field: str, place: Path) -> Iterator[None]:
    """What goes wrong, as a ConfigError."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{field} {url!r}: {error}; in raylm's repository, pip install -e '.[stores]'") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConfigError(
                f"{field} {url!r}: no room is left for it in {place} ({error.strerror}); XDG_CACHE_HOME names another "
                "place for caches"
            ) from None
        raise ConfigError(f"{field} {url!r}: {error.strerror or error or type(error).__name__}") from None
    # Each store's library has its own, for credentials, buckets and connections.
    except Exception as error:
        raise ConfigError(f"{field} {url!r}: {type(error).__name__}: {str(error)[:300]}") from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time fetches into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
