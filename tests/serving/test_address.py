"""Where a server cannot listen."""

from __future__ import annotations

import socket

import pytest

from raylm.errors import ConfigError
from raylm.serving.program import run
from raylm.serving.program.address import check_address
from tests.support.ports import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_free_port_will_do(host):
    check_address(host, free_port())


@pytest.mark.parametrize(
    ("host", "port", "problem"),
    [
        ("127.0.0.1", 99_999, r"--port, .* is 99999; allowed: 1 to 65535"),
        ("127.0.0.1", 0, r"is 0; allowed: 1 to 65535"),
        ("192.0.2.1", 8000, r"--host, .* is '192.0.2.1', which is no address of this machine"),
        ("x" * 64, 8000, r"'x+', which is no address"),  # Too long a name for anybody to be asked for it.
    ],
)
def test_what_no_machine_has(host, port, problem):
    with pytest.raises(ConfigError, match=problem):
        check_address(host, port)


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_ends_serve_before_ray_starts(host, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "start_local_ray", lambda **options: pytest.fail("Ray was started"))
    with socket.socket() as other:
        # As HAProxy listens.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of {host} is in use; choose another"):
            run.serve_command("smollm2-135m", folder=tmp_path, host=host, port=port)
