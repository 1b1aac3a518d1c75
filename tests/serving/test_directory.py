"""The Directory and an ingress's copy of it, without Ray; the engine is a fake one behind a real channel."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import zmq

from raylm.api.preparation import Models
from raylm.config.sampling import SamplingDefaults
from raylm.core.load import Load
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.engine.client import EngineClient
from raylm.errors import ConfigError, Overloaded, ServerStopped
from raylm.serving import catalog as catalog_module
from raylm.serving import directory as module
from raylm.serving.catalog import LiveCatalog
from raylm.serving.directory import Directory, EngineEntry, ModelEntry, ModelLimits, StartFailure
from raylm.serving.waking import Waker
from raylm.text.chat import ChatTemplate
from raylm.text.chat_settings import ChatSettings
from tests.support.channel_fakes import PacedExecutor, Served, until

OPTIONS = RequestOptions()


class Method:
    """A method as a handle's: `remote` calls it."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method


class Near:
    """The Directory as DirectoryClient gives it, but in this process."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self._directory, name))

    async def ask(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        return await call(self)


def model(name: str = "a", application: str = "app", *, path: str = "here", since: float = 1.0) -> ModelEntry:
    return ModelEntry(name, application, path, SamplingDefaults(), since)


def engine(engine_id: str, of: ModelEntry | None = None, *, served: Served | None = None) -> EngineEntry:
    address = served.server.address if served is not None else "tcp://127.0.0.1:1"
    key = served.server.public_key if served is not None else zmq.curve_keypair()[0]
    of = (of or model())._replace(limits=ModelLimits(128, 64))
    return EngineEntry(engine_id, of, "node", address, key, "ready", Load(0, 0, 0.0))


async def known(directory: Directory) -> list[tuple[str, str]]:
    return [(entry.name, entry.path) for entry in (await directory.watch(-1)).models]


@pytest.fixture
def applications(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Serve's applications, to change."""
    names = {"app", "other"}
    monkeypatch.setattr(module, "_QUIET_S", -1.0)
    monkeypatch.setattr(module, "_applications", lambda: set(names))
    return names


async def test_a_model_stays_known_without_engines_until_its_application_is_deleted(applications: set[str]) -> None:
    directory = Directory()
    await directory.know(model())
    await directory._forget_models()
    assert await known(directory) == [("a", "here")], "it starts"
    await directory.report(engine("1"))
    await directory.remove("1")
    await directory._forget_models()
    assert await known(directory) == [("a", "here")], "its engine has died"
    applications.remove("app")
    await directory._forget_models()
    assert await known(directory) == []


async def test_a_model_that_serves_is_not_forgotten_whatever_serve_says(applications: set[str]) -> None:
    directory = Directory()
    await directory.report(engine("1"))
    applications.clear()
    await directory._forget_models()
    assert await known(directory) == [("a", "here")]


async def test_serve_that_does_not_answer_deletes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUIET_S", -1.0)
    monkeypatch.setattr(module, "_applications", lambda: None)
    directory = Directory()
    await directory.know(model())
    await directory._forget_models()
    assert await known(directory) == [("a", "here")]


