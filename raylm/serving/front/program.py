"""The program that Serve starts as HAProxy (RAY_SERVE_HAPROXY_BINARY_PATH), in front of the real one.

It runs HAProxy with a hardened configuration (`harden.py`) and starts it again when it dies. When Serve's manager of
HAProxy dies, clients are served until the manager's successor starts the next program. Serve sees one process, which
takes HAProxy's options and signals. Standard library alone, and little of that: it runs at every start and change.
"""

from __future__ import annotations

import ctypes
import os
import resource
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING

from raylm.serving.front import harden
from raylm.serving.front.admin import AdminSocket, ask
from raylm.serving.front.errors import write_error_files
from raylm.serving.front.listeners import CannotListen, Handover, listen, listen_unix, take_over
from raylm.serving.front.settings import BadCertificate, FrontSettings, Tls

if TYPE_CHECKING:
    from raylm.serving.front.certificate import Certificate

ORPHAN_S = 120.0
"""How long clients are served without a manager: Serve needs seconds for its successor, a minute on a busy machine."""
_TICK_S = 0.25
_POLL_S = 0.01
_OWN_FILES = 256
"""Files that HAProxy opens for other things than clients and their ingresses."""
_START_S = 30.0
_SOON_S = 1.0
"""A HAProxy that dies sooner than this is started again with a pause."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass(frozen=True, slots=True)
class Command:
    """What Serve asked for: the configuration's path, the processes to take over from, and HAProxy's other options."""

    config: str
    predecessors: tuple[int, ...]
    options: tuple[str, ...]


def parse_command(arguments: list[str]) -> Command | None:
    """None where no configuration is to be run."""
    config, predecessors, options = "", [], []
    words = iter(arguments)
    word = next(words, None)
    while word is not None:
        if word == "-sf":
            while (word := next(words, None)) is not None and word.isdigit():
                predecessors.append(int(word))
            continue
        if word == "-f":
            config = next(words, "")
        elif word == "-x":
            next(words, None)  # Sockets come from the program before.
        else:
            options.append(word)
        word = next(words, None)
    return Command(config, tuple(predecessors), tuple(options)) if config else None


class Front:
    """One HAProxy after another with one configuration, until a successor or a signal ends it."""

    def __init__(self, settings: FrontSettings, command: Command) -> None:
        self._settings = settings
        self._command = command
        self._manager = os.getppid()
        self._raylet = _parent_of(self._manager)
        self._orphan_since: float | None = None
        self._folder = os.path.dirname(command.config)
        self._haproxy_socket = os.path.join(self._folder, f"{os.getpid()}.sock")
        self._config = os.path.join(self._folder, f"{os.getpid()}.cfg")
        self._certificate = _certificate(settings.tls, os.path.join(self._folder, f"{os.getpid()}.pem"))
        self._haproxy = 0
        self._started = 0.0
        self._restart_at: float | None = None
        self._sockets: dict[str, socket.socket] = {}
        self._draining = False
        self._ending = False
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.prctl(_PR_SET_NAME, b"raylm-front", 0, 0, 0)
        # Ray ends a dead worker's process group: HAProxy is to outlive its manager.
        os.setpgid(0, 0)

    def run(self) -> int:
        """The exit code. Raises UnknownConfiguration, CannotListen, BadCertificate."""
        source = _read(self._command.config)
        path = harden.admin_socket(source)
        before = take_over(path)
        if before is not None and not self._command.predecessors and not harden.has_routes(source):
            # A manager that replaces a dead one knows no route yet; what it took over is right until it does.
            source = before.source
        left = before.sockets if before else {}
        self._sockets = {address: left.get(address) or listen(address) for address in harden.listen_addresses(source)}
        if (unix := self._settings.unix_socket) is not None:
            self._sockets[unix.path] = left.get(unix.path) or listen_unix(unix.path, unix.mode)
        for listener in self._sockets.values():
            listener.set_inheritable(True)
        self._write(source)
        if not self._command.predecessors and (state := harden.server_state_file(source)):
            _remove(state)
        self._handle_signals()
        self._start()
        if (code := self._wait_until_it_answers()) is not None:
            return code
        admin = AdminSocket(path, self._haproxy_socket, lambda: Handover(os.getpid(), source, self._sockets))
        self._relieve({*self._command.predecessors, *([before.pid] if before else [])})
        try:
            self._serve(admin, source)
        finally:
            admin.close()
            for leftover in (
                self._haproxy_socket,
                self._config,
                *([self._certificate.path] if self._certificate else []),
            ):
                _remove(leftover)
            if self._settings.unix_socket is not None and self._ending:
                _remove(self._settings.unix_socket.path)
        return 0

    def _write(self, source: str) -> None:
        _sweep(self._folder)
        errors = os.path.join(self._folder, "errors")
        write_error_files(errors)
        numbers = {address: listener.fileno() for address, listener in self._sockets.items()}
        certificate = ""
        if self._certificate is not None:
            self._certificate.write()
            certificate = self._certificate.path
        around = harden.Surroundings(self._haproxy_socket, errors, numbers, certificate)
        text = harden.harden(source, _within_open_files(self._settings), around)
        with open(os.open(self._config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)

    def _handle_signals(self) -> None:
        reading, writing = os.pipe()
        for end in (reading, writing):
            os.set_blocking(end, False)
        self._wake = reading
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGUSR1, self._drain)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def _drain(self, number: int, frame: FrameType | None) -> None:
        self._draining = True
        self._signal(signal.SIGUSR1)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._ending = True
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._haproxy:
            with suppress(ProcessLookupError):
                os.kill(self._haproxy, number)

    def _start(self) -> None:
        settings, program = self._settings, os.getpid()
        arguments = [settings.binary, *self._command.options, "-f", self._config]
        self._restart_at, self._started = None, time.monotonic()
        self._haproxy = os.fork()
        if self._haproxy:
            return
        try:
            # Serve kills this program to end HAProxy.
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != program:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.execv(settings.binary, arguments)
        finally:
            os._exit(127)

    def _wait_until_it_answers(self) -> int | None:
        """None, or the exit code of a HAProxy that did not start."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            ended, status = os.waitpid(self._haproxy, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status) or 1
            with suppress(OSError):
                if ask(self._haproxy_socket, b"show info\n"):
                    return None
            time.sleep(_POLL_S)
        self._signal(signal.SIGKILL)
        return _complain(f"HAProxy did not answer within {_START_S:g} s")

    def _relieve(self, programs: set[int]) -> None:
        for pid in programs:
            with suppress(OSError):
                if self._command.config.encode() in _arguments_of(pid):
                    os.kill(pid, signal.SIGUSR1)

    def _serve(self, admin: AdminSocket, source: str) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(admin, selectors.EVENT_READ, admin.answer)
            selector.register(self._wake, selectors.EVENT_READ, self._swallow)
            while not self._is_over(source):
                for key, _ in selector.select(_TICK_S):
                    key.data()

    def _swallow(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)

    def _is_over(self, source: str) -> bool:
        """Look after HAProxy and the manager; whether nothing is left to do."""
        now = time.monotonic()
        self._reap(now, source)
        if self._certificate is not None and self._haproxy:
            self._certificate.look(now, self._haproxy_socket)
        if self._draining or self._ending:
            # Whoever comes now is for the successor.
            for listener in self._sockets.values():
                listener.close()
            if self._haproxy == 0:
                return True
        if self._restart_at is not None and now >= self._restart_at:
            self._start()
        if os.getppid() != self._manager:
            self._orphan_since = self._orphan_since or now
            alone = not os.path.exists(f"/proc/{self._raylet}")
            if not self._ending and (alone or (now > self._orphan_since + ORPHAN_S and not self._draining)):
                self._end(signal.SIGTERM, None)
        return False

    def _reap(self, now: float, source: str) -> None:
        if self._haproxy == 0:
            return
        ended, status = os.waitpid(self._haproxy, os.WNOHANG)
        if not ended:
            return
        self._haproxy = 0
        if self._draining or self._ending:
            return
        _complain(f"HAProxy ({ended}) has ended ({os.waitstatus_to_exitcode(status)}) and is started again")
        if state := harden.server_state_file(source):
            _remove(state)  # What it says of the servers is older than this HAProxy.
        self._restart_at = now if now > self._started + _SOON_S else now + _SOON_S


