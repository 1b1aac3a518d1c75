"""The requests that run in this ingress, by the names that their clients have for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
from pydantic import AfterValidator, BeforeValidator, FailFast

from raylm.api.about import CALLED, About
from raylm.api.call import Call
from raylm.api.parser import parse_plain
from raylm.api.preparation import Preparation
from raylm.api.protocol import Body
from raylm.config.serving import HttpConfig
from raylm.errors import RequestRejected
from raylm.generation.running import Generation

MAX_IDS = 1024
"""Requests that one call may end."""


class RunningRequests:
    """Finds a tenant's requests. Several may have one name: those of one name end together."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[Generation]] = {}

    @contextmanager
    def entered(self, tenant: str, names: Iterable[str], generation: Generation) -> Iterator[None]:
        """A request can be found while this lasts."""
        keys = [(tenant, name) for name in dict.fromkeys(names) if name]
        for key in keys:
            self._running.setdefault(key, []).append(generation)
        try:
            yield
        finally:
            for key in keys:
                left = self._running[key]
                left.remove(generation)
                if not left:
                    del self._running[key]

    def abort(self, tenant: str, name: str) -> bool:
        """End the tenant's requests of this name, which keep what they have; False where there is none."""
        found = self._running.get((tenant, name), [])
        for generation in found:
            generation.abort()
        return bool(found)


def _listed(value: object) -> object:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _few(names: list[str]) -> list[str]:
    if len(names) > MAX_IDS:
        raise ValueError(f"must have at most {MAX_IDS} entries")
    return names


_GIVEN = BeforeValidator(_listed, json_schema_input_type=list[str] | str | None)
_Names = Annotated[list[str], FailFast(), _GIVEN, AfterValidator(_few)]


class AbortRequest(Body):
    """Which requests are to end. vLLM's field or SGLang's, a string or a list of them."""

    request_ids: _Names = []
    """Ids of answers, or the names that their requests came with."""
    rid: _Names = []
    """The same, as SGLang calls it."""
    abort_all: bool | None = None
    """Only false: it would end other clients' requests."""


class Aborted(msgspec.Struct):
    """Those that were running here and now end."""

    cancelled_request_ids: list[str]


ABOUT = About(
    "End requests; they keep what they have.", "Chats and completions", (AbortRequest,), Aborted, errors=CALLED
)


class Aborting:
    """POST /v1/abort, and vLLM's and SGLang's paths for it."""

    def __init__(self, requests: RunningRequests, config: HttpConfig, preparation: Preparation) -> None:
        self._requests = requests
        self._config = config
        self._preparation = preparation

    async def abort(self, call: Call) -> bytes:
        request = await self._preparation.read(call, self._read)
        if request.abort_all:
            # vLLM and SGLang end every client's requests then.
            raise RequestRejected(
                "abort_all is not supported: name the requests in request_ids",
                param="abort_all",
                code="unsupported_parameter",
            )
        names = dict.fromkeys([*request.request_ids, *request.rid])
        if not names:
            raise RequestRejected("request_ids must name at least one request", param="request_ids")
        tenant = call.identity.tenant
        return msgspec.json.encode(Aborted([name for name in names if self._requests.abort(tenant, name)]))

    def _read(self, call: Call) -> AbortRequest:
        return parse_plain(AbortRequest, call.body, self._config)
