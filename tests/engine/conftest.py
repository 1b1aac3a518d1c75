"""Threads of a busy machine may be held for seconds: here nobody takes that for the end of the other side."""

from __future__ import annotations

import pytest

from raylm.engine import client, server


@pytest.fixture(autouse=True)
def patient_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 60.0)
    monkeypatch.setattr(server, "_LAST_WORDS_S", 60.0)
