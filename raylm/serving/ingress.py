"""OpenAIIngress: the HTTP face as a Serve deployment."""

from __future__ import annotations

from typing import Any

from raylm import log
from raylm.config.application import IngressConfig
from raylm.config.source import locate
from raylm.serving.catalog import LiveCatalog
from raylm.serving.directory import DirectoryClient
from raylm.text.processor import TextProcessor


class OpenAIIngress:
    """Text, routing and HTTP. It finds engines through its endpoint's Directory and talks to them over their own
    channel, never through Serve handles."""

    async def __init__(self, config: IngressConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        log.configure()
        self._config = config
        self._catalog = LiveCatalog(DirectoryClient(config.endpoint), _load_text)

    async def check_health(self) -> None:
        """An ingress is healthy without engines (it answers 503 until they are there), not without its catalog."""
        self._catalog.check()

    def __serve_build_asgi_app__(self) -> Any:
        from raylm.serving.http import build_http_app

        return build_http_app(self._catalog, self._config.http)


def _load_text(path: str) -> TextProcessor:
    return TextProcessor.load(locate(path))
