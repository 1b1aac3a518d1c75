"""The store of responses, in SQLite and in a real PostgreSQL: two stores on one database are two ingresses."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import stat
from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy

from raylm.api.responses.database import Database
from raylm.api.responses.faults import StoreFull, StoreUnavailable, TenantFull
from raylm.api.responses.leases import LEASE_S, UNKNOWN_AFTER_S
from raylm.api.responses.records import NewResponse
from raylm.api.responses.store import ResponseStore
from raylm.api.responses.tables import EVENTS, RESPONSES, TENANTS
from raylm.config.responses import ResponsesConfig


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Place:
    """One database, and ingresses on it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = Clock()
        self._stores: list[ResponseStore] = []

    async def store(self, owner: str = "one", **config: Any) -> ResponseStore:
        store = await ResponseStore.open(ResponsesConfig(url=self.url, **config), owner, clock=self.clock)
        self._stores.append(store)
        return store

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


@pytest.fixture
async def place(database_url: str) -> AsyncIterator[Place]:
    place = Place(database_url)
    yield place
    await place.close()


def new(name: str = "resp_1", tenant: str = "acme", **changes: Any) -> NewResponse:
    response = NewResponse(
        name, tenant, "tiny", "in_progress", False, False, None, b'{"model":"m"}', b'["hi"]', b'{"id":"x"}'
    )
    return response._replace(**changes)


async def charged(store: ResponseStore, tenant: str = "acme") -> int:
    async with store._database.transaction() as connection:
        used = await connection.scalar(sqlalchemy.select(TENANTS.c.num_bytes).where(TENANTS.c.tenant == tenant))
    return used or 0


async def count(store: ResponseStore, table: sqlalchemy.Table) -> int:
    async with store._database.transaction() as connection:
        return await connection.scalar(sqlalchemy.select(sqlalchemy.func.count()).select_from(table)) or 0


async def test_a_response_is_its_tenants(place):
    store = await place.store()
    await store.begin(new())
    found = await (await place.store("two")).get("acme", "resp_1")
    assert found is not None
    assert found[:8] == ("resp_1", "acme", "in_progress", False, False, None, 0, 0)
    assert (found.request, found.input, found.body) == (b'{"model":"m"}', b'["hi"]', b'{"id":"x"}')
    assert await store.get("other", "resp_1") is None
    assert await store.get("acme", "resp_2") is None
    assert await store.conversation("other", "resp_1", max_bytes=1000) is None
    assert not await store.delete("other", "resp_1")
    assert await store.delete("acme", "resp_1")
    assert await store.get("acme", "resp_1") is None
    assert not await store.delete("acme", "resp_1")


async def test_only_its_owner_writes_a_response_and_only_until_its_end(place):
    one, two = await place.store("one"), await place.store("two")
    await one.begin(new())
    assert not await two.write("resp_1", "completed", b"{}")
    assert not await two.publish("resp_1", 0, 0, b"x")
    assert await one.write("resp_1", "completed", b'{"id":"y"}')
    assert not await one.write("resp_1", "failed", b"{}")
    found = await two.get("acme", "resp_1")
    assert (found.status, found.body) == ("completed", b'{"id":"y"}')


async def test_a_conversation_is_read_from_its_beginning(place):
    store = await place.store()
    previous = None
    for number in range(3):
        await store.begin(new(f"resp_{number}", previous_id=previous, input=json.dumps([number]).encode()))
        assert await store.write(f"resp_{number}", "completed", b"{%d}" % number)
        previous = f"resp_{number}"
    talk = await store.conversation("acme", "resp_2", max_bytes=1000)
    assert [(turn.input, turn.body) for turn in talk.turns] == [(b"[0]", b"{0}"), (b"[1]", b"{1}"), (b"[2]", b"{2}")]
    assert talk.missing is None
    large = await store.conversation("acme", "resp_2", max_bytes=17)
    assert large.turns == [] and large.too_large == 18
    await store.delete("acme", "resp_0")
    cut = await store.conversation("acme", "resp_2", max_bytes=1000)
    assert [turn.id for turn in cut.turns] == ["resp_1", "resp_2"]
    assert cut.missing == "resp_0"


async def test_a_conversation_never_crosses_tenants(place):
    store = await place.store()
    await store.begin(new("resp_1", "other"))
    await store.begin(new("resp_2", "acme", previous_id="resp_1"))
    talk = await store.conversation("acme", "resp_2", max_bytes=1000)
    assert [turn.id for turn in talk.turns] == ["resp_2"]
    assert talk.missing == "resp_1"


async def test_an_expired_response_is_not_returned_and_then_deleted(place):
    store = await place.store(expiry_days=1)
    await store.begin(new())
    await store.publish("resp_1", 0, 2, b"data")
    await store.begin(new("live"))
    await store.write("resp_1", "completed", b"{}")
    place.clock.now += 86_399
    assert await store.get("acme", "resp_1") is not None
    assert await store.purge() == 0
    place.clock.now += 1
    assert await store.get("acme", "resp_1") is None
    assert await store.conversation("acme", "resp_1", max_bytes=1000) is None
    assert not await store.delete("acme", "resp_1")
    # What still runs is not pulled away from under its owner, but is not shown either.
    assert await store.purge() == 1
    assert await count(store, RESPONSES) == 1
    assert await count(store, EVENTS) == 0
    await store.write("live", "failed", b"{}")
    assert await store.purge() == 1
    assert await charged(store) == 0


