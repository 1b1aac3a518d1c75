"""Configuration of the Serve application."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from raylm.config.base import FrozenConfig


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

    @field_validator("api_keys_file")
    @classmethod
    def _is_the_same_for_all(cls, path: str | None) -> str | None:
        if path is not None and not Path(path).is_absolute():
            raise ValueError("must be an absolute path, because every ingress replica reads it, wherever it runs")
        return path
