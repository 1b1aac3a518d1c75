"""ResponseStore: responses of /v1/responses in a database that all ingresses of an endpoint share.

A live response (queued, in_progress) has an owner: the ingress that runs it, which renews its lease. Only the owner
writes it. What ends a response from elsewhere (cancel, delete, another ingress that took it over) changes its row, and
the owner finds out at its next `renew`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import case, delete, func, insert, literal, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from raylm.api.responses.database import Database
from raylm.api.responses.faults import TenantFull
from raylm.api.responses.leases import LEASE_S, LIVE, UNKNOWN_AFTER_S
from raylm.api.responses.records import Conversation, NewResponse, Published, StoredResponse, Turn
from raylm.api.responses.tables import EVENTS, RESPONSES, TENANTS
from raylm.config.responses import ResponsesConfig

MAX_CHAIN = 1000
"""Responses that continue each other. A longer conversation must be sent as input."""
_PURGED_AT_ONCE = 200

_STORED = (
    *(RESPONSES.c.id, RESPONSES.c.tenant, RESPONSES.c.status, RESPONSES.c.background, RESPONSES.c.streamed),
    *(
        RESPONSES.c.previous_id,
        RESPONSES.c.attempts,
        RESPONSES.c.num_events,
        RESPONSES.c.request,
        RESPONSES.c.input,
        RESPONSES.c.body,
    ),
)


Given = ParamSpec("Given")
Result = TypeVar("Result")


def uncut(
    method: Callable[Concatenate[ResponseStore, Given], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[ResponseStore, Given], Coroutine[Any, Any, Result]]:
    """The method goes on to its end where its caller is cancelled: a connection that is cut off in a transaction is
    lost to its pool, and stays open."""

    @wraps(method)
    async def run(store: ResponseStore, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        task = asyncio.create_task(method(store, *args, **kwargs))
        store.unfinished.add(task)
        task.add_done_callback(store.unfinished.discard)
        return await asyncio.shield(task)

    return run


class ResponseStore:
    """Every method may raise StoreUnavailable or StoreFull. Times are seconds since the epoch; the clocks of ingresses
    must agree within a few seconds."""

    def __init__(
        self, database: Database, config: ResponsesConfig, owner: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        """`owner` names this ingress, differently from every other one that there ever was."""
        self._database = database
        self._config = config
        self._owner = owner
        self._clock = clock
        self.unfinished: set[asyncio.Task[Any]] = set()
        """Calls that are under way, their callers gone or not."""

    @classmethod
    async def open(
        cls, config: ResponsesConfig, owner: str, *, clock: Callable[[], float] = time.time
    ) -> ResponseStore:
        """Raises ConfigError as ResponsesConfig.database_url does."""
        return cls(await Database.open(config.database_url()), config, owner, clock=clock)

    async def close(self) -> None:
        await asyncio.gather(*self.unfinished, return_exceptions=True)
        await self._database.close()

    # What a client does.

    @uncut
    async def begin(self, new: NewResponse) -> None:
        """Store a response that this ingress runs from now on. Raises TenantFull."""
        now = self._clock()
        num_bytes = len(new.request) + len(new.input) + len(new.body)
        values = new._asdict() | {
            "created_at": now,
            "expires_at": now + self._config.expiry_s,
            "owner": self._owner,
            "lease_until": now + LEASE_S,
            "attempts": 0,
            "num_events": 0,
            "num_bytes": num_bytes,
        }
        async with self._database.transaction() as connection:
            await self._charge(connection, new.tenant, num_bytes)
            await connection.execute(insert(RESPONSES).values(values))

    @uncut
    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """None where the tenant has no such response (any more)."""
        async with self._database.transaction() as connection:
            rows = await connection.execute(select(*_STORED).where(*self._seen_by(tenant, response_id)))
            row = rows.one_or_none()
        return None if row is None else StoredResponse._make(row)

    @uncut
    async def delete(self, tenant: str, response_id: str) -> bool:
        """False where the tenant has no such response. One that runs is stopped by its owner."""
        async with self._database.transaction() as connection:
            found = await _delete(connection, *self._seen_by(tenant, response_id))
        return found > 0

    @uncut
    async def cancel(self, tenant: str, response_id: str) -> bool:
        """End a live background response; its owner stops within about RENEW_EVERY_S. False where there is none."""
        condition = (*self._seen_by(tenant, response_id), RESPONSES.c.background, RESPONSES.c.status.in_(LIVE))
        async with self._database.transaction() as connection:
            cancelled = await connection.execute(update(RESPONSES).where(*condition).values(status="cancelled"))
        return cancelled.rowcount > 0

    @uncut
    async def conversation(self, tenant: str, response_id: str, *, max_bytes: int) -> Conversation | None:
        """The response and those that it continues. None where the tenant has no such response."""
        chain = self._chain(tenant, response_id)
        table = RESPONSES.c
        num_bytes = func.length(table.input) + func.length(table.body)
        joined = RESPONSES.join(chain, table.id == chain.c.id)
        async with self._database.transaction() as connection:
            size = await connection.scalar(select(func.sum(num_bytes)).select_from(joined))
            if size is None:
                return None
            if size > max_bytes:
                return Conversation([], too_large=int(size))
            columns = (table.id, table.previous_id, table.status, table.input, table.body)
            rows = await connection.execute(select(*columns).select_from(joined).order_by(chain.c.depth.desc()))
            turns = [Turn(*row) for row in rows]
        return Conversation(turns, missing=turns[0].previous_id if turns else None)

    def _chain(self, tenant: str, response_id: str) -> Any:
        table, older = RESPONSES.c, RESPONSES.alias("older")
        first = select(table.id, table.previous_id, literal(0).label("depth")).where(
            *self._seen_by(tenant, response_id)
        )
        chain = first.cte("chain", recursive=True)
        step = select(older.c.id, older.c.previous_id, chain.c.depth + 1).where(
            older.c.id == chain.c.previous_id,
            older.c.tenant == tenant,
            older.c.expires_at > self._clock(),
            chain.c.depth < MAX_CHAIN - 1,
        )
        return chain.union_all(step)

    @uncut
    async def status(self, tenant: str, response_id: str) -> str | None:
        """None where the tenant has no such response (any more)."""
        async with self._database.transaction() as connection:
            found = await connection.scalar(select(RESPONSES.c.status).where(*self._seen_by(tenant, response_id)))
        return None if found is None else str(found)

    @uncut
    async def events(self, response_id: str, *, after: int) -> list[Published]:
        """Published events: the rows that hold any after `after`."""
        wanted = (
            select(EVENTS.c.first, EVENTS.c.last, EVENTS.c.data)
            .where(EVENTS.c.response_id == response_id, EVENTS.c.last > after)
            .order_by(EVENTS.c.first)
        )
        async with self._database.transaction() as connection:
            return [Published._make(row) for row in await connection.execute(wanted)]

    # What the owner of a response does.

    @uncut
    async def publish(self, response_id: str, first: int, last: int, data: bytes) -> bool:
        """Add events of these sequence numbers. False where this ingress no longer owns the live response."""
        change = {"num_events": last + 1, "num_bytes": RESPONSES.c.num_bytes + len(data)}
        async with self._database.transaction() as connection:
            tenant = await connection.scalar(self._own(response_id).values(change).returning(RESPONSES.c.tenant))
            if tenant is None:
                return False
            row = {"response_id": response_id, "first": first, "last": last, "data": data}
            await connection.execute(insert(EVENTS).values(row))
            await _add(connection, tenant, len(data))
        return True

    @uncut
    async def write(self, response_id: str, status: str, body: bytes) -> bool:
        """Replace the body. The tenant's limit does not stop it: what was generated is kept.

        False where this ingress no longer owns the live response: nothing is written then.
        """
        values = {"status": status}
        returned = (RESPONSES.c.tenant, func.length(RESPONSES.c.body).label("size"))
        async with self._database.transaction() as connection:
            rows = await connection.execute(self._own(response_id).values(values).returning(*returned))
            row = rows.one_or_none()
            if row is None:
                return False
            more = len(body) - row.size
            change = {"body": body, "num_bytes": RESPONSES.c.num_bytes + more}
            await connection.execute(update(RESPONSES).where(RESPONSES.c.id == response_id).values(change))
            await _add(connection, row.tenant, more)
        return True

    @uncut
    async def renew(self, response_ids: Collection[str]) -> set[str]:
        """Renew the leases of these live responses of this ingress, and return the ids of those: others have ended."""
        mine = (
            RESPONSES.c.id.in_(response_ids),
            RESPONSES.c.owner == self._owner,
            RESPONSES.c.status.in_(LIVE),
        )
        lease = update(RESPONSES).where(*mine).values(lease_until=self._clock() + LEASE_S)
        async with self._database.transaction() as connection:
            return set(await connection.scalars(lease.returning(RESPONSES.c.id)))

    @uncut
    async def release(self, response_id: str, *, after_s: float = 0.0) -> None:
        """Let another ingress take a live response over, in `after_s` seconds at the earliest. It counts as not tried
        by this one."""
        values = {
            "owner": "",
            "lease_until": self._clock() + after_s,
            "attempts": RESPONSES.c.attempts - case((RESPONSES.c.attempts > 0, 1), else_=0),
        }
        async with self._database.transaction() as connection:
            await connection.execute(self._own(response_id).values(values))

    # What every ingress does now and then.

    @uncut
    async def claim(self, limit: int, models: Collection[str]) -> list[StoredResponse]:
        """Take over live responses whose owner has let its lease end, at most `limit`: those of `models`, and others
        that nobody has taken for UNKNOWN_AFTER_S."""
        now = self._clock()
        table = RESPONSES.c
        is_ours = or_(table.model.in_(models), table.lease_until < now - UNKNOWN_AFTER_S)
        orphaned = (table.status.in_(LIVE), table.lease_until < now, is_ours)
        # An update that waited for another ingress's looks at the row again: it is no orphan then.
        some = select(table.id).where(*orphaned).order_by(table.lease_until).limit(limit)
        values = {"owner": self._owner, "lease_until": now + LEASE_S, "attempts": table.attempts + 1}
        taken = update(RESPONSES).where(table.id.in_(some), *orphaned).values(values).returning(*_STORED)
        async with self._database.transaction() as connection:
            return [StoredResponse._make(row) for row in await connection.execute(taken)]

    @uncut
    async def purge(self) -> int:
        """Delete expired responses; returns how many."""
        table = RESPONSES.c
        expired = (table.expires_at <= self._clock(), table.status.not_in(LIVE))
        total = 0
        while True:
            some = select(table.id).where(*expired).limit(_PURGED_AT_ONCE).with_for_update(skip_locked=True)
            async with self._database.transaction() as connection:
                deleted = await _delete(connection, table.id.in_(some))
            total += deleted
            if deleted < _PURGED_AT_ONCE:
                return total

    def _seen_by(self, tenant: str, response_id: str) -> tuple[Any, ...]:
        table = RESPONSES.c
        return table.id == response_id, table.tenant == tenant, table.expires_at > self._clock()

    def _own(self, response_id: str) -> Any:
        table = RESPONSES.c
        return update(RESPONSES).where(table.id == response_id, table.owner == self._owner, table.status.in_(LIVE))

    async def _charge(self, connection: AsyncConnection, tenant: str, num_bytes: int) -> None:
        upsert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
        new = upsert(TENANTS).values(tenant=tenant, num_bytes=0).on_conflict_do_nothing()
        await connection.execute(new)
        limit = self._config.max_tenant_bytes
        room = (TENANTS.c.tenant == tenant, TENANTS.c.num_bytes + num_bytes <= limit)
        charged = await connection.execute(
            update(TENANTS).where(*room).values(num_bytes=TENANTS.c.num_bytes + num_bytes)
        )
        if charged.rowcount == 0:
            used = await connection.scalar(select(TENANTS.c.num_bytes).where(TENANTS.c.tenant == tenant))
            raise TenantFull(
                f"The responses store holds {used} bytes of yours, and this request has {num_bytes}: at most {limit} "
                "are allowed (responses.max_tenant_mib). Delete responses, or send store=false"
            )


async def _delete(connection: AsyncConnection, *condition: Any) -> int:
    returned = (RESPONSES.c.id, RESPONSES.c.tenant, RESPONSES.c.num_bytes)
    gone = delete(RESPONSES).where(*condition).returning(*returned)
    rows = (await connection.execute(gone)).all()
    if not rows:
        return 0
    await connection.execute(delete(EVENTS).where(EVENTS.c.response_id.in_([row.id for row in rows])))
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[row.tenant] += row.num_bytes
    # In one order everywhere: PostgreSQL locks the rows of tenants one by one.
    for tenant, size in sorted(sizes.items()):
        await _add(connection, tenant, -size)
    return len(rows)


async def _add(connection: AsyncConnection, tenant: str, num_bytes: int) -> None:
    change = {"num_bytes": TENANTS.c.num_bytes + num_bytes}
    await connection.execute(update(TENANTS).where(TENANTS.c.tenant == tenant).values(change))
