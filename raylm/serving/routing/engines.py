"""One engine, as an ingress can send it requests."""

from __future__ import annotations

from raylm.core.control import Control
from raylm.engine.client import EngineClient
from raylm.serving.directory import EngineEntry


class RoutedEngine:
    """One engine: what the Directory says of it, and the connection to it."""

    def __init__(self, entry: EngineEntry, client: EngineClient) -> None:
        self.entry = entry
        self.client = client

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
