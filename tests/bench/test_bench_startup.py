from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from raylm.bench.report import as_json
from raylm.bench.startup import measure_offline, measure_server
from raylm.config.engine import EngineConfig, ModelConfig
from raylm.errors import RaylmError
from raylm.log import parts

SERVER = """
import json, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    asked = 0

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        key = self.headers.get("Authorization")
        self.reply(401 if key == "Bearer wrong" else 200, {"data": [{"id": f"m{key or ''}"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        Handler.asked += 1
        self.reply(CODE if Handler.asked == 1 else 200, {"choices": []})

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(code):
    return [sys.executable, "-c", SERVER.replace("CODE", str(code)), "{port}"]


def test_a_server_is_started_asked_and_stopped():
    row = as_json(measure_server("m.yaml", timeout_s=120, command=server(503)))
    assert set(row) == {"bench", "model", "ready_s", "phases"}
    assert (row["bench"], row["model"]) == ("startup", "m")
    assert set(row["phases"]) == {"listening", "first_answer", "stop"}
    assert row["ready_s"] >= row["phases"]["listening"]


def test_what_a_server_tells_of_its_start_is_among_the_phases():
    told = [f"started in {parts(6.5, {'Ray': 2.25, 'applications submitted': 0.5})}"]
    told += [f"(EngineActor pid=1) INFO: engine started in {parts(3.0, {'import': 1.5})}"]
    command = server(503)
    command[2] = f"import sys\nprint({os.linesep.join(told)!r}, file=sys.stderr)\n" + command[2]
    phases = measure_server("m.yaml", timeout_s=120, command=command).phases
    assert (phases["Ray"], phases["applications submitted"], phases["engine import"]) == (2.25, 0.5, 1.5)


def test_a_server_with_keys_is_sent_one():
    assert measure_server("m.yaml", timeout_s=120, api_key="mine", command=server(503)).model == "mBearer mine"
    with pytest.raises(RaylmError, match="refused to list its models with 401"):
        measure_server("m.yaml", timeout_s=120, api_key="wrong", command=server(503))


def test_a_server_that_refuses_or_dies_is_an_error():
    with pytest.raises(RaylmError, match="refused a chat request with 404"):
        measure_server("m.yaml", timeout_s=120, command=server(404))
    dying = [sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"]
    with pytest.raises(RaylmError, match=r"exit code 3 before it could list its models(.|\n)*out of luck"):
        measure_server("m.yaml", timeout_s=120, command=dying)


def test_a_server_that_does_not_come_is_killed():
    waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(RaylmError, match="did not list its models in time"):
        measure_server("m.yaml", timeout_s=0.3, command=waiting)


def test_a_fresh_process_reports_its_phases(monkeypatch):
    fake = """
    print('{"interpreter": true}', flush=True)
    print('{"import": 0.25, "weights": 0.5}')
    """
    run = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **kw: run([sys.executable, "-c", textwrap.dedent(fake)], **kw)
    )
    result = measure_offline(EngineConfig(model=ModelConfig(path="/x/y")), timeout_s=120)
    assert (result.bench, result.model) == ("startup", "y")
    assert list(result.phases) == ["interpreter", "import", "weights"]
    assert result.ready_s >= result.phases["interpreter"] > 0


def test_a_fresh_process_that_fails_shows_why():
    with pytest.raises(RaylmError, match=r"exit code 1(.|\n)*does not exist"):
        measure_offline(EngineConfig(model=ModelConfig(path="./nothing/here")), timeout_s=120)