async def test_serve_is_not_asked_while_a_replica_starts(
    applications: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUIET_S", 60.0)
    applications.clear()
    directory = Directory()
    await directory.know(model())
    await directory._forget_models()
    assert await known(directory) == [("a", "here")]


async def test_an_application_that_serves_another_model_by_now_has_given_up_the_first(applications: set[str]) -> None:
    directory = Directory()
    await directory.report(engine("1"))
    await directory.report(engine("2", model("b", since=2.0)))
    await directory.know(model("c", "other"))
    await directory._forget_models()
    assert [name for name, _ in await known(directory)] == ["a", "b", "c"]
    await directory.remove("1")
    await directory._forget_models()
    assert [name for name, _ in await known(directory)] == ["b", "c"]


async def test_in_an_upgrade_the_younger_replica_says_what_a_model_is() -> None:
    directory = Directory()
    await directory.report(engine("1", model(path="old", since=1.0)))
    await directory.know(model(path="new", since=2.0))
    version = (await directory.watch(-1)).version
    await directory.report(engine("1", model(path="old", since=1.0)))
    await directory.know(model(path="new", since=3.0))
    assert await known(directory) == [("a", "new")]
    assert (await directory.watch(-1)).version == version, "ingresses have nothing to do again and again"


@pytest.fixture
async def catalogs() -> AsyncIterator[Callable[..., LiveCatalog]]:
    """Makes catalogs, and ends them."""
    made: list[LiveCatalog] = []
    loaders: list[Texts] = []

    def make(directory: Directory, texts: Texts) -> LiveCatalog:
        made.append(LiveCatalog(Near(directory), texts.load))
        loaders.append(texts)
        return made[-1]

    yield make
    for texts in loaders:
        texts.go_on.set()
    for catalog in made:
        catalog._watcher.cancel()
        for router in catalog._routers.values():
            for one in router.engines.values():
                await one.client.close()


class Tokenizer(str):
    """Stands for the text side of a model."""

    chat_template = ChatTemplate(None, {})


class Texts:
    """Loads tokenizers: the first attempt fails where it should."""

    def __init__(self, failures: int = 0, *, held: bool = False) -> None:
        self.loaded: list[str] = []
        self.go_on = threading.Event()
        if not held:
            self.go_on.set()
        self._failures = failures

    def load(self, model: ModelEntry) -> Any:
        path = model.path
        self.loaded.append(path)
        self.go_on.wait()
        if len(self.loaded) <= self._failures:
            raise ConfigError(f"model.path {path!r} does not exist")
        return Tokenizer(f"tokenizer of {path}")


async def test_a_model_is_listed_when_it_starts_and_gone_when_it_is_deleted(applications: set[str], catalogs) -> None:
    directory = Directory()
    catalog = catalogs(directory, Texts())
    assert catalog.names() == [] and not catalog.ready()
    await directory.know(model())
    await until(lambda: catalog.names() == ["a"])
    assert catalog.get("a") is None and not catalog.ready(), "it is starting"
    directory._made -= 60
    applications.clear()
    await directory._forget_models()
    await until(lambda: catalog.names() == [])


async def test_an_alias_finds_one_model_and_never_takes_the_name_of_another(catalogs) -> None:
    directory = Directory()
    catalog = catalogs(directory, Texts())
    await directory.know(model("a", since=1.0)._replace(aliases=("x", "b")))
    await directory.know(model("b", since=2.0)._replace(aliases=("x", "y")))
    await until(lambda: catalog.names() == ["a", "b"])
    assert catalog.aliases() == {"x": "a", "y": "b"}, "the older model keeps an alias"
    with pytest.raises(Overloaded, match="'y' cannot be asked yet: no engine is up"):
        Models(catalog).get("y")
    # A model that is deployed again may have others.
    await directory.know(model("a", since=3.0)._replace(aliases=("z",)))
    await until(lambda: catalog.aliases() == {"x": "b", "y": "b", "z": "a"})


async def test_why_a_model_does_not_start_is_told_until_it_does(catalogs) -> None:
    directory = Directory()
    catalog = catalogs(directory, Texts())
    for name in ("a", "b"):
        await directory.know(model(name))
    await until(lambda: catalog.names() == ["a", "b"])
    assert catalog.unready() == dict.fromkeys("ab", "no engine is up")
    await directory.know(model()._replace(failure=StartFailure("model.path is gone", at=1.0)))
    told = {"a": "its last start failed: model.path is gone", "b": "no engine is up"}
    await until(lambda: catalog.unready() == told)
    # Serve tries again.
    await directory.know(model(since=2.0))
    assert (await directory.watch(-1)).models[0].failure is not None
    with pytest.raises(Overloaded, match="'a' cannot be asked yet: its last start failed: model.path is gone"):
        Models(catalog).get("a")
    await directory.report(engine("1", model(since=2.0)))
    await until(lambda: catalog.unready()["a"] == "no engine can be reached")
    assert (await directory.watch(-1)).models[0].failure is None


async def test_another_chat_template_is_another_text_side(catalogs) -> None:
    directory, texts = Directory(), Texts()
    catalogs(directory, texts)
    await directory.know(model())
    await until(lambda: len(texts.loaded) == 1)
    await directory.know(model(since=2.0)._replace(chat=ChatSettings(template="{{ messages }}")))
    await until(lambda: texts.loaded == ["here", "here"])


async def test_in_an_upgrade_each_tokenizer_speaks_to_its_own_engines(catalogs) -> None:
    """Also where the new model never starts."""
    olds, news = Served(PacedExecutor(num_blocks=64)), Served(PacedExecutor(num_blocks=64))
    directory = Directory()
    for served in (olds, news):
        served.server.clients.allow(directory._keys.public)
    catalog = catalogs(directory, texts := Texts())
    old = model(path="old")
    await directory.report(engine("1", old, served=olds))
    await until(catalog.ready)
    new = model(path="new", since=2.0)._replace(sampling=SamplingDefaults(temperature=0.5))
    await directory.know(new)
    await until(lambda: len(texts.loaded) == 2 and all(side.text for side in catalog._texts.values()))
    serving = catalog.get("a")
    assert serving is not None and (serving.text, serving.sampling.temperature) == ("tokenizer of old", 1.0)

    await directory.report(engine("2", new, served=news))
    await until(lambda: catalog.get("a").text == "tokenizer of new" and catalog.ready())
    assert catalog.get("a").sampling.temperature == 0.5 and catalog.names() == ["a"]
    # A request that was read before goes to an engine of its own, each other one to the least busy engine of both.
    streams = [serving.generator.generate(["0"], [1], SamplingParams(max_tokens=1), OPTIONS)]
    sent = [asyncio.create_task(streams[0].admitted())]
    await asyncio.sleep(0)
    for number in range(1, 4):
        chosen = catalog.get("a").generator
        streams.append(chosen.generate([str(number)], [1], SamplingParams(max_tokens=1), OPTIONS))
        sent.append(asyncio.create_task(streams[-1].admitted()))
        await asyncio.sleep(0)
    live = {path: router.engines for (_, path, _), router in catalog._routers.items()}
    assert live["old"]["1"].client.num_live == live["new"]["2"].client.num_live == 2
    for task in sent:
        task.cancel()
    await asyncio.gather(*sent, return_exceptions=True)
    for stream in streams:
        await stream.aclose()

    await directory.remove("2")
    await until(lambda: catalog.get("a").text == "tokenizer of old")
    assert catalog.ready(), "the new one's engine is gone"
    directory._made -= 60
    await directory.report(engine("2", new, served=news))
    await directory.remove("1")
    await until(lambda: len(catalog._texts) == 1)
    assert catalog.get("a").text == "tokenizer of new"
    for served in (olds, news):
        served.executor.permits.release(100)
        served.stop()


async def test_a_young_directory_takes_no_model_away(catalogs) -> None:
    """It has died with all it knew, and the replicas have not all reported yet."""
    catalog = catalogs(first := Directory(), Texts())
    await first.know(model())
    await until(lambda: catalog.names() == ["a"])
    second = Directory()
    catalog._directory = Near(second)
    await second.know(model("b"))
    await first.know(model("late"))  # Ends the wait at the first one.
    await until(lambda: "b" in catalog.names())
    assert "a" in catalog.names()


async def test_a_tokenizer_that_is_not_there_is_tried_again(monkeypatch: pytest.MonkeyPatch, catalogs) -> None:
    monkeypatch.setattr("raylm.serving.catalog._LOAD_AGAIN_S", 0.0)
    directory, texts = Directory(), Texts(failures=2)
    catalog = catalogs(directory, texts)
    await directory.report(engine("1"))
    await until(lambda: catalog.get("a") is not None)
    assert texts.loaded == ["here"] * 3
    catalog.check()


async def test_an_engine_without_a_file_for_its_connection_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, catalogs
) -> None:
    failures = [zmq.ZMQError(errno.EMFILE)] * 2
    connect = catalog_module.EngineClient

    def failing(*arguments: Any, **keywords: Any) -> EngineClient:
        if failures:
            raise failures.pop()
        return connect(*arguments, **keywords)

    monkeypatch.setattr(catalog_module, "EngineClient", failing)
    directory = Directory()
    catalog = catalogs(directory, Texts())
    await directory.report(engine("1"))
    await until(lambda: catalog.engines("a"))
    assert not failures
    catalog.check()


