"""Databases for stored responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from raylm.api.responses.tables import METADATA
from tests.support.postgres import running_postgres


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with running_postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
async def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """An empty database of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/responses.db"
        return
    url: str = request.getfixturevalue("postgres_url")
    yield url
    engine = create_async_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    async with engine.begin() as connection:
        await connection.run_sync(METADATA.drop_all)
    await engine.dispose()
