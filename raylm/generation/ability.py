"""What a model can do, and how it writes what is more than text."""

from __future__ import annotations

from typing import NamedTuple

from raylm.config.chat import ChatConfig
from raylm.errors import ConfigError
from raylm.generation.parsing import ModelFormat, model_format
from raylm.generation.parsing.formats import CHANNELS, HERMES
from raylm.text.chat import ChatTemplate

GENERATE = "generate"
"""The task of a model that continues texts; others come with models of other kinds."""


class Ability(NamedTuple):
    """What one model can be asked for. A route that it cannot serve is refused by name.

    tasks: what kinds of answers it gives. format: how it writes calls of tools and reasoning.
    """

    tasks: frozenset[str] = frozenset({GENERATE})
    format: ModelFormat = ModelFormat()

    @property
    def reasons(self) -> bool:
        """The model thinks before it answers, or can."""
        return self.format.reasoning is not None

    @property
    def bounds_thinking(self) -> bool:
        """The end of the model's thinking can be forced, so that it keeps a budget."""
        return self.format.reasoning not in (None, CHANNELS)


def ability_of(template: ChatTemplate, config: ChatConfig) -> Ability:
    """Of a model with this chat template. Raises ConfigError for a format that there is not."""
    try:
        found = model_format(template.source or "", calls=config.tools, reasoning=config.reasoning)
    except ValueError as error:
        raise ConfigError(f"chat: {error}") from None
    if config.tools == "auto" and not template.reads_tools:
        # It is told tools, and how to call them, in Hermes' words (text/tool_prompt.py).
        found = found._replace(calls=HERMES)
    return Ability(format=found)
