"""The front's program without Ray: Serve's own configuration of HAProxy, a server of the standard library behind it."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from raylm.config.front import FrontConfig
from raylm.serving.front.admin import ask
from raylm.serving.front.install import make_folder, write_program
from tests.support.ports import free_port

OTHER_CLIENT = "127.0.0.2"
"""A second client's address on this machine."""
_PATIENCE_S = 120.0
_MANAGER = """
import resource, subprocess, sys
if files := int(sys.argv[1] or 0):
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
print(subprocess.Popen(sys.argv[2:]).pid, flush=True)
sys.stdin.read()
"""


class Backend(http.server.ThreadingHTTPServer):
    """An application: /text answers 400 in plain text, /missing 404; /stream waits for `go_on` after its first
    piece; /endless goes on until its client has `left`, and counts the bytes that it has sent; /die closes the
    connection without an answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.go_on = threading.Event()
        self.left = threading.Event()
        self.num_sent = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Health checks leave without a word."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Backend

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/stream":
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"5\r\nfirst\r\n")
            self.server.go_on.wait(60)
            self.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")
        elif self.path == "/endless":
            self._stream_on()
        elif self.path == "/die":
            self.close_connection = True
        elif self.path.endswith(("/text", "/missing")):
            self._answer(400 if self.path.endswith("text") else 404, b"Invalid HTTP request received.", "text/plain")
        else:
            self._answer(200, self.path.encode(), "application/json")

    def _stream_on(self) -> None:
        """Until the client has gone."""
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
                self.server.num_sent += 1024
        except OSError:
            self.server.left.set()
            self.close_connection = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self._answer(200, str(len(body)).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("seen", self.headers.get("x-request-id", ""))
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Fronts:
    """Programs of one server in `folder`, started as Serve's manager starts them, and what clients see."""

    def __init__(self, folder: Path, config: FrontConfig) -> None:
        self.folder = folder
        self.port = free_port()
        self.program = folder / "haproxy"
        self.config_file = folder / "node" / "haproxy.cfg"
        self.admin = str(folder / "node" / "admin.sock")
        self.managers: list[subprocess.Popen[str]] = []
        write_program(self.program, config)

    def configure(self, routes: dict[str, int], *, spare: int | None = None) -> None:
        """Have Serve write its file: a port by route prefix, and that of its own proxy."""
        from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
        from ray.serve.config import HTTPOptions

        node = self.config_file.parent
        backends = {}
        for prefix, port in routes.items():
            name = f"http-app{len(backends)}"
            servers = [ServerConfig(f"server-{port}", "127.0.0.1", port)] if port else []
            fallback = ServerConfig("SERVE_PROXY_ACTOR-spare", "127.0.0.1", spare) if spare else None
            backends[name] = BackendConfig(
                name, prefix, servers=servers, app_name=f"app{len(backends)}", fallback_server=fallback
            )
        config = HAProxyConfig(
            http_options=HTTPOptions(host="127.0.0.1", port=self.port),
            socket_path=self.admin,
            server_state_base=str(node),
            server_state_file=str(node / "server-state"),
            metrics_enabled=False,
            is_head=True,
        )
        api = HAProxyApi(config, config_file_path=str(self.config_file))
        api.set_backend_configs(backends)
        api._generate_config_file_internal()

    def start(self, *options: str, open_files: int | None = None) -> int:
        """Start the program under a manager of its own; its process, once it answers the admin socket as its own."""
        command = [str(self.program), "-db", "-f", str(self.config_file), "-dR", *options]
        manager = subprocess.Popen(
            [sys.executable, "-c", _MANAGER, str(open_files or ""), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.managers.append(manager)
        pid = int(manager.stdout.readline())
        self.wait(lambda: f"Pid: {pid}\n" in self.say("show info"))
        return pid

    def reload(self, program: int) -> int:
        return self.start("-sf", str(program), "-x", self.admin)

    def say(self, command: str) -> str:
        try:
            return ask(self.admin, f"{command}\n".encode()).decode()
        except OSError:
            return ""

    def wait(self, condition) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_until_open(self, number: int, *, client: str = "127.0.0.1") -> None:
        """Connections are accepted by several threads, in any order."""
        words = f"key=::ffff:{client} ", f"conn_cur={number}"
        self.wait(
            lambda: any(all(w in line for w in words) for line in self.say("show table raylm_clients").split("\n"))
        )

    def connect(self, sent: bytes = b"", *, client: str = "127.0.0.1") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), _PATIENCE_S, source_address=(client, 0))
        with suppress(ConnectionError):  # Whoever reads from it sees that it was closed at once.
            connection.sendall(sent)
        return connection

    def begin(self, request: bytes) -> socket.socket:
        """A connection whose answer has begun: b"HTTP/1.1 200" is read. Where headers have little time, a busy machine
        may take longer than that to send them."""
        while True:
            connection = self.connect(request)
            if (status := connection.recv(12)) != b"HTTP/1.1 408":
                assert status == b"HTTP/1.1 200"
                return connection
            connection.close()

    def ask(self, path: str, *, client: str = "127.0.0.1", headers: dict[str, str] | None = None) -> Reply:
        """The answer; asked again where a busy machine took longer to send the headers than they may take."""
        while (reply := self._ask(path, client, headers)).status == 408:
            pass
        return reply

    def _ask(self, path: str, client: str, headers: dict[str, str] | None) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, _PATIENCE_S, source_address=(client, 0))
        try:
            connection.request("GET", path, headers=headers or {})
            response = connection.getresponse()
            return Reply(response.status, dict(response.headers), response.read().decode())
        finally:
            connection.close()

    def haproxy(self, program: int) -> psutil.Process:
        (found,) = psutil.Process(program).children()
        assert found.name() == "haproxy"
        return found

    def close(self) -> None:
        for manager in self.managers:
            for child in [*psutil.Process(manager.pid).children()] if manager.poll() is None else []:
                child.send_signal(signal.SIGKILL)
            manager.stdin.close()
            manager.stdout.close()
            manager.kill()
            manager.wait(_PATIENCE_S)
        with_config = [p for p in psutil.process_iter(["cmdline"]) if self._is_mine(p)]
        for left in with_config:
            left.kill()

    def _is_mine(self, process: psutil.Process) -> bool:
        return any(str(self.folder) in word for word in process.info["cmdline"] or []) and process.pid != os.getpid()


class Reply:
    """An HTTP answer."""

    def __init__(self, status: int, headers: dict[str, str], text: str) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.text = text

    @property
    def error(self) -> dict[str, object]:
        """OpenAI's error in it."""
        assert self.headers["content-type"] == "application/json"
        error = json.loads(self.text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@contextmanager
def fronts(**limits: object) -> Iterator[Fronts]:
    import shutil

    folder = make_folder()
    running = Fronts(folder, FrontConfig(**limits))
    try:
        yield running
    finally:
        running.close()
        shutil.rmtree(folder)
