"""Configuration of stored responses (/v1/responses)."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, field_validator, model_validator

from raylm.config.base import FrozenConfig
from raylm.errors import ConfigError

_MIB = 2**20


class ResponsesConfig(FrozenConfig):
    """Where and for how long responses are kept, so that clients can fetch, continue and cancel them."""

    enabled: bool = True
    """Keep responses. Without it no request is stored: `store: true`, `background` and `previous_response_id` are
    refused."""
    url: str | None = None
    """The database: sqlite:////absolute/path.db, or postgresql://user@host/database. By default an SQLite file
    raylm/responses.db in the user's state folder ($XDG_STATE_HOME, by default ~/.local/state) of each node. Ingresses
    on several nodes need PostgreSQL, so that each finds the responses of the others. A password does not belong here,
    since Serve shows its configuration: see url_file."""
    url_file: str | None = None
    """A file that holds such a URL, on every node, in place of `url`; a password may be in it."""
    expiry_days: float = Field(default=30.0, gt=0, le=3650)
    """Days after its creation when a response is deleted."""
    max_tenant_mib: float = Field(default=256.0, gt=0)
    """What a tenant's responses may take, inputs and outputs together, in MiB. More are refused until some are deleted
    or expire."""

    @property
    def max_tenant_bytes(self) -> int:
        return int(self.max_tenant_mib * _MIB)

    @property
    def expiry_s(self) -> float:
        return self.expiry_days * 86_400

    def database_url(self) -> str:
        """The URL that holds. Raises ConfigError when url_file cannot be read or holds none."""
        if self.url is not None:
            return self.url
        if self.url_file is None:
            return f"sqlite:///{default_path()}"
        try:
            url = Path(self.url_file).read_text(encoding="utf-8").strip()
            return _checked(url, self.url_file)
        except OSError as error:
            raise ConfigError(
                f"responses.url_file is {self.url_file!r}, which cannot be read: {error.strerror}"
            ) from None
        except ValueError as error:
            raise ConfigError(f"responses.url_file: {error}") from None

    @field_validator("url")
    @classmethod
    def _is_a_database(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.password or parse_qs(parts.query).keys() & {"password", "sslpassword"}:
            raise ValueError("must not hold a password, because Serve shows its configuration; put the URL in url_file")
        return _checked(url, "it")

    @field_validator("url_file")
    @classmethod
    def _is_the_same_for_all(cls, path: str | None) -> str | None:
        if path is not None and not Path(path).is_absolute():
            raise ValueError("must be an absolute path, because every ingress replica reads it, wherever it runs")
        return path

    @model_validator(mode="after")
    def _has_one_url(self) -> ResponsesConfig:
        if self.url is not None and self.url_file is not None:
            raise ValueError("url and url_file exclude each other")
        return self


def default_path() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "raylm" / "responses.db"


def _checked(url: str, holder: str) -> str:
    """Raises ValueError, which does not repeat the URL: it may hold a password."""
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("//") and not rest.endswith("/"):
        return url
    if scheme == "postgresql" and rest:
        return url
    raise ValueError(f"{holder} must be sqlite:////absolute/path.db or postgresql://user@host/database")
