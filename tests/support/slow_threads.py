"""`--slow-threads main`, or `others`: some threads are held again and again, as a busy machine may hold any of them.

A test whose outcome depends on which thread runs first mostly fails in one of the two, and rarely without them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from time import sleep
from typing import Any

import pytest

_EVENTS = 60
"""Calls and returns of functions from one pause of a thread to the next."""
_PAUSE_S = 0.004
_MOST_S = 1.5
"""All pauses of a test together."""


class SlowThreads:
    """Holds the main thread, or all others that Python starts."""

    def __init__(self, which: str) -> None:
        self._holds_main = which == "main"
        self._left_s = 0.0
        self._events = threading.local()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None]:
        self._left_s = _MOST_S
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            return (yield)
        finally:
            self._left_s = 0.0
            sys.setprofile(None)
            threading.setprofile(None)

    def _profile(self, *_: Any) -> None:
        events = self._events.number = getattr(self._events, "number", 0) + 1
        if events % _EVENTS or self._left_s <= 0:
            return
        if (threading.get_ident() == threading.main_thread().ident) == self._holds_main:
            self._left_s -= _PAUSE_S
            sleep(_PAUSE_S)


def pytest_configure(config: pytest.Config) -> None:
    if which := config.getoption("--slow-threads"):
        config.pluginmanager.register(SlowThreads(which))
