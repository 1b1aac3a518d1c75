"""The configuration that Serve writes for HAProxy, made fit for strangers: a text in, a text out.

Serve's rules stay. Removed: the statistics and Prometheus pages, which listen on every interface without a password.
Changed: the admin socket only shows, clients have limits, errors are OpenAI's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from raylm.serving.front.errors import ERRORS, RETRY_S
from raylm.serving.front.settings import FrontSettings

_CLIENTS = "raylm_clients"
_LOOPBACK = ("127.0.0.0/8", "::1")
_REMOVED = ("frontend prometheus", "listen stats")
_BIND = re.compile(r"\s+bind (\S+)(.*)")
_ROUTES = re.compile(r"\s+http-request return status (\d+) .* if routes$")
_HTTP = "frontend http_frontend"
# What waits in the kernel for a client that is slower than its replica. Without a bound Linux grows it to tcp_rmem's
# limit, 6 to 32 MiB a connection.
_READ_AHEAD_BYTES = 256 * 1024
_MISSING = "Serve's configuration of HAProxy has no {!r}: this version of Ray needs another raylm"


class UnknownConfiguration(Exception):
    """Serve's text is not what raylm knows how to change: better no server than an open one."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """HAProxy's own admin socket, the folder of its error files, and by address the number of the listening socket that
    it inherits. `certificate`: the file of certificate and key; "": there is no TLS."""

    admin_socket: str
    errors: str
    sockets: Mapping[str, int]
    certificate: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A line of configuration without indent, and those with one below it."""

    head: str
    lines: tuple[str, ...]

    @property
    def kind(self) -> str:
        return self.head.partition(" ")[0]


def harden(text: str, settings: FrontSettings, around: Surroundings) -> str:
    """The configuration to run HAProxy with. Raises UnknownConfiguration."""
    ready = _is_ready(text)
    parts = [_harden_section(section, settings, around, ready) for section in _kept(text)]
    for head in ("global", "defaults", _HTTP, "backend default_backend"):
        if not any(part.head == head for part in parts):
            raise UnknownConfiguration(_MISSING.format(head))
    table = f"    stick-table type ipv6 size {_table_size(settings)} expire 1m store conn_cur"
    parts.append(Section(f"backend {_CLIENTS}", (table,)))
    return "".join(f"{line}\n" for part in parts for line in (part.head, *part.lines))


def listen_addresses(text: str) -> list[str]:
    """The addresses, HOST:PORT, on which clients are to be heard."""
    found = (_BIND.fullmatch(line) for section in _kept(text) for line in section.lines)
    return [match[1] for match in found if match]


def admin_socket(text: str) -> str:
    """The path at which Serve looks for HAProxy's admin socket. Raises UnknownConfiguration."""
    match = re.search(r"^\s+stats socket (\S+)", text, re.MULTILINE)
    if match is None:
        raise UnknownConfiguration(_MISSING.format("stats socket"))
    return match[1]


def server_state_file(text: str) -> str | None:
    """The file of what a HAProxy before thought of its servers."""
    match = re.search(r"^\s+server-state-file (\S+)", text, re.MULTILINE)
    return match[1] if match else None


def has_routes(text: str) -> bool:
    """Whether an application has a path."""
    return any(line.strip().startswith("use_backend ") for part in _kept(text) for line in part.lines)


def _is_ready(text: str) -> bool:
    """Whether Serve has told its manager of HAProxy which applications there are."""
    statuses = [match[1] for part in _kept(text) for line in part.lines if (match := _ROUTES.match(line))]
    return statuses == ["200"]


def _kept(text: str) -> list[Section]:
    sections: list[Section] = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not line[0].isspace():
            sections.append(Section(line.strip(), ()))
        elif sections:
            last = sections.pop()
            sections.append(Section(last.head, (*last.lines, line)))
    return [section for section in sections if section.head not in _REMOVED]


def _table_size(settings: FrontSettings) -> int:
    return max(1024, 2 * settings.max_connections)


def _harden_section(section: Section, settings: FrontSettings, around: Surroundings, ready: bool) -> Section:
    if section.head == "global":
        lines = _global(section, settings, around)
    elif section.head == "defaults":
        lines = _defaults(section, settings, around)
    elif section.kind == "frontend":
        lines = _frontend(section, settings, around)
    elif section.head == "backend default_backend":
        lines = [_not_found() if ready else _unavailable()]
    elif section.kind == "backend" and any(line.strip().startswith("option httpchk") for line in section.lines):
        lines = [*section.lines, *_text_errors()]
    else:
        lines = list(section.lines)
    return Section(section.head, tuple(lines))


def _without(section: Section, *beginnings: str) -> list[str]:
    return [line for line in section.lines if not line.strip().startswith(beginnings)]


def _global(section: Section, settings: FrontSettings, around: Surroundings) -> list[str]:
    return [
        *_without(section, "stats socket", "maxconn"),
        # `show ...`, which is all that Serve may, needs an operator; to change a certificate, as the program does, an
        # admin.
        f"    stats socket {around.admin_socket} mode 600 level {'admin' if around.certificate else 'operator'}",
        f"    maxconn {settings.max_connections}",
        f"    tune.rcvbuf.server {_READ_AHEAD_BYTES}",
    ]


