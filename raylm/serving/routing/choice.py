"""What is asked of a router, and what it answers."""

from __future__ import annotations

from typing import NamedTuple

from raylm.core.options import RequestOptions
from raylm.serving.routing.engines import RoutedEngine


class Ask(NamedTuple):
    """One prompt that needs an engine. `num_sequences`: how many are generated from it."""

    prompt_ids: list[int]
    options: RequestOptions
    num_sequences: int = 1


class Choice(NamedTuple):
    """An engine for it. `reason` says what decided, in a word; `matched_tokens` of the prompt are believed to be in its
    cache."""

    engine: RoutedEngine
    reason: str = "load"
    matched_tokens: int = 0
