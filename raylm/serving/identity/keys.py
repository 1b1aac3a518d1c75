"""API keys: who may ask, and for what. A file holds them, one a line, and is read again when it changes."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec

from raylm.api.errors import HttpError
from raylm.api.identity import INFERENCE, SCOPES, Identity
from raylm.errors import ConfigError
from raylm.serving.identity.watch import WatchedFile

FIELD = "http.api_keys_file"
_CHALLENGE = ((b"www-authenticate", b"Bearer"),)
_TENANT_DIGITS = 16
"""Hexadecimal digits of a key's hash that make the tenant of a key whose line names none."""


class ApiKeys:
    """The keys in a file as it is now, a second old at most.

    A file that can no longer be read, or that holds no keys, leaves the last ones in force: half of a rotation must
    lock nobody out, and must let nobody in. Only hashes are kept, and no log line or error says what a key is.
    """

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds. Raises ConfigError when the file holds no keys."""
        self._path = path
        self._identities: dict[bytes, Identity] = {}
        self._file = WatchedFile(path, "API keys", self._take, clock=clock)

    def identify(self, headers: Mapping[bytes, bytes]) -> Identity:
        """Whose key a request brings: the header Authorization is `Bearer KEY`, or x-api-key is KEY, as Anthropic's
        clients write it. Raises HttpError 401 where it is none of the keys."""
        digest = sha256(_given(headers)).digest()
        self._file.look()
        # All are compared, whichever it is, and in constant time: how long it takes tells nothing of the keys.
        found = [who for known, who in self._identities.items() if hmac.compare_digest(digest, known)]
        if not found:
            raise _unauthorized("Incorrect API key: it is none of this server's keys")
        return found[0]

    def _take(self) -> int:
        self._identities = {sha256(key).digest(): who for key, who in _read(self._path, FIELD).items()}
        return len(self._identities)


def check_scope(identity: Identity, scope: str) -> None:
    """Raise HttpError 403 where a key is not good for `scope`."""
    if scope not in identity.scopes:
        has = ", ".join(sorted(identity.scopes))
        message = f"This API key may not do this: it lacks the scope {scope!r}, it has {has}"
        raise HttpError(403, message, code="missing_scope")


def read_keys(path: str, *, field: str = FIELD) -> list[str]:
    """The keys in a file. Raises ConfigError, which names the `field` that the path comes from, when there are none."""
    return [key.decode() for key in _read(path, field)]


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    key = given.strip() if scheme.lower() == b"bearer" else b""
    key = key or headers.get(b"x-api-key", b"").strip()
    if not key:
        raise _unauthorized("An API key is required; send it in the header Authorization, as 'Bearer KEY'")
    return key


_WRONG_ENTRY = (
    'is not an entry; one is {"key": KEY, "scopes": [SCOPE, ...], "tenant": TENANT}: a key of printable ASCII without '
    f"spaces, at least one scope of {', '.join(sorted(SCOPES))}, a tenant of up to 100 letters, digits, '.', '_', '-'; "
    "scopes and tenant may be left out"
)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A line that says more of a key than what it is. tenant: by default one of the key's own."""

    key: Annotated[str, msgspec.Meta(pattern=r"^[!-~]+\Z")]
    scopes: tuple[str, ...] = (INFERENCE,)
    tenant: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,100}\Z")] | None = None


def _read(path: str, field: str) -> dict[bytes, Identity]:
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{field} is {path!r}, which cannot be read: {error.strerror}") from None
    keys: dict[bytes, Identity] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith(b"#"):
            continue
        try:
            key, identity = _entry(text) if text.startswith(b"{") else _plain(text)
            if keys.setdefault(key, identity) != identity:
                raise ValueError("has a key of an earlier line, with another tenant or other scopes")
        except ValueError as error:
            raise ConfigError(f"{field} is {path!r}, whose line {number} {error}") from None
    if not keys:
        raise ConfigError(f"{field} is {path!r}, which holds no keys; it must hold one at least, one a line")
    return keys


def _plain(line: bytes) -> tuple[bytes, Identity]:
    """A key alone. Raises ValueError, without what the line holds."""
    key, *rest = line.split(maxsplit=1)
    if not all(0x21 <= byte <= 0x7E for byte in key) or not all(text.startswith(b"#") for text in rest):
        raise ValueError(
            "is not a key; a line holds one, in printable ASCII and without spaces, and a # comment or nothing after it"
        )
    return key, Identity(_own_tenant(key), frozenset({INFERENCE}))


def _entry(line: bytes) -> tuple[bytes, Identity]:
    """A JSON object of key, scopes and tenant. Raises ValueError, without what the key is."""
    try:
        entry = msgspec.json.decode(line, type=_Entry)
    except (msgspec.DecodeError, RecursionError):
        # What msgspec says may quote the line, and a key with it.
        raise ValueError(_WRONG_ENTRY) from None
    if not entry.scopes or not SCOPES.issuperset(entry.scopes):
        raise ValueError(_WRONG_ENTRY)
    key = entry.key.encode()
    return key, Identity(entry.tenant or _own_tenant(key), frozenset(entry.scopes))


def _own_tenant(key: bytes) -> str:
    return f"key-{sha256(key).hexdigest()[:_TENANT_DIGITS]}"


def _unauthorized(message: str) -> HttpError:
    return HttpError(401, message, code="invalid_api_key", headers=_CHALLENGE)