def _certificate(tls: Tls | None, path: str) -> Certificate | None:
    if tls is None:
        return None
    # What it imports costs time, which a front without TLS saves.
    from raylm.serving.front.certificate import Certificate

    return Certificate(tls, path, _complain)


def _within_open_files(settings: FrontSettings) -> FrontSettings:
    """With no more connections than HAProxy may have files for: it would not start. It counts two a connection, and for
    one in four connections a pipe."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return settings
    return replace(settings, max_connections=max(1, min(settings.max_connections, (most - _OWN_FILES) * 2 // 5)))


def _complain(sentence: str) -> int:
    print(f"raylm: {sentence}", file=sys.stderr, flush=True)
    return 1


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _sweep(folder: str) -> None:
    """Remove files of programs that were killed."""
    for name in os.listdir(folder):
        pid, _, kind = name.partition(".")
        if pid.isdigit() and kind in ("cfg", "sock", "pem") and not os.path.exists(f"/proc/{pid}"):
            _remove(os.path.join(folder, name))


def _arguments_of(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().split(b"\0")


def _parent_of(pid: int) -> int:
    return int(_read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])


def main() -> None:
    """`program.py SETTINGS [HAProxy's arguments]`: run until the end, whose exit code this process has."""
    settings = FrontSettings.from_json(sys.argv[1])
    command = parse_command(sys.argv[2:])
    if command is None:
        os.execv(settings.binary, [settings.binary, *sys.argv[2:]])
    try:
        sys.exit(Front(settings, command).run())
    except (harden.UnknownConfiguration, CannotListen, BadCertificate, OSError) as error:
        sys.exit(_complain(str(error)))
