"""Plug-ins: what other installed packages add to raylm by entry points, one group for each kind of thing.

docs/plugins.md says what an entry point of each group names.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Literal

from raylm.errors import ConfigError

Group = Literal[
    "raylm.models",
    "raylm.schedulers",
    "raylm.routes",
    "raylm.tool_parsers",
    "raylm.reasoning_parsers",
    "raylm.stat_loggers",
]


@functools.cache
def registered(group: Group) -> tuple[EntryPoint, ...]:
    """The entry points of a group. All installed packages are read, which takes some 20 ms: once a process."""
    return tuple(entry_points(group=group))


def plugin_names(group: Group) -> list[str]:
    return sorted({point.name for point in registered(group)})


def load_plugin(group: Group, name: str) -> object:
    """What an entry point names. Raises ConfigError where it cannot be imported, or two packages have one of that
    name."""
    found = [point for point in registered(group) if point.name == name]
    if len(found) > 1:
        owners = ", ".join(sorted(_owner(point) for point in found))
        raise ConfigError(f"the plug-in {name!r} ({group}) is in several packages: {owners}; allowed: one")
    try:
        return found[0].load()
    except Exception as error:  # Whatever the package's own code raises.
        raise ConfigError(f"the plug-in {name!r} ({group}) of {_owner(found[0])} cannot be loaded: {error}") from error


def load_plugins(group: Group) -> dict[str, object]:
    """All of a group, by name. Raises ConfigError as load_plugin does."""
    return {name: load_plugin(group, name) for name in plugin_names(group)}


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
