"""xgrammar's objects behind a few typed functions, loaded when they are first used.

Its Python package is not imported: that costs torch and transformers (2.7 s and 270 MB against 0.3 s and 45 MB in a
process without them), and all of it that raylm needs is in the C++ library.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from raylm.core.structure import StructuredOutput
from raylm.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Vocabulary(Protocol):
    """The tokens of a model, sorted for matching (xgrammar's TokenizerInfo)."""

    def serialize_json(self) -> object: ...


class Compiled(Protocol):
    """A grammar with its masks for one vocabulary; matchers share it."""

    def memory_size_bytes(self) -> int: ...


class Matcher(Protocol):
    """Where one text stands in a grammar."""

    def accept_token(self, token: int, debug: bool) -> bool: ...
    def fill_next_token_bitmask(self, bitmask: NDArray[np.int32], index: int, debug: bool) -> bool: ...
    def rollback(self, num_tokens: int) -> None: ...


class Batch(Protocol):
    """Fills masks of many matchers in threads of its own."""

    def batch_fill_next_token_bitmask(
        self, matchers: list[Matcher], bitmask: NDArray[np.int32], indices: list[int] | None, debug: bool
    ) -> None: ...


@cache
def _core() -> Any:
    loaded = sys.modules.get("xgrammar.base")
    if loaded is not None:
        return loaded._core
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise ConfigError("structured output needs xgrammar: pip install -e '.[structured]' in raylm's repository")
    # The package without its __init__; gone again afterwards, so that another's import of it finds it whole.
    package = ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["xgrammar"] = package
    try:
        importlib.import_module("xgrammar.load_binding")
        return importlib.import_module("xgrammar.base")._core
    finally:
        del sys.modules["xgrammar"]


def load() -> None:
    """Load the library now. Raises ConfigError where it is not installed."""
    _core()


def vocabulary(tokens: Sequence[bytes], size: int, stop_ids: Sequence[int]) -> Vocabulary:
    """The tokens by their bytes; an empty one is no text and never allowed. `size` is the width of the logits."""
    made: Vocabulary = _core().TokenizerInfo(list(tokens), 0, size, list(stop_ids), False)
    return made


def read_vocabulary(text: str) -> Vocabulary:
    """What serialize_json gave. Lets Python's lock go, which `vocabulary` holds for 0.1 s."""
    made: Vocabulary = _core().TokenizerInfo.deserialize_json(text)
    return made


CACHE_BYTES = 1 << 26
"""What a compiler keeps: masks of rules that grammars have in common too. 100 mixed JSON schemas compile in an eighth
of the time with it, with 128,256 tokens."""


class Compiler:
    """Compiles grammars for one vocabulary, without Python's lock."""

    def __init__(self, vocabulary: Vocabulary, threads: int = 1, cache_bytes: int = CACHE_BYTES) -> None:
        self._compiler = _core().GrammarCompiler(vocabulary, threads, True, cache_bytes)

    def compile(self, structure: StructuredOutput) -> Compiled:
        """Raises RuntimeError with xgrammar's words."""
        if structure.kind == "structural_tag":
            made: Compiled = self._compiler.compile_structural_tag(structure.value)
        else:
            made = self._compiler.compile_grammar_from_strings(structure.value, "root")
        return made


def matcher(compiled: Compiled, stop_ids: Sequence[int]) -> Matcher:
    """At the beginning of a text that ends with one of `stop_ids`; of none it never ends by a token."""
    made: Matcher = _core().GrammarMatcher(compiled, list(stop_ids) or None, not stop_ids, -1, None)
    return made


def batch(threads: int) -> Batch:
    made: Batch = _core().BatchGrammarMatcher(threads)
    return made
