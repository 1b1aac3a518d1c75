"""One engine, as an ingress can send it requests."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from raylm.config.routing import RoutingConfig
from raylm.core.control import Control
from raylm.engine.client import EngineClient
from raylm.errors import Overloaded, RequestLost, RequestRejected
from raylm.log import get_logger
from raylm.serving.directory import EngineEntry
from raylm.serving.routing.prefixes import PrefixIndex
from raylm.serving.routing.selector import EngineView

logger = get_logger(__name__)

_FOLLOW_AGAIN_S = 0.5


class RoutedEngine:
    """One engine: what the Directory says of it, the connection to it, and what is known of its cache and its load."""

    def __init__(self, entry: EngineEntry, client: EngineClient, config: RoutingConfig | None = None) -> None:
        self.entry = entry
        self.client = client
        self.view = EngineView(entry.engine_id, client.backlog, entry.prefixes, config or RoutingConfig())
        self._following: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        return self.entry.model.name

    @property
    def engine_id(self) -> str:
        return self.entry.engine_id

    async def control(self, op: Control) -> list[str]:
        """Have the engine do this between two steps. Raises as EngineClient.control does."""
        return await self.client.control(op)

    @property
    def is_usable(self) -> bool:
        return self.entry.state == "ready" and self.client.is_connected

    def follow(self, wanted: bool) -> None:
        """Keep up with the engine's cached blocks from here on, or no longer."""
        index = self.view.index
        if wanted and index is not None and self._following is None:
            self._following = asyncio.create_task(self._follow(index))
        elif not wanted and self._following is not None:
            self._following.cancel()
            self._following = None

    async def close(self) -> None:
        """Drop the connection; live requests fail."""
        following = self._following
        self.follow(False)
        if following is not None:
            await asyncio.gather(following, return_exceptions=True)
        await self.client.close()

    async def _follow(self, index: PrefixIndex) -> None:
        try:
            while True:
                try:
                    async with aclosing(self.client.follow()) as items:
                        async for said in items:
                            index.apply(said)
                except RequestRejected as error:
                    logger.warning("engine %s tells nothing of its cached blocks: %s", self.entry.engine_id, error)
                    return
                except (Overloaded, RequestLost):
                    index.forget()
                    await asyncio.sleep(_FOLLOW_AGAIN_S)
        finally:
            index.forget()
