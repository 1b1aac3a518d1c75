"""A server seen from the command line: its models, and its answers in a chat."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from typing import Any

import httpx

from raylm.errors import ConfigError, RaylmError

_TIMEOUT_S = 600.0
_CONNECT_TIMEOUT_S = 10.0


class ServerSpeaker:
    """A model on a server, asked over OpenAI's chat API."""

    def __init__(
        self,
        url: str,
        model: str | None,
        options: dict[str, Any],
        *,
        api_key: str | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        """`options` are fields of every request, `verify` says whom it trusts at an https address. Without a `model`,
        the first that the server lists."""
        self._client = connect(url, api_key=api_key, verify=verify)
        try:
            self.name = model or first_model(self._client)
        except BaseException:
            self._client.close()
            raise
        self._options = options

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = {"model": self.name, "messages": messages, "stream": True, **self._options}
        try:
            with self._client.stream("POST", "chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise RaylmError(_explain(response.status_code, response.read()))
                for line in response.iter_lines():
                    if line.startswith("data:") and (text := _text(line.removeprefix("data:").strip())):
                        yield text
        except httpx.HTTPError as error:
            raise RaylmError(f"the server at {self._client.base_url} did not answer: {error}") from None

    def close(self) -> None:
        self._client.close()


def connect(url: str, *, api_key: str | None = None, verify: ssl.SSLContext | bool = True) -> httpx.Client:
    """A client for the API at `url`, the address that ends with /v1; `verify`: whom it trusts there. Raises
    ConfigError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r} must be an address such as http://127.0.0.1:8000/v1")
    # Proxies of the environment are left out: what is meant is the server at this address.
    timeout = httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    return httpx.Client(
        base_url=url.rstrip("/") + "/", headers=headers, timeout=timeout, trust_env=False, verify=verify
    )


def first_model(client: httpx.Client) -> str:
    """The name of the first model that a server lists. Raises RaylmError."""
    try:
        response = client.get("models")
    except httpx.HTTPError as error:
        raise RaylmError(f"the server at {client.base_url} did not answer: {error}") from None
    if response.status_code != 200:
        raise RaylmError(_explain(response.status_code, response.content))
    names = [str(model["id"]) for model in response.json()["data"]]
    if not names:
        raise RaylmError(f"the server at {client.base_url} lists no models")
    return names[0]


def _text(data: str) -> str:
    """The text of one event."""
    if data == "[DONE]":
        return ""
    chunk = json.loads(data)
    if "error" in chunk:
        raise RaylmError(f"the server sent an error: {_message(chunk)}")
    return "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", []))


def _explain(status: int, body: bytes) -> str:
    try:
        message = _message(json.loads(body))
    except ValueError:
        message = body[:300].decode(errors="replace")
    return f"the server answered {status}: {message}"


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
