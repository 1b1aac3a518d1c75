"""raylm top against a server's own state."""

from __future__ import annotations

import io
import threading

import pytest

from raylm.cli import main, top
from raylm.core.load import Load
from raylm.generation.served_model import EngineStats
from raylm.serving.state import EngineState, ModelState, State
from tests.support.live_http import listening
from tests.support.openai_fakes import Server

BUSY = EngineState("e" * 32, 3, 12, 1234, 0.5, 1050.25, 0.75)
IDLE = EngineState("new", 0, 0, 0, 0.0, None, None)


def test_a_frame_has_every_engine_and_number():
    models = [
        ModelState("tiny", True, 2, 3, 12, 0.25, 1050.25, [BUSY, IDLE]),
        ModelState("la\x1b[2Jte", False, 0, 0, 0, None, None, []),
    ]
    lines = top.frame(State("1.2", False, models), coloured=False)
    assert lines == [
        "raylm 1.2  not ready  2 models, 2 engines",
        "",
        "tiny  3 running, 12 waiting, 1,050.2 tokens/s, cache 25%",
        "  engine         running waiting   prompt  tokens/s  hits  cache",
        "  eeeeeeeeeeee         3      12    1,234   1,050.2   75%  ##########..........  50%",
        "  new                  0       0        0         -     -  ....................   0%",
        "",
        "la?[2Jte  no engine",
    ]
    coloured = top.frame(State("1.2", False, models), coloured=True)
    assert "\x1b[1mtiny\x1b[0m" in coloured[2] and "\x1b[2J" not in "".join(coloured)


def test_one_frame_of_a_real_server(capsys, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    server = Server(api_keys_file=str(keys))
    server.catalog.engine_stats = [EngineStats("tiny", "engine-7", Load(3, 2, 0.25))]
    with listening(server.app) as url:
        assert main(["top", "--once", "--url", f"{url}/v1", "--api-key", "secret"]) == 0
    shown = capsys.readouterr().out
    assert "engine-7" in shown and "0.0" in shown and "25%" in shown
    assert "\x1b" not in shown


def test_it_draws_until_it_is_stopped_and_a_server_that_goes_is_named(monkeypatch):
    server = Server()
    out = io.StringIO()
    rounds = []

    def sleep(seconds):
        rounds.append(seconds)
        if len(rounds) == 1:
            gone.set()
            ended.wait(120)
        elif len(rounds) == 3:
            raise KeyboardInterrupt

    gone, ended, address = threading.Event(), threading.Event(), []

    def serve():
        with listening(server.app) as url:
            address.append(url)
            started.set()
            gone.wait(120)
        ended.set()

    started = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(120)
    monkeypatch.setattr(top.time, "sleep", sleep)
    monkeypatch.setattr(top.sys, "stdout", out)
    try:
        assert main(["top", "--url", address[0], "--every", "0.5"]) == 130
    finally:
        gone.set()
        thread.join(120)
    drawn = out.getvalue()
    assert drawn.startswith("\x1b[?1049h") and drawn.endswith("\x1b[?1049l")
    assert drawn.count("\x1b[H") == 3 and "did not answer" in drawn
    assert rounds == [0.5] * 3


@pytest.mark.parametrize(
    ("words", "problem"),
    [(["--url", "http://127.0.0.1:9/v1"], "did not answer"), (["--url", "x"], "--url"), (["--every", "0"], "0.1")],
)
def test_what_is_wrong_is_said(capsys, words, problem):
    try:
        assert main(["top", "--once", *words]) == 2
    except SystemExit as stop:
        assert stop.code == 2
    assert problem in capsys.readouterr().err
