"""Names of models on the Hugging Face hub, as `model.path` and `speculation.model` take them. No network, no download.

owner/name                       a repository with config.json and weights
owner/name:Q4_K_M                its GGUF file of this quantisation
owner/name/folder/file.gguf      one of its GGUF files
owner/name@revision              of a branch, tag or commit; before what follows the name
hf://owner/name                  the same as owner/name
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from raylm.errors import ConfigError

_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.))*"
_NAME = re.compile(
    rf"(?P<owner>{_WORD})/(?P<name>{_WORD})"
    r"(?:@(?P<revision>[A-Za-z0-9_][A-Za-z0-9_.%-]*))?"
    rf"(?::(?P<quantisation>[A-Za-z0-9_]+)|/(?P<file>(?:{_WORD}/)*{_WORD}\.gguf))?"
)
REVISION = r"^[A-Za-z0-9_-]+([./][A-Za-z0-9_-]+)*$"
"""Branches, tags and commits; none leads out of the folder that keeps them."""
_SCHEME = "hf://"
_MAX_LENGTH = 512


class HubName(NamedTuple):
    """A repository of the hub, and where it is one file that is meant, which."""

    repository: str
    """owner/name"""
    revision: str | None = None
    """A branch, a tag or a commit; None: the repository's main branch."""
    quantisation: str | None = None
    """That of a GGUF file, as its name ends: Q4_K_M."""
    file: str | None = None
    """A GGUF file's path in the repository."""

    def __str__(self) -> str:
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        part = f":{self.quantisation}" if self.quantisation else f"/{self.file}" if self.file else ""
        return f"{self.repository}{revision}{part}"


def hub_name(path: str) -> HubName | None:
    """The model of the hub that a path names. None where a file or folder of that path exists, or where the path has
    another form. Raises ConfigError for hf:// with a name that is none."""
    text = path.removeprefix(_SCHEME)
    if text == path and _exists(path):
        return None
    found = _NAME.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    revision = unquote(found["revision"]) if found is not None and found["revision"] else None
    if found is not None and (revision is None or re.match(REVISION, revision)):
        return HubName(f"{found['owner']}/{found['name']}", revision, found["quantisation"], found["file"])
    if text != path:
        raise ConfigError(f"{path!r} is no model of the hub; allowed: {_SCHEME}owner/name, with @revision after it")
    return None


def at_revision(path: str, revision: str | None) -> str:
    """The path with the revision in it. Raises ConfigError where the path is no name of the hub, or has one already."""
    if revision is None:
        return path
    name = hub_name(path)
    if name is None:
        raise ConfigError(
            f"model.revision is {revision!r}, but model.path {path!r} is no name of a model on the hub; "
            "allowed: null, or a model.path such as owner/name"
        )
    if name.revision is not None:
        raise ConfigError(f"model.revision is {revision!r}, but model.path {path!r} has a revision already")
    return str(name._replace(revision=revision))


def served_name(path: str) -> str:
    """What a model is called where nothing else is said: by its whole name on the hub, without the revision, or by the
    last part of its path."""
    name = hub_name(path)
    if name is not None:
        return str(name._replace(revision=None))
    return path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


def _exists(path: str) -> bool:
    try:
        return Path(os.path.expanduser(path)).exists()
    except (OSError, ValueError):  # too long, a null byte
        return False
