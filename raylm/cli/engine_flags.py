"""Options of the command line that override a key of EngineConfig: made when a command runs, of the keys themselves."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from raylm.config.engine_keys import EngineKey, Sections, engine_keys, engine_sections
from raylm.config.vllm_names import ANYWAY, NAMES, REFUSED, TAKES_VALUE, Renamed, flag
from raylm.config.vllm_objects import OBJECTS

_DEST = "engine:"


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """All of them; an option that the command has already stays the command's."""
    group = parser.add_argument_group("engine", "Keys of the configuration; vLLM's names of them are taken too.")
    for key in engine_keys().values():
        _add(parser, group, flag(key.name), key, help=_help(key))
    for name, renamed in NAMES.items():
        _add(parser, group, flag(name), engine_keys()[renamed.key], renamed=renamed, dest=name, help=argparse.SUPPRESS)
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for name in OBJECTS:
        if flag(name) not in parser._option_string_actions:
            group.add_argument(flag(name), dest=_DEST + name, type=_json, **hidden)
    for name in ANYWAY:
        if flag(name) not in parser._option_string_actions:
            words = [flag(name)] if name in TAKES_VALUE or name.startswith("no_") else [flag(name), flag(f"no_{name}")]
            words = [word for word in words if word not in parser._option_string_actions]
            nargs = 1 if name in TAKES_VALUE else 0
            group.add_argument(*words, dest=_DEST + name, action=_Ignored, nargs=nargs, **hidden)
    for name in REFUSED:
        if flag(name) not in parser._option_string_actions:
            group.add_argument(flag(name), dest=name, action=_Refused, nargs="?", **hidden)


class _Ignored(argparse.Action):
    """vLLM's, which asks for what raylm does anyway."""

    def __call__(self, *ignored: object, **too: object) -> None:
        pass


class _Refused(argparse.Action):
    """vLLM's, which raylm has not."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> None:
        parser.error(f"{self.option_strings[0]} is not taken: {REFUSED[self.dest]}")


def given_engine(args: argparse.Namespace) -> Sections:
    """The options that were given. Raises ConfigError for those that raylm has not."""
    values = {name.removeprefix(_DEST): value for name, value in vars(args).items() if name.startswith(_DEST)}
    return engine_sections(values, source="the command line")


def _add(
    parser: argparse.ArgumentParser,
    group: argparse._ArgumentGroup,
    word: str,
    key: EngineKey,
    *,
    help: str,
    renamed: Renamed | None = None,
    dest: str | None = None,
) -> None:
    if word in parser._option_string_actions:
        return
    options: dict[str, Any] = {"dest": _DEST + (dest or key.name), "default": argparse.SUPPRESS, "help": help}
    if (renamed is not None and renamed.is_flag) or (key.kind is bool and not key.several):
        group.add_argument(word, action=argparse.BooleanOptionalAction, **options)
        return
    if key.several or (renamed is not None and renamed.rest is not None):
        options["nargs"] = "+"
    usual = {int: "N", float: "X", dict: "JSON"}.get(key.kind, "TEXT")
    options["metavar"] = "|".join(map(str, key.choices)) or usual
    group.add_argument(word, type=_TYPES.get(key.kind, key.kind), **options)


def _help(key: EngineKey) -> str:
    """The first sentence of what the key is."""
    first, dot, _ = key.help.partition(". ")
    return (first.rstrip(".") + ("." if dot else "")).replace("%", "%%")


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a JSON object is expected, got {text}") from None


def _count(text: str) -> int:
    """A whole number, as vLLM takes it too: 8k is 8,000, 8K 8,192; so with m and M, g and G."""
    unit = text[-1:]
    try:
        if unit not in _UNITS:
            return int(text)
        count = Decimal(text[:-1]) * _UNITS[unit]
        if count % 1 == 0:
            return int(count)
    except (ValueError, ArithmeticError):
        pass
    raise argparse.ArgumentTypeError(f"invalid whole number {text!r}; such as 8192, 8k (8,000) or 8K (8,192)")


_UNITS = {unit: base**power for base, units in ((1000, "kmg"), (1024, "KMG")) for power, unit in enumerate(units, 1)}
_TYPES: dict[type, Callable[[str], object]] = {dict: _json, int: _count}