async def test_two_ingresses_purge_at_once(place):
    one, two = await place.store("one", expiry_days=1), await place.store("two", expiry_days=1)
    for number in range(450):
        await one.begin(new(f"resp_{number}", tenant=f"tenant-{number % 3}", status="completed"))
    place.clock.now += 2 * 86_400
    assert sum(await asyncio.gather(one.purge(), two.purge())) + await one.purge() == 450
    assert [await charged(one, f"tenant-{number}") for number in range(3)] == [0, 0, 0]


async def test_a_tenants_bytes_are_counted_and_limited(place):
    limit = 1000
    store = await place.store(max_tenant_mib=limit / 2**20)
    await store.begin(new(input=b"i" * 500, request=b"", body=b""))
    with pytest.raises(TenantFull, match=r"holds 500 bytes of yours, and this request has 501: at most 1000 .*mib"):
        await store.begin(new("resp_2", input=b"i" * 501, request=b"", body=b""))
    assert await store.get("acme", "resp_2") is None
    # Another tenant has its own room; an output is kept though it goes beyond the limit.
    await store.begin(new("resp_3", "other", input=b"i" * 501))
    assert await store.publish("resp_1", 0, 9, b"e" * 100)
    assert await store.write("resp_1", "completed", b"b" * 600)
    assert await charged(store) == 1200
    with pytest.raises(TenantFull):
        await store.begin(new("resp_2"))
    await store.delete("acme", "resp_1")
    assert await charged(store) == 0
    await store.begin(new("resp_2"))


async def test_bytes_are_right_after_many_at_once(place):
    """Two ingresses write responses of one tenant at the same time; the limit holds to the byte."""
    ingresses = [await place.store(name, max_tenant_mib=1000 / 2**20) for name in ("one", "two")]
    requests = [
        ingresses[number % 2].begin(new(f"resp_{number}", request=b"", input=b"x" * 100, body=b""))
        for number in range(24)
    ]
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert sum(result is None for result in results) == 10
    assert all(isinstance(result, TenantFull) for result in results if result is not None)
    assert await charged(ingresses[0]) == 1000
    assert await count(ingresses[0], RESPONSES) == 10


async def test_cancel_and_delete_reach_the_owner_through_its_lease(place):
    one, two = await place.store("one"), await place.store("two")
    for name in ("resp_1", "resp_2", "resp_3"):
        await one.begin(new(name, background=True))
    await one.begin(new("foreground"))
    every = ["resp_1", "resp_2", "resp_3", "foreground"]
    assert await one.renew(every) == set(every)
    assert await two.renew(every) == set()
    assert await two.cancel("acme", "resp_1")
    assert not await two.cancel("other", "resp_2")
    assert not await two.cancel("acme", "foreground")
    assert await two.delete("acme", "resp_2")
    assert await one.renew(every) == {"resp_3", "foreground"}
    assert (await one.get("acme", "resp_1")).status == "cancelled"
    assert not await one.write("resp_1", "completed", b"{}")
    assert not await two.cancel("acme", "resp_1")


async def test_another_ingress_takes_over_when_the_lease_has_ended(place):
    one, two = await place.store("one"), await place.store("two")
    await one.begin(new(background=True))
    place.clock.now += LEASE_S - 1
    assert await two.claim(10, ["tiny"]) == []
    assert await one.renew(["resp_1"]) == {"resp_1"}
    place.clock.now += LEASE_S - 1
    assert await two.claim(10, ["tiny"]) == []
    place.clock.now += 2
    (taken,) = await two.claim(10, ["tiny"])
    assert (taken.id, taken.attempts, taken.request) == ("resp_1", 1, b'{"model":"m"}')
    assert await one.renew(["resp_1"]) == set()
    assert not await one.write("resp_1", "completed", b"{}")
    assert await two.write("resp_1", "completed", b"{}")


async def test_a_response_of_another_model_is_left_to_others_for_a_while(place):
    one, two = await place.store("one"), await place.store("two")
    await one.begin(new(background=True))
    place.clock.now += LEASE_S + 1
    assert await two.claim(10, ["other"]) == []
    assert await two.claim(10, []) == []
    place.clock.now += UNKNOWN_AFTER_S
    assert len(await two.claim(10, ["other"])) == 1


async def test_an_orphan_is_taken_once(place):
    one = await place.store("dead")
    others = [await place.store(name) for name in ("two", "three", "four")]
    for number in range(30):
        await one.begin(new(f"resp_{number}", background=True))
    place.clock.now += LEASE_S + 1
    taken = await asyncio.gather(*[store.claim(limit, ["tiny"]) for store in others for limit in (4, 4, 4)])
    ids = [response.id for responses in taken for response in responses]
    assert len(ids) == len(set(ids)) > 0
    while len(ids) < 30:
        more = await others[0].claim(100, ["tiny"])
        assert more
        ids += [response.id for response in more]
    assert sorted(ids) == sorted(f"resp_{number}" for number in range(30))


