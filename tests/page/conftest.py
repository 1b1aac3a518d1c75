"""A headless Chromium, and a page in it that must not run what it shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """For a module, not the session: while it runs, this thread can run no event loop of another test."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with api.sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        found = str(own) if own.exists() else next(filter(None, map(shutil.which, _NAMES)), None)
        if found is None:
            missing = pytest.fail if request.config.getoption("--require-browser") else pytest.skip
            missing("no Chromium: make test-page installs one")
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A new page. Any error of its scripts, and whatever the Content-Security-Policy had to stop, is a failure; so is a
    dialog, and a request to another host."""
    made = browser.new_page()
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(f"error: {error}"))
    made.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    made.on("console", lambda said: problems.append(f"console: {said.text}") if _is_bad(said.text) else None)
    made.on("request", lambda asked: problems.append(asked.url) if "//127.0.0.1:" not in asked.url else None)
    made.set_default_timeout(120_000)
    yield made
    made.close()
    assert problems == []


def _is_bad(text: str) -> bool:
    return "Content Security Policy" in text or "Trusted" in text or "Uncaught" in text
