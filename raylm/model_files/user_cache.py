"""Where raylm keeps what it can make or fetch again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """raylm/NAME in the user's cache folder ($XDG_CACHE_HOME, by default ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "raylm" / name