async def test_an_endpoint_that_is_closed_ends_every_request_with_the_reason(catalogs) -> None:
    executor = PacedExecutor(num_blocks=64)
    served = Served(executor)
    directory = Directory()
    served.server.clients.allow(directory._keys.public)
    catalog = catalogs(directory, Texts())
    await directory.report(engine("1", served=served))
    await until(catalog.ready)
    serving = catalog.get("a")
    assert serving is not None
    stream = serving.generator.generate(["x"], [1, 2], SamplingParams(max_tokens=50, ignore_eos=True), OPTIONS)
    executor.permits.release()
    assert (await anext(stream)).request_id == "x"
    await directory.close("the server is shutting down", 10.0)
    with pytest.raises(ServerStopped, match="the server is shutting down"):
        while True:
            await anext(stream)
    with pytest.raises(Overloaded, match="the server is shutting down"):
        serving.generator.generate(["y"], [1], SamplingParams(), OPTIONS)
    assert not catalog.ready()
    executor.permits.release(100)
    await until(lambda: served.server.num_live == 0)
    served.stop()


async def test_an_ingress_that_is_added_waits_for_what_others_serve(catalogs) -> None:
    served = Served(PacedExecutor(num_blocks=64))
    directory, texts = Directory(), Texts(held=True)
    catalog = catalogs(directory, texts)
    await directory.know(model("b"))
    await until(lambda: catalog.names() == ["b"])
    assert catalog._has_caught_up(), "nobody serves it yet"
    served.server.clients.allow(directory._keys.public)
    await directory.report(engine("1", served=served))
    await until(lambda: any(router.usable for router in catalog._routers.values()))
    waiting = asyncio.create_task(catalog.caught_up(60.0))
    await asyncio.sleep(0.1)
    assert not waiting.done() and catalog.get("a") is None, "its tokenizer is being loaded"
    texts.go_on.set()
    await waiting
    assert catalog.get("a") is not None
    served.stop()


