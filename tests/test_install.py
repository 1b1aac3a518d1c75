"""What the README does first: the installed package is found wherever python starts, and `make client` asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ports import free_port

ROOT = Path(__file__).parents[1]


def test_a_folder_of_the_packages_name_does_not_hide_it(tmp_path: Path):
    """As where a clone lies in the folder that python is started in. PYTHONPATH would find the package anyway."""
    (tmp_path / "raylm").mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "from raylm import EngineConfig; print(EngineConfig.__name__)"]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("EngineConfig\n", "")


def test_make_client_asks_what_it_is_told(tmp_path: Path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf %s "$2"\n')
    python.chmod(0o755)
    (tmp_path / ".serve").touch()
    text = """Say "x", it's $5 `now`"""
    command = ["make", "--silent", "client", f"VENV={tmp_path}", f"CHAT={text}"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == text


def test_a_client_without_a_server_is_told_in_a_sentence():
    url = f"http://127.0.0.1:{free_port()}/v1"
    command = [sys.executable, str(ROOT / "deployments" / "client.py"), "Hello", "--url", url]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"client: no server answers at {url}; `make serve` starts one\n"
