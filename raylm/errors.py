"""Errors that raylm shows to its users; each message is a sentence with the field, the value and the limit."""

from __future__ import annotations


class RaylmError(Exception):
    """Base of every error that raylm raises on purpose."""


class ConfigError(RaylmError):
    """A configuration, a checkpoint or this machine cannot do what was asked. Raised before anything starts."""


class RequestRejected(RaylmError):
    """One request cannot be served; the engine and every other request go on.

    `param` names the request's field at fault (or None), `code` is a short machine-readable reason
    such as "context_length_exceeded".
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(RaylmError):
    """No room, or not in the time that the request has; the caller may come back after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(RaylmError):
    """The time that a request set itself was up before it was done; what it has generated is incomplete."""


class GenerationFailed(RaylmError):
    """The engine failed on one request alone; asked again it may fail again."""


class RequestLost(RaylmError):
    """A live request ended through no fault of its own; `code` says what happened. Another attempt may succeed."""

    code = "request_lost"


class EngineDeadError(RequestLost):
    """The engine or one of its workers died or stopped making progress; every live request of it has failed."""

    code = "engine_dead"


class EngineStopped(RequestLost):
    """The engine was stopped on purpose, and the request outlived its drain."""

    code = "engine_stopped"


class IngressStalled(RequestLost):
    """The ingress did not read what the engine sent for so long that the engine gave its requests up."""

    code = "ingress_stalled"


class ServerStopped(RequestLost):
    """The server, or the ingress that the request came through, was stopped on purpose before the request had ended."""

    code = "server_stopped"


class ConnectionLost(RequestLost):
    """The connection between ingress and engine was lost; the engine itself may be well."""

    code = "connection_lost"


class TransferError(RaylmError):
    """Data could not be copied from or to another process's GPU; both sides can go on without it."""


class RanksDivergedError(RaylmError):
    """Workers that share a model were given different steps: what they would compute together is wrong."""
