"""Configuration: pydantic, frozen, unknown keys refused; YAML in, checked once, then never changed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from raylm.errors import ConfigError


class FrozenConfig(BaseModel):
    """Base of every configuration section: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


Config = TypeVar("Config", bound=FrozenConfig)


def parse(cls: type[Config], data: object, *, source: str) -> Config:
    """Check `data` against a configuration class.

    Raises ConfigError naming the source (a file), the key, the value and what is allowed.
    """
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        problems = [_explain(cls, dict(item)) for item in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(problems)) from None


Foreign = TypeVar("Foreign", bound=BaseModel)


def parse_foreign(cls: type[Foreign], data: object, *, source: str) -> Foreign:
    """The same for a class that is not ours and ignores unknown keys: here they are errors too."""
    problems = [_unknown(cls, path) for path in _unknown_keys(cls, data, ())]
    try:
        parsed = cls.model_validate(data)
    except ValidationError as error:
        problems += [_explain(cls, dict(item)) for item in error.errors()]
    if problems:
        raise ConfigError(f"{source}: " + "; ".join(problems))
    return parsed


def load_yaml(cls: type[Config], path: str | Path) -> Config:
    """Read one YAML file into a configuration class. Raises ConfigError as parse does."""
    return parse(cls, read_yaml(path), source=str(path))


def read_yaml(path: str | Path) -> object:
    """The content of a YAML file. Raises ConfigError when it is missing or not YAML."""
    try:
        data: object = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this configuration file: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return {} if data is None else data


def _explain(cls: type[BaseModel], item: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "(top level)"
    if item["type"] == "extra_forbidden":
        return _unknown(cls, item["loc"])
    if item["type"] == "missing":
        return f"key {key!r} is required"
    message = item["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return f"key {key!r} has the value {item['input']!r}: {message}"


def _unknown(cls: type[BaseModel], path: tuple[Any, ...]) -> str:
    allowed = _fields_at(cls, path[:-1])
    close = difflib.get_close_matches(str(path[-1]), allowed, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    key = ".".join(map(str, path))
    return f"key {key!r} is unknown{hint}; allowed keys: {', '.join(sorted(allowed))}"


def _unknown_keys(cls: type[BaseModel], data: object, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The paths of keys that `cls` and the classes in it have no field for."""
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from _unknown_keys(cls, item, (*path, index))
    for key, value in data.items() if isinstance(data, dict) else ():
        field = cls.model_fields.get(str(key))
        if field is None:
            yield (*path, key)
        elif (nested := _model_in(field.annotation)) is not None and not _takes_any_keys(field.annotation):
            yield from _unknown_keys(nested, value, (*path, key))


def _takes_any_keys(annotation: Any) -> bool:
    return annotation is dict or get_origin(annotation) is dict or any(map(_takes_any_keys, get_args(annotation)))


def _fields_at(cls: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """The keys allowed at `path` inside a configuration class; list indexes are stepped over."""
    current: type[BaseModel] = cls
    for part in path:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(str(part))
        nested = _model_in(field.annotation) if field else None
        if nested is None:
            return []
        current = nested
    return list(current.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        if (found := _model_in(argument)) is not None:
            return found
    return None