async def test_what_an_ingress_gives_up_can_be_taken_at_once_or_later(place):
    one, two = await place.store("one"), await place.store("two")
    await one.begin(new("now", background=True))
    await one.begin(new("later", background=True))
    await one.release("now")
    await one.release("later", after_s=5)
    place.clock.now += 1
    assert [response.id for response in await two.claim(10, ["tiny"])] == ["now"]
    place.clock.now += 5
    assert [response.id for response in await two.claim(10, ["tiny"])] == ["later"]


async def test_events_are_read_from_any_number_on(place):
    one, two = await place.store("one"), await place.store("two")
    await one.begin(new(background=True))
    assert await one.publish("resp_1", 0, 4, b"first")
    assert await one.publish("resp_1", 5, 5, b"second")
    assert await two.events("resp_1", after=-1) == [(0, 4, b"first"), (5, 5, b"second")]
    assert await two.events("resp_1", after=3) == [(0, 4, b"first"), (5, 5, b"second")]
    assert await two.events("resp_1", after=4) == [(5, 5, b"second")]
    assert await two.events("resp_1", after=5) == []
    assert (await two.get("acme", "resp_1")).num_events == 6


async def test_tables_are_made_once_by_many(place):
    stores = await asyncio.gather(*[place.store(f"ingress-{number}") for number in range(8)])
    await asyncio.gather(*[store.begin(new(f"resp_{number}")) for number, store in enumerate(stores)])
    assert await count(stores[0], RESPONSES) == 8


async def test_sqlite_files_are_for_their_owner_alone(tmp_path):
    path = tmp_path / "deep" / "responses.db"
    before = os.umask(0)
    try:
        path.parent.mkdir()
        path.touch(0o666)
        store = await ResponseStore.open(ResponsesConfig(url=f"sqlite:///{path}"), "one")
        await store.begin(new())
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
        await store.close()
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(["responses.db", "responses.db-wal", "responses.db-shm"], 0o600)


async def test_a_full_disk_is_a_clear_error(tmp_path):
    store = await ResponseStore.open(ResponsesConfig(url=f"sqlite:///{tmp_path}/responses.db"), "one")

    def no_more_pages(connection: Any, record: object, proxy: object) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA max_page_count=40")
        cursor.close()

    sqlalchemy.event.listen(store._database._engine.sync_engine, "checkout", no_more_pages)
    await store.begin(new())
    with pytest.raises(StoreFull, match="The responses store has no room left on its disk"):
        await store.begin(new("resp_2", input=b"x" * 10**6))
    # What is there can still be read, and the bytes of what failed are not charged.
    assert await store.get("acme", "resp_1") is not None
    assert await charged(store) == len(new().request + new().input + new().body)
    await store.close()


async def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match="The responses store cannot be opened"):
        await ResponseStore.open(ResponsesConfig(url=f"sqlite:///{tmp_path}/file/responses.db"), "one")


async def test_a_file_that_is_no_database_is_a_clear_error(tmp_path, caplog):
    (tmp_path / "responses.db").write_bytes(b"no database" * 100)
    with pytest.raises(StoreUnavailable, match="The responses store cannot be opened"):
        await ResponseStore.open(ResponsesConfig(url=f"sqlite:///{tmp_path}/responses.db"), "one")
    assert "file is not a database" in caplog.text


async def test_a_caller_that_is_cancelled_loses_no_connection(place):
    """One that is lost warns when it is collected, and warnings are errors."""
    store = await place.store()
    for turns in range(0, 60, 3):
        task = asyncio.create_task(store.begin(new(f"resp_{turns}")))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await store.close()
    gc.collect()
    again = await place.store("two")
    # A task that had not begun stored nothing; the others stored all of theirs.
    assert [await again.get("acme", f"resp_{turns}") is not None for turns in range(3, 60, 3)] == [True] * 19
    assert await charged(again) == await count(again, RESPONSES) * 29


async def test_a_database_that_goes_away_and_comes_back(postgres_url):
    store = await ResponseStore.open(ResponsesConfig(url=postgres_url), "one")
    await store.begin(new("survivor"))
    others = "pid <> pg_backend_pid() AND backend_type = 'client backend'"
    ends = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"
    killer = await Database.open(postgres_url)
    async with killer.transaction() as connection:
        await connection.execute(sqlalchemy.text(ends))
    await killer.close()
    assert await store.get("acme", "survivor") is not None
    assert await store.delete("acme", "survivor")
    await store.close()


async def test_a_database_that_is_not_there_is_a_clear_error(tmp_path, caplog):
    url = f"postgresql://someone:secret@/raylm?host={tmp_path}"
    (tmp_path / "url").write_text(url + "\n")
    with pytest.raises(StoreUnavailable) as error:
        await ResponseStore.open(ResponsesConfig(url_file=str(tmp_path / "url")), "one")
    assert str(error.value) == "The responses store cannot be used now; the server's log says why"
    assert "secret" not in caplog.text
