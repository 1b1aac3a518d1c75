"""Configuration of the MCP servers whose tools responses may use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from raylm.config.base import FrozenConfig
from raylm.errors import ConfigError

Label = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]


class McpServerConfig(FrozenConfig):
    """One MCP server, spoken to over streamable HTTP."""

    url: str = Field(pattern=r"^https?://[^\s@]+$")
    """Its endpoint, such as https://tools.example.org/mcp. A redirect to another origin is an error."""
    authorization_file: str | None = None
    """A file with the value of the header Authorization, such as `Bearer TOKEN`, on every node."""

    @field_validator("authorization_file")
    @classmethod
    def _is_the_same_for_all(cls, path: str | None) -> str | None:
        if path is not None and not Path(path).is_absolute():
            raise ValueError("must be an absolute path, because every ingress replica reads it, wherever it runs")
        return path

    def headers(self) -> dict[str, str]:
        """What every request to the server carries. Raises ConfigError when the file cannot be read."""
        if self.authorization_file is None:
            return {}
        try:
            return {"Authorization": Path(self.authorization_file).read_text(encoding="utf-8").strip()}
        except OSError as error:
            message = f"mcp: authorization_file is {self.authorization_file!r}, which cannot be read: {error.strerror}"
            raise ConfigError(message) from None


class McpConfig(FrozenConfig):
    """MCP servers, by the labels that requests name them by (`server_label`). Without any, requests that ask for MCP
    tools are refused."""

    servers: dict[Label, McpServerConfig] = {}
    timeout_s: float = Field(default=30.0, gt=0, le=600)
    """Seconds that a server may take to list its tools, and for one call."""
    max_output_bytes: int = Field(default=2**18, ge=1024, le=2**24)
    """Bytes of one answer of a server: its list of tools, or what a call gives."""
    max_rounds: int = Field(default=8, ge=1, le=100)
    """How often the model may call tools in one response; then it must answer without."""
