"""Configuration of the Serve application."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator

from raylm.config.base import FrozenConfig

# As browsers write it in the header Origin.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\sA-Z*,]+")


class HttpConfig(FrozenConfig):
    """The OpenAI HTTP face: who may ask, and what a request's body may hold."""

    strict: bool = False
    """Refuse fields that the API does not know and fields given twice; otherwise they are ignored, as OpenAI does."""
    max_body_bytes: int = Field(default=8 * 2**20, ge=1)
    """A longer body is refused with 413 before it is read to its end."""
    default_max_tokens: int = Field(default=16, ge=1)
    """max_tokens of /v1/completions where the client gives none (OpenAI's default); less where the model is full."""
    max_choices: int = Field(default=1024, ge=1)
    """Completions that one HTTP request may ask for: its prompts times n."""
    api_keys_file: str | None = None
    """A file with API keys, one a line, on every node; lines that begin with # are comments. It is read again when it
    changes. With it, all of /v1 wants the header `Authorization: Bearer KEY`; without it, nothing does."""

    cors_origins: list[str] = []
    """Web pages that may call the server from a browser, by origin, such as https://chat.example.org; ["*"] lets in
    all. Without any a browser keeps what the server answers from every page."""
    keep_alive_s: float = Field(default=15.0, gt=0, le=3600)
    """Seconds after which a stream that has nothing to say sends a comment, so that no proxy in between cuts it."""

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: list[str]) -> list[str]:
        if "*" in origins and len(origins) > 1:
            raise ValueError("'*' means every origin and must stand alone")
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin: scheme://host[:port] in small letters, without a path")
        return origins

    @field_validator("api_keys_file")
    @classmethod
    def _is_the_same_for_all(cls, path: str | None) -> str | None:
        if path is not None and not Path(path).is_absolute():
            raise ValueError("must be an absolute path, because every ingress replica reads it, wherever it runs")
        return path
