"""Which engine gets a request."""

from __future__ import annotations

from collections.abc import Sequence

from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.engine.streams import Sequences
from raylm.errors import Overloaded
from raylm.serving.routing.engines import RoutedEngine

_RETRY_AFTER_S = 5.0


class ModelRouter:
    """Chooses an engine for each request of one version of a model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.since = 0.0
        """When the youngest replica of this version began."""
        self.engines: dict[str, RoutedEngine] = {}
        self.closed: str | None = None
        """Why no more requests are taken."""

    @property
    def usable(self) -> list[RoutedEngine]:
        return [engine for engine in list(self.engines.values()) if engine.is_usable]

    @property
    def fitness(self) -> tuple[bool, int, float]:
        """The greater, the better the version for the next request: the least busy engine counts, so that all are used
        while an upgrade goes on; then the younger version."""
        pressures = [engine.client.pressure for engine in self.usable]
        return bool(pressures), -min(pressures, default=0), self.since

    def generate(
        self, request_ids: Sequence[str], prompt_ids: list[int], params: SamplingParams, options: RequestOptions
    ) -> Sequences:
        """Generate on the least busy engine. Raises Overloaded when no engine is up or the router is closed, else as
        EngineClient does."""
        if self.closed is not None:
            raise Overloaded(self.closed, retry_after=_RETRY_AFTER_S)
        engines = self.usable
        if not engines:
            raise Overloaded(f"no engine serves {self.name!r} at the moment", retry_after=_RETRY_AFTER_S)
        chosen = min(engines, key=lambda engine: engine.client.pressure)
        return chosen.client.generate(request_ids, prompt_ids, params, options)
