"""Configuration of the Serve application."""

from __future__ import annotations

from pydantic import Field

from raylm.config.base import FrozenConfig


class HttpConfig(FrozenConfig):
    """The OpenAI HTTP face: what a request's body may hold."""

    strict: bool = False
    """Refuse fields that the API does not know and fields given twice; otherwise they are ignored, as OpenAI does."""
    max_body_bytes: int = Field(default=8 * 2**20, ge=1)
    """A longer body is refused with 413 before it is read to its end."""
    default_max_tokens: int = Field(default=16, ge=1)
    """max_tokens of /v1/completions where the client gives none (OpenAI's default); less where the model is full."""
    max_choices: int = Field(default=1024, ge=1)
    """Completions that one HTTP request may ask for: its prompts times n."""
