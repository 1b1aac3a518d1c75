"""The keys of EngineConfig as options: of commands, and of LLM(...). They are made of the configuration's own fields.

A key of model, parallel, cache, scheduler, runtime or load is an option of its own name (max_model_len); those of other
sections, cache.dtype and cache.scales begin with the section's (speculation_num_drafts).
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import textwrap
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from raylm.config.base import FrozenConfig
from raylm.config.engine import EngineConfig
from raylm.config.vllm_names import ANYWAY, NAMES, REFUSED, VALUES
from raylm.config.vllm_objects import OBJECTS, Options
from raylm.errors import ConfigError

_BARE = ("model", "parallel", "cache", "scheduler", "runtime", "load")
_NOT_BARE = (("cache", "dtype"), ("cache", "scales"))
"""Keys of these sections that would have the name of another's, or one that does not say whose they are."""
Sections = dict[str, dict[str, Any]]
"""Values of keys, section by section."""


class EngineKey(NamedTuple):
    """One key. `kind` is the type of a value, or of an element where `several`; dict means a JSON object."""

    section: str
    key: str
    kind: type
    several: bool
    choices: tuple[str, ...]
    help: str

    @property
    def name(self) -> str:
        """The option's name in Python; a command's has dashes."""
        is_bare = self.section in _BARE and (self.section, self.key) not in _NOT_BARE
        return self.key if is_bare else f"{self.section}_{self.key}"


@functools.cache
def engine_keys() -> dict[str, EngineKey]:
    """All keys but model.path, which every command asks for first, by their names as options."""
    found: dict[str, EngineKey] = {}
    for section, field in EngineConfig.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type) and issubclass(kind, FrozenConfig)
        for key in _keys_of(section, kind):
            if (section, key.key) != ("model", "path"):
                assert key.name not in found, f"two keys are named {key.name}"
                found[key.name] = key
    return found


def engine_sections(given: Mapping[str, Any], *, source: str) -> Sections:
    """Values by names of options, vLLM's among them, as sections of a configuration. Raises ConfigError for a name that
    is none, or that vLLM has and raylm has not."""
    sections: Sections = {}
    for name, value in given.items():
        if name in REFUSED:
            raise ConfigError(f"{source}: {name} is not taken: {REFUSED[name]}")
        try:
            options = _named_here(name, value)
        except ValueError as error:
            raise ConfigError(f"{source}: {name} {error}") from None
        for key, own in options.items():
            if key not in engine_keys():
                close = difflib.get_close_matches(name, [*engine_keys(), *NAMES, *OBJECTS], n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ConfigError(f"{source}: there is no option {name!r}{hint}")
            found = engine_keys()[key]
            translated = VALUES.get(key, {}).get(own, own) if isinstance(own, str) else own
            sections.setdefault(found.section, {})[found.key] = translated
    return sections


def _named_here(name: str, value: Any) -> Options:
    """An option under raylm's or vLLM's name -> the options of here that it sets. Raises ValueError, whose text follows
    the name."""
    if name in ANYWAY:
        return {}
    if name in OBJECTS:
        return OBJECTS[name].options(value)
    if name not in NAMES:
        return {name: value}
    renamed = NAMES[name]
    if renamed.rest is None or not isinstance(value, list | tuple):
        return {renamed.key: renamed.translate(value)}
    if not value:
        raise ValueError("is an empty list; give one value at least")
    return {renamed.rest: list(value[1:]), renamed.key: renamed.translate(value[0])}


def overridden(engine: Mapping[str, Any], given: Sections) -> dict[str, Any]:
    """An engine's configuration with the given values in it."""
    result = dict(engine)
    for section, values in given.items():
        before = result.get(section)
        # A section that is no mapping stays as it is, for parse to refuse.
        if before is None or isinstance(before, dict):
            result[section] = {**(before or {}), **values}
    return result


def _keys_of(section: str, config: type[FrozenConfig]) -> list[EngineKey]:
    docs, keys = _docstrings(config), []
    for key, field in config.model_fields.items():
        kind = _plain(field.annotation)
        several = get_origin(kind) in (list, tuple)
        if several:
            kind = _plain(get_args(kind)[0])
        choices = tuple(get_args(kind)) if get_origin(kind) is Literal else ()
        if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, FrozenConfig)):
            kind = dict
        value_type = kind if kind in (bool, int, float, dict) else str
        keys.append(EngineKey(section, key, value_type, several, choices, docs.get(key, "")))
    return keys


def _plain(annotation: Any) -> Any:
    """Without "or None" and what Annotated adds."""
    while get_origin(annotation) in (Annotated, Union, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    return annotation


def _docstrings(config: type) -> dict[str, str]:
    """What stands below each field in the class's source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        value = text.value if isinstance(text, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found[field.target.id] = " ".join(value.value.split())
    return found
