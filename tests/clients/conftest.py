"""Real clients against the session's server."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def base_url(serve_url: str) -> str:
    """What OpenAI's clients take: http://127.0.0.1:PORT/v1."""
    return f"{serve_url}/v1"
