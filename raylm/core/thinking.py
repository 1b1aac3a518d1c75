"""Where a model's thinking begins and ends among its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from raylm.core import sampling_checks as checks
from raylm.errors import RequestRejected

MAX_MARK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ThinkingSection:
    """The marks around a model's thinking; every field is checked when the object is made.

    begin: token ids that begin a section; empty where a section begins in the prompt only.
    end: token ids that end it, at least one.
    begun: the prompt ends inside a section, as chat templates that write the begin mark do.

    Raises RequestRejected, naming the field, the value and the limit.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    begun: bool = False

    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            marks = checks.tokens(f"thinking.{name}", getattr(self, name), most=MAX_MARK_TOKENS)
            object.__setattr__(self, name, marks)
        checks.flag("thinking.begun", self.begun)
        if not self.end:
            raise RequestRejected("thinking.end must have at least 1 token, got none", param="thinking")
        if not self.begin and not self.begun:
            raise RequestRejected("thinking.begin must have at least 1 token unless it has begun", param="thinking")


def check_thinking(name: str, value: object) -> ThinkingSection:
    """A ThinkingSection, which has checked itself."""
    if not isinstance(value, ThinkingSection):
        raise RequestRejected(f"{name} must be a ThinkingSection, got {value!r:.300}", param=name)
    return value
