"""OpenAIIngress: the HTTP face as a Serve deployment."""

from __future__ import annotations

from typing import Any

from raylm import log
from raylm.config.application import AppConfig
from raylm.config.source import locate
from raylm.openai.served_model import Text
from raylm.serving.catalog import LiveCatalog
from raylm.text.processor import TextProcessor


class OpenAIIngress:
    """Text, routing and HTTP. It talks to engines over its own channel, never through Serve handles."""

    async def __init__(self, config: AppConfig, directory: str, models: list[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """`models` are Serve's handles of the model deployments; they are here only so that Serve deploys them."""
        log.configure()
        self._config = config
        sources = {model.engine.model.served_name: locate(model.engine.model.path) for model in config.models}
        texts: dict[str, Text] = {name: TextProcessor.load(source) for name, source in sources.items()}
        sampling = {model.engine.model.served_name: model.engine.model.sampling_defaults for model in config.models}
        self._catalog = LiveCatalog(texts, sampling, directory)

    async def check_health(self) -> None:
        """An ingress is healthy without engines (it answers 503 until they are there), not without its catalog."""
        self._catalog.check()

    def __serve_build_asgi_app__(self) -> Any:
        from raylm.serving.http import build_http_app

        return build_http_app(self._catalog, self._config.ingress.http)
