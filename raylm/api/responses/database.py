"""The database behind the store of responses: SQLite in a file, or PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateIndex, CreateTable

from raylm.api.responses.faults import StoreFull, StoreUnavailable
from raylm.api.responses.tables import METADATA
from raylm.log import get_logger

logger = get_logger(__name__)

_BUSY_S = 5
"""How long a transaction waits for another process's in SQLite, and a connection to PostgreSQL may take."""
_ANSWER_S = 15.0
"""A transaction that takes longer has failed."""
_CREATION_LOCK = 0x7261796C6D
_FULL = ("53100",)
_SQLITE_FULL = "disk is full"


class Database:
    """Transactions on one database. Raises StoreUnavailable or StoreFull, whatever its driver raised."""

    def __init__(self, engine: AsyncEngine, name: str) -> None:
        """`name` says in errors which database it is, without secrets."""
        self._engine = engine
        self._name = name

    @classmethod
    async def open(cls, url: str) -> Database:
        """Connect, and create the tables where there are none."""
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite":
            engine, name = await asyncio.to_thread(_sqlite, parsed)
        else:
            engine, name = _postgres(parsed)
        database = cls(engine, name)
        try:
            async with database.transaction() as connection:
                await _create_tables(connection)
        except BaseException:
            await engine.dispose()
            raise
        return database

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """Committed at the end of the block, rolled back by an exception.

        A block that writes must begin with a write: SQLite's lock is taken then, and what is read before it may be old.
        """
        try:
            async with asyncio.timeout(_ANSWER_S), self._engine.begin() as connection:
                yield connection
        except TimeoutError:
            raise self._unavailable(f"no answer for {_ANSWER_S:g} s") from None
        except (SQLAlchemyError, OSError) as error:
            raise self._fault(error) from error

    async def close(self) -> None:
        await self._engine.dispose()

    def _fault(self, error: Exception) -> StoreFull | StoreUnavailable:
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        if getattr(cause, "sqlstate", None) in _FULL or _SQLITE_FULL in str(cause):
            logger.error("the responses store (%s) has no room: %s", self._name, cause)
            return StoreFull("The responses store has no room left on its disk")
        return self._unavailable(" ".join(str(cause).split()))

    def _unavailable(self, why: str) -> StoreUnavailable:
        # Drivers' messages may name hosts and users: the log has them, the client does not.
        logger.error("the responses store (%s) failed: %s", self._name, why)
        return StoreUnavailable("The responses store cannot be used now; the server's log says why")


def _sqlite(url: URL) -> tuple[AsyncEngine, str]:
    path = Path(url.database or "")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Made here, since SQLite would let others read it. Its -wal and -shm get the mode of the file itself.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        path.chmod(0o600)
        _use_wal(path)
    except (OSError, sqlite3.Error) as error:
        logger.error("the responses store %s cannot be opened: %s", path, error)
        raise StoreUnavailable("The responses store cannot be opened; the server's log says why") from error
    # IMMEDIATE: a transaction that writes takes the lock with its first write, and waits for it there alone.
    arguments = {"timeout": _BUSY_S, "isolation_level": "IMMEDIATE"}
    engine = create_async_engine(url.set(drivername="sqlite+aiosqlite"), connect_args=arguments)
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    return engine, str(path)


def _use_wal(path: Path) -> None:
    """With a write-ahead log readers and a writer go on beside each other. The file keeps this setting."""
    until = time.monotonic() + _BUSY_S
    while True:
        connection = sqlite3.connect(path, timeout=_BUSY_S)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            # SQLite does not wait for another process that changes the setting at the same moment.
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        finally:
            connection.close()


def _prepare_sqlite(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    # A power cut may lose the last responses, never damage the file.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _postgres(url: URL) -> tuple[AsyncEngine, str]:
    if find_spec("psycopg") is None:
        logger.error("the responses store is in PostgreSQL, which needs the extra: pip install -e '.[postgres]'")
        raise StoreUnavailable("The responses store cannot be opened; the server's log says why")
    engine = create_async_engine(
        url.set(drivername="postgresql+psycopg"),
        connect_args={"connect_timeout": _BUSY_S},
        # A server that was started anew has closed the connections of before.
        pool_pre_ping=True,
        pool_size=8,
        pool_timeout=_ANSWER_S,
    )
    return engine, f"PostgreSQL at {url.host or 'a local socket'}"


async def _create_tables(connection: AsyncConnection) -> None:
    if connection.dialect.name == "postgresql":
        # IF NOT EXISTS is no protection from another ingress that creates them at the same moment.
        await connection.execute(text(f"SELECT pg_advisory_xact_lock({_CREATION_LOCK})"))
    for table in METADATA.sorted_tables:
        await connection.execute(CreateTable(table, if_not_exists=True))
        for index in table.indexes:
            await connection.execute(CreateIndex(index, if_not_exists=True))
