"""Configuration of the Serve application."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from raylm.config.base import FrozenConfig

# As browsers write it in the header Origin.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\sA-Z*,]+")

_HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")


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
    max_messages: int = Field(default=2048, ge=1)
    """Messages of one chat."""
    max_content_parts: int = Field(default=4096, ge=1)
    """Parts of all messages of one chat, where a message's content is a list."""
    max_stop_chars: int = Field(default=1024, ge=1)
    """Characters of one stop string. (A request may have 16 stop strings.)"""
    max_stop_token_ids: int = Field(default=256, ge=1)
    """Entries of `stop_token_ids`."""
    max_fields: int = Field(default=256, ge=1)
    """Fields of a body's outermost object, unknown ones included."""
    max_json_values: int = Field(default=32_768, ge=64, le=65_536)
    """Strings, numbers, objects, lists and literals in a body; the token ids of `prompt` do not count. Reading as many
    holds the event loop or its lock for some 15 ms."""
    max_json_depth: int = Field(default=64, ge=4, le=128)
    """Objects and lists inside each other in a body, the outermost included."""
    api_keys_file: str | None = None
    """A file with API keys, one a line, on every node; a line is a key, or JSON with key, tenant and scopes; lines that
    begin with # are comments. It is read again when it changes. With it, every route but probes and
    pages wants the header `Authorization: Bearer KEY`; without it, nothing does."""
    tenants_file: str | None = None
    """A file (.yaml) with the limits and terms of the keys' tenants, on every node, read again when it changes."""
    user_is_tenant: bool = False
    """Without keys: a request's field `user` names its tenant, for fair scheduling; any client can claim any name."""

    max_structure_bytes: int = Field(default=2**18, ge=64, le=2**20)
    """Bytes of one schema, regex, grammar or tag of structured output."""
    structure_timeout_s: float = Field(default=10.0, gt=0, le=600)
    """Seconds that one structured output may take to compile."""
    structure_memory_gib: float = Field(default=1.0, ge=0.0625)
    """Memory that one structured output may take to compile, in GiB."""
    structure_processes: int = Field(default=1, ge=1, le=64)
    """Processes of an ingress that compile structured output, for each model. The first starts with the first request
    that asks for it, unless structures_ahead."""
    structures_ahead: bool = False
    """Start such a process with each model, so that the first structured output does not wait for it (1 to 5 s)."""

    root_path: str = Field(default="", pattern=r"^(/[A-Za-z0-9._~-]+)*$")
    """Where a proxy in front shows the server, such as /llm, whether it takes that off or not. Only for an ingress
    whose route_prefix is /."""
    allowed_hosts: list[str] = []
    """Names of this server, such as llm.example.org or *.example.org, with which requests may ask models (header Host,
    without its port); any where there are none. Against pages whose own name leads to this server (DNS rebinding)."""
    cors_origins: list[str] = []
    """Web pages that may call the server from a browser, by origin, such as https://chat.example.org; ["*"] lets in
    all. Without any a browser keeps what the server answers from every page."""
    session_header: str = Field(default="x-session-id", max_length=100, pattern=r"^[a-z0-9-]+$")
    """Requests with the same value of this header go to the same engine while that one is not overloaded (with
    routing.policy prefix or load)."""
    route_headers: Literal["never", "asked", "always"] = "asked"
    """Whether answers say in the headers x-raylm-engine and x-raylm-route which engine they come from, and why: never,
    where the request has a header x-raylm-route, or always."""
    page: bool = True
    """Serve the pages for browsers: a chat at /, the API's document at /docs."""
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

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"{host!r} is no name in small letters, without a port, nor *. and one")
        return hosts

    @field_validator("api_keys_file", "tenants_file")
    @classmethod
    def _is_the_same_for_all(cls, path: str | None) -> str | None:
        if path is not None and not Path(path).is_absolute():
            raise ValueError("must be an absolute path, because every ingress replica reads it, wherever it runs")
        return path

    @model_validator(mode="after")
    def _has_tenants(self) -> HttpConfig:
        if self.tenants_file is not None and self.api_keys_file is None:
            raise ValueError("tenants_file wants api_keys_file: it is a key that says which tenant asks")
        if self.user_is_tenant and self.api_keys_file is not None:
            raise ValueError("user_is_tenant is for servers without api_keys_file: with keys, tenants are theirs")
        return self
