"""An ingress that Serve has asked to stop: it finds out by itself, and ends the requests that outlive its drain."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from raylm.config.application import IngressConfig
from raylm.serving import ingress as module
from raylm.serving.ingress import OpenAIIngress


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What Serve's controller answers, in order, and then again and again."""
    answers = [False, False, True]

    def is_stopping(replica: object) -> bool:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    monkeypatch.setattr(module, "is_stopping", is_stopping)
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(module, "_UNCHECKED_S", -1.0)
    monkeypatch.setattr(
        module.serve, "get_replica_context", lambda: SimpleNamespace(replica_id=SimpleNamespace(unique_id="me"))
    )
    monkeypatch.setattr(module, "LiveCatalog", Catalog)
    monkeypatch.setattr(module, "DirectoryClient", lambda endpoint: None)
    return answers


class Catalog:
    def __init__(self, directory: object, load_text: object, load_grammars: object, routing: object) -> None:
        self.closed: list[str] = []

    def routers(self) -> list[object]:
        return []

    def stats(self) -> list[object]:
        return []

    async def caught_up(self, limit_s: float) -> None:
        pass

    def check(self) -> None:
        pass

    def close(self, reason: str) -> None:
        self.closed.append(reason)


async def made(config: IngressConfig) -> OpenAIIngress:
    ingress = OpenAIIngress.__new__(OpenAIIngress)
    await ingress.__init__(config)
    return ingress


async def test_the_requests_that_outlive_the_drain_are_ended(stopping: list[bool]) -> None:
    ingress = await made(IngressConfig(drain_timeout_s=0))
    await ingress._drain
    assert ingress._catalog.closed == ["the ingress is being stopped, and its drain of 0 s is over"]
    assert stopping == [True], "the controller was asked until it said so"


async def test_serve_is_not_asked_while_it_checks(stopping: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_UNCHECKED_S", 60.0)
    ingress = await made(IngressConfig())
    for _ in range(20):
        await asyncio.sleep(0.01)
        await ingress.check_health()
    assert len(stopping) == 3 and not ingress._catalog.closed
    ingress._drain.cancel()
