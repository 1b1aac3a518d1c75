"""Models of the Hugging Face hub, downloaded into the hub library's own cache (HF_HOME), which other tools share.

The library's settings hold: HF_HOME, HF_ENDPOINT, HF_TOKEN or `hf auth login`, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from tqdm.auto import tqdm

from raylm.config.hub_name import HubName
from raylm.errors import ConfigError
from raylm.model_files.gguf_shards import shard_patterns
from raylm.model_files.source import ModelSource, is_model
from raylm.model_files.text_files import FALLBACK_FILES, TEXT_FILES, has_tokenizer

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GGUF_FILE = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_./-]*\.gguf")
_FAILURES = (OSError, ValueError, RuntimeError, httpx2.HTTPError)
"""What the library raises; RuntimeError is that of hf_xet."""


@dataclass(frozen=True, slots=True)
class HubFolder:
    """A repository at one commit, and the folder of the cache that has what was downloaded of it."""

    repository: str
    revision: str
    """The commit."""
    path: Path
    field: str
    """The field of the configuration that names it."""

    @property
    def name(self) -> str:
        return f"{self.repository}@{self.revision}"

    def fetch(self, patterns: Sequence[str], *, exclude: Sequence[str] = ()) -> None:
        _download(HubName(self.repository, self.revision), patterns, exclude, field=self.field, shows_progress=True)


def locate_on_hub(name: HubName, *, field: str) -> ModelSource:
    """The model with everything but its weights on this machine; a GGUF file whole. Raises ConfigError."""
    if name.file is not None or name.quantisation is not None:
        return _locate_gguf(name, field)
    path = _download(name, TEXT_FILES, field=field)
    remote = HubFolder(name.repository, path.name, path, field)
    if not is_model(path):
        raise ConfigError(f"{field} {name}: {_without_config(name, field)}")
    if not has_tokenizer(path):
        _download(HubName(name.repository, path.name), FALLBACK_FILES, field=field)
    return ModelSource(path, "folder", remote)


def _locate_gguf(name: HubName, field: str) -> ModelSource:
    files = _gguf_files(name, field)
    file = name.file or _of_quantisation(name, files, field)
    if file not in files:
        raise ConfigError(f"{field} {name}: the repository has no such file; its .gguf files: {_listed(files)}")
    folder = _download(name, shard_patterns(file), field=field, shows_progress=True)
    return ModelSource(folder / file, "gguf", HubFolder(name.repository, folder.name, folder, field))


def _of_quantisation(name: HubName, files: Sequence[str], field: str) -> str:
    """The one file, or the first shard, whose name ends so. Raises ConfigError."""
    wanted = re.compile(rf"(.*[-._/])?{name.quantisation}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    found = [file for file in files if wanted.fullmatch(file)]
    if len(found) != 1:
        names = _listed(found or files)
        raise ConfigError(
            f"{field} {name}: {len(found)} files of the repository end in {name.quantisation}; allowed: a quantisation "
            f"of one file, or a file's name, such as {name.repository}/file.gguf; here: {names}"
        )
    return found[0]


def _gguf_files(name: HubName, field: str) -> list[str]:
    """The GGUF files of a repository: as the hub says, or, where that cannot be reached, those of the cache."""
    try:
        info = HfApi().model_info(name.repository, revision=name.revision)
        names = [sibling.rfilename for sibling in info.siblings or ()]
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ConfigError(f"{field} {name}: {_reason(error, name)}") from None
    except _FAILURES as error:
        folder = _cached(name)
        if folder is None:
            raise ConfigError(f"{field} {name}: {_reason(error, name)}") from None
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    return sorted(name for name in names if _GGUF_FILE.fullmatch(name) and "mmproj" not in name)


def _download(
    name: HubName,
    patterns: Sequence[str],
    exclude: Sequence[str] = (),
    *,
    field: str,
    shows_progress: bool = False,
) -> Path:
    """The folder that holds the repository's files of these patterns. Raises ConfigError."""
    bar = _Bar if shows_progress and sys.stderr.isatty() else _NoBar
    try:
        folder = snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(exclude) or None,
            tqdm_class=bar,
        )
    except _FAILURES as error:
        raise ConfigError(f"{field} {name}: {_reason(error, name)}") from None
    return Path(folder)


def _cached(name: HubName) -> Path | None:
    """The folder of the cache for this revision, whole or not; None where there is none."""
    root = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repository, repo_type="model")
    revision = name.revision or constants.DEFAULT_REVISION
    ref = root / "refs" / revision
    folder = root / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
    return folder if folder.is_dir() else None


def _reason(error: Exception, name: HubName) -> str:
    """Why a download failed and what helps."""
    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    lacks = f"{cache} has no whole copy of it (and there is no file or folder of this name here)"
    if isinstance(error, GatedRepoError):
        return (
            f"the repository is gated: accept its terms at {hub}/{name.repository}, then set HF_TOKEN to a token of "
            "the account that did, or log in with 'hf auth login'"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{hub} has no model {name.repository}, or not for everybody: a private one needs HF_TOKEN, or "
            "'hf auth login' (and there is no file or folder of this name here)"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no revision {name.revision!r}; allowed: a branch, a tag or a commit"
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled | httpx2.TransportError):
        if constants.is_offline_mode():
            return f"HF_HUB_OFFLINE is set and {lacks}; unset it, or download the model with 'hf download' first"
        return f"{hub} cannot be reached ({_short(error.__cause__ or error)}), and {lacks}"
    if isinstance(error, HfHubHTTPError):
        return f"{hub} answers with {error.response.status_code}: {_short(error)}"
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"no room is left for it in {cache} ({error.strerror}); HF_HOME names another place"
    return f"it cannot be downloaded into {cache}: {_short(error)}"


def _without_config(name: HubName, field: str) -> str:
    files = _gguf_files(name, field)
    if files:
        return f"the repository has no config.json, but .gguf files: name one, as {name.repository}/{files[0]}"
    return "the repository has no config.json; allowed: a model as transformers writes it, or one with .gguf files"


def _short(error: BaseException) -> str:
    """The first line of what the error says."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _listed(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "none"


class _Bar(tqdm):  # type: ignore[type-arg]
    """Progress on a terminal."""

    hidden = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)  # the library's own
        super().__init__(*args, **{**kwargs, "disable": self.hidden, "leave": False})


class _NoBar(_Bar):
    hidden = True