def _defaults(section: Section, settings: FrontSettings, around: Surroundings) -> list[str]:
    return [
        *_without(section, "timeout client", "timeout http-request", "errorfile", "retry-on"),
        *(_retry_reads(line) for line in section.lines if line.strip().startswith("retry-on")),
        f"    timeout http-request {settings.header_timeout_ms}ms",
        f"    timeout client {settings.body_timeout_ms}ms",
        *(f"    errorfile {status} {around.errors}/{status}.http" for status in ERRORS),
    ]


def _retry_reads(line: str) -> str:
    """A GET whose ingress dies goes to another ingress; a POST does not (`_frontend`). Else HAProxy closes the client's
    connection without an answer, when the one to the ingress was used before."""
    return line if "empty-response" in line else f"{line} empty-response"


def _frontend(section: Section, settings: FrontSettings, around: Surroundings) -> list[str]:
    lines: list[str] = []
    for line in section.lines:
        match = _BIND.fullmatch(line)
        lines += _binds(section, match, settings, around) if match else [line]
        if match:
            of_connections, of_requests = _limits(settings)
            lines += [*of_connections, *_request_ids(section), *of_requests]
            if section.head == _HTTP:
                reads = "METH_GET or METH_HEAD"
                lines.append(f"    http-request wait-for-body time {settings.body_timeout_ms}ms unless {reads}")
                lines.append(f"    http-request disable-l7-retry unless {reads}")
    if lines == list(section.lines):
        raise UnknownConfiguration(_MISSING.format("bind"))
    return lines


def _binds(section: Section, match: re.Match[str], settings: FrontSettings, around: Surroundings) -> list[str]:
    """Where clients are heard. Of TLS there is HTTP/1.1 alone: limits count connections, and one of HTTP/2 carries many
    requests."""
    bind = f"    bind fd@{around.sockets[match[1]]}{match[2]}"
    if section.head != _HTTP:
        return [bind]
    if settings.tls is not None:
        bind += f" ssl crt {around.certificate} ssl-min-ver TLSv{settings.tls.min_version} alpn http/1.1"
    socket = settings.unix_socket
    return [bind] if socket is None else [bind, f"    bind fd@{around.sockets[socket.path]}"]


def _request_ids(section: Section) -> list[str]:
    """x-request-id: the client's where it is sane (raylm.serving.request_id), else a new one; the same in every answer,
    errors of HAProxy's own too."""
    header, variable = "x-request-id", "var(txn.request_id)"
    has_format = any(line.strip().startswith("unique-id-format") for line in section.lines)
    lines = [
        *([] if has_format else ["unique-id-format %[uuid]"]),
        f"http-request set-var(txn.request_id) req.fhdr({header}) if {{ req.fhdr({header}) -m reg ^[!-~]{{1,128}}$ }}",
        f"http-request set-var(txn.request_id) unique-id unless {{ {variable} -m found }}",
        f"http-request set-header {header} %[{variable}]",
        f"http-after-response set-header {header} %[{variable}] if {{ {variable} -m found }}",
    ]
    return [f"    {line}" for line in lines]


def _limits(settings: FrontSettings) -> tuple[list[str], list[str]]:
    """The rules for connections, and those for requests."""
    client, most = f"ipmask(32,64) table {_CLIENTS}", settings.max_connections_per_client
    proxies = f"{{ src {' '.join(settings.trusted_proxies)} }}"
    uncounted = [] if settings.count_loopback else list(_LOOPBACK)
    before, after = [], []
    if settings.proxy_protocol:
        # From here on `src` is the address that the PROXY header names.
        before = [f"tcp-request connection expect-proxy layer4 if {proxies}"]
    elif settings.trusted_proxies:
        uncounted += settings.trusted_proxies
        after = [
            f"http-request track-sc1 req.hdr_ip(x-forwarded-for,-1),{client} if {proxies}",
            f"http-request deny deny_status 429 if {proxies} {{ sc1_conn_cur gt {most} }}",
        ]
    condition = f" unless {{ src {' '.join(uncounted)} }}" if uncounted else ""
    counted = [
        f"tcp-request session track-sc0 src,{client}{condition}",
        f"tcp-request session reject if {{ sc0_conn_cur gt {most} }}",
    ]
    return [f"    {line}" for line in [*before, *counted]], [f"    {line}" for line in after]


def _not_found() -> str:
    body = '{"error": {"message": "No application has the path %[path,json(utf8s)]", "type": "invalid_request_error", '
    body += '"param": null, "code": "not_found"}}'
    return _return(404, "lf-string", body)


def _unavailable() -> str:
    return _return(503, "string", ERRORS[503].body()) + f" hdr Retry-After {RETRY_S}"


def _return(status: int, form: str, body: str) -> str:
    quoted = body.replace("\\", "\\\\").replace('"', '\\"')
    return f'    http-request return status {status} content-type application/json {form} "{quoted}"'


def _text_errors() -> list[str]:
    """An application's errors in plain text, which are Serve's and uvicorn's, become OpenAI's. Serve's own proxy, which
    steps in where there is no ingress, says 404 as long as it does not know the application."""
    is_text = "{ res.hdr(content-type) -m beg text/plain }"
    spare = "{ srv_name -m beg SERVE_PROXY_ACTOR }"
    return [
        f"    http-response return status 503 default-errorfiles if {{ status 404 }} {is_text} {spare}",
        *(
            f"    http-response return status {status} default-errorfiles if {{ status {status} }} {is_text}"
            for status in ERRORS
        ),
    ]
