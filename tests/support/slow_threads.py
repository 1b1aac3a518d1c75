"""`--slow-threads main`, or `others`: some threads are held again and again, as a busy machine may hold any of them.

A test that hangs on which thread gets on first fails in one of the two, and passes nearly always without.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from time import sleep
from typing import Any

import pytest

_CALLS = 60
_PAUSE_S = 0.004
"""How long a slow thread is held each so many calls of functions."""
_MOST_S = 1.5
"""Of all pauses of a test."""


class SlowThreads:
    """Holds the main thread, or all others that Python starts."""

    def __init__(self, which: str) -> None:
        self._holds_main = which == "main"
        self._left_s = 0.0
        self._calls = threading.local()

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
        calls = self._calls.number = getattr(self._calls, "number", 0) + 1
        if calls % _CALLS or self._left_s <= 0:
            return
        if (threading.get_ident() == threading.main_thread().ident) == self._holds_main:
            self._left_s -= _PAUSE_S
            sleep(_PAUSE_S)


def pytest_configure(config: pytest.Config) -> None:
    if which := config.getoption("--slow-threads"):
        config.pluginmanager.register(SlowThreads(which))
