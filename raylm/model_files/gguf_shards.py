"""GGUF files in several shards: name-00001-of-00003.gguf and so on. The first one has the metadata."""

from __future__ import annotations

import re
from pathlib import Path

from raylm.errors import ConfigError

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def shard_patterns(name: str) -> list[str]:
    """The names of all shards of the file that this is the first one of; of a whole file its own."""
    found = _SHARD.fullmatch(name)
    if found is None:
        return [name]
    count = int(found["count"])
    return [f"{found['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def shards(path: Path) -> list[Path]:
    """All shards of a GGUF file, in order. Raises ConfigError where one is missing, or the path is not the first."""
    found = _SHARD.fullmatch(path.name)
    if found is not None and found["number"] != "00001":
        first = f"{found['stem']}-00001-of-{found['count']}.gguf"
        raise ConfigError(f"{path} is shard {int(found['number'])} of {int(found['count'])}; name the first, {first}")
    paths = [path.parent / name for name in shard_patterns(path.name)]
    if missing := [each.name for each in paths if not each.is_file()]:
        raise ConfigError(f"{path}: shards are missing beside it: {', '.join(missing[:4])}")
    return paths
