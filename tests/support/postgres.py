"""A real PostgreSQL of a test's own, from a package; it listens on a socket file alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp


@contextmanager
def running_postgres() -> Iterator[str]:
    """Its URL. Not below pytest's folder: PostgreSQL runs as another user where tests are root's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs', where there is no XDG_RUNTIME_DIR
        import pgserver

        server = pgserver.get_server(Path(mkdtemp(prefix="raylm-pg-")) / "data", cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
