"""Names of modules in a quantisation's configuration, and which modules they mean. Without torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable

from pydantic_core import SchemaError, SchemaValidator, core_schema

from raylm.errors import ConfigError
from raylm.models.quantised.scheme import Quantisation, Scheme

REGEX = "re:"
MOST_PATTERNS = 256
"""Regular expressions and wildcards of one configuration; real ones have a few. Plain names may be many."""
_MAX_LENGTH = 1000
_CLASS = re.compile(r"[A-Z][A-Za-z0-9]*")
"""The name of a class of modules, such as Linear. Every module that has quantised parts is of such a class."""


class Names:
    """A list of names of modules. A plain name matches every path that holds it as whole parts ("lm_head", "mlp.gate",
    "model.layers.0"). "re:" precedes a regular expression that must match the beginning of a path. * and ? are
    wildcards of a whole path. The name of a class is no name of a module: see `means_all`."""

    def __init__(self, names: Iterable[str]) -> None:
        """Raises ConfigError for a name that cannot be read."""
        self._all = False
        self._plain: set[str] = set()
        self._tests: list[Callable[[str], bool]] = []
        for name in names:
            if name.startswith(REGEX):
                self._tests.append(_regex(name.removeprefix(REGEX)))
            elif any(mark in name for mark in "*?["):
                self._tests.append(re.compile(fnmatch.translate(_short(name))).match)  # type: ignore[arg-type]
            elif _CLASS.fullmatch(name):
                self._all = True
            else:
                self._plain.add(name)
        if len(self._tests) > MOST_PATTERNS:
            raise ConfigError(f"{len(self._tests)} names with wildcards; allowed: at most {MOST_PATTERNS}")

    def match(self, module: str) -> bool:
        """Whether the module, by its path in the checkpoint, is meant by its own name."""
        parts = module.split(".")
        ends = range(1, len(parts) + 1)
        if any(".".join(parts[i:j]) in self._plain for j in ends for i in range(j)):
            return True
        return any(test(module) for test in self._tests)

    @property
    def means_all(self) -> bool:
        """Whether the name of a class is in the list."""
        return self._all


class Schemes:
    """Which scheme a module has."""

    def __init__(self, quantisation: Quantisation) -> None:
        """Raises ConfigError where names decide and one of them cannot be read."""
        self._quantisation = quantisation
        schemes = {group.scheme for group in quantisation.groups}
        self._only = next(iter(schemes)) if len(schemes) == 1 else None
        # Names that decide nothing are not read: some have expressions that raylm does not know.
        decides = self._only is None and not quantisation.in_files
        self._groups = [(Names(group.targets), group) for group in quantisation.groups] if decides else []

    def of_stored(self, module: str) -> Scheme | None:
        """The scheme of a module that has quantised parts; None where the configuration does not say. Where there is
        only one scheme, every such module has it: lists have the names that the writing program gave to modules, which
        may differ from those in the files."""
        if self._only is not None:
            return self._only
        named = next((group for names, group in self._groups if names.match(module)), None)
        usual = next((group for names, group in self._groups if names.means_all or not group.targets), None)
        found = named or usual
        return found.scheme if found is not None else None


def _regex(pattern: str) -> Callable[[str], bool]:
    """Takes time linear in the text, whoever wrote the pattern; so it has no look-around."""
    schema = core_schema.str_schema(pattern=f"^(?:{_short(pattern)})", regex_engine="rust-regex")
    try:
        return SchemaValidator(schema).isinstance_python
    except SchemaError as error:
        reason = str(error).strip().splitlines()[-1].strip().removeprefix("error: ")
        raise ConfigError(f"{pattern!r:.200} is no regular expression that raylm reads: {reason}") from None


def _short(pattern: str) -> str:
    if len(pattern) > _MAX_LENGTH:
        raise ConfigError(f"a name of {len(pattern)} characters; allowed: at most {_MAX_LENGTH}")
    return pattern