async def test_closing_waits_for_those_that_listen_and_no_longer_than_it_may() -> None:
    directory = Directory()
    deaf = asyncio.create_task(directory.watch((await directory.watch(-1)).version))
    await asyncio.sleep(0)
    await directory.close("enough", 0.05)
    assert (await deaf).closing == "enough"


class Calls:
    """Serve's handle: a call returns when a replica is there."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.there = asyncio.Event()

    async def __call__(self, application: str) -> None:
        self.asked.append(application)
        await self.there.wait()


async def test_the_log_says_once_that_an_application_is_woken(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls()
    calls.there.set()
    waker = Waker(calls)
    with caplog.at_level(logging.INFO, logger="raylm"):
        for number in range(1, 4):
            waker.wake("app")
            await until(lambda number=number: len(calls.asked) == number)
        waker.wake("other")
        await until(lambda: "other" in calls.asked)
    assert [record.args for record in caplog.records] == [("app",), ("other",)]


async def test_a_model_that_sleeps_is_listed_and_a_request_wakes_it(catalogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_applications", lambda: {"app"})
    served = Served(PacedExecutor(num_blocks=64))
    directory = Directory()
    served.server.clients.allow(directory._keys.public)
    catalog = catalogs(directory, Texts())
    calls = Calls()
    catalog._waker = Waker(calls)
    sleeper = model()._replace(may_sleep=True)
    await directory.report(engine("1", sleeper, served=served))
    await until(catalog.ready)
    await directory.remove("1")
    await until(lambda: not catalog.engines("a"))
    assert catalog.ready() and catalog.get("a") is not None, "it is asleep, not broken"
    waiting = [
        asyncio.create_task(catalog.get("a").generator.generate([name], [1], SamplingParams(), OPTIONS).admitted())
        for name in ("x", "y")
    ]
    await until(lambda: calls.asked)
    # A Directory that has just begun, and an ingress too, hear of the model from those who know it.
    second = Directory()
    catalog._directory = Near(second)
    await until(lambda: second._models)
    other = catalogs(second, Texts())
    await until(other.ready)
    assert other.get("a").max_model_len == 128
    served.server.clients.allow(second._keys.public)
    served.executor.permits.release(100)
    await second.report(engine("2", sleeper, served=served))
    await asyncio.wait_for(asyncio.gather(*waiting), 120)
    assert calls.asked == ["app"], "one call for all who wait"
    served.stop()
