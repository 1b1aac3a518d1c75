"""What a process of a server imports: each has a start to pay for, and Ray reads its settings when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raylm.serving.program import run

PRELOADED = "RAY_preload_python_modules"


def imported(module: str) -> set[str]:
    """What a fresh process has loaded once it has imported a module."""
    code = f"import {module}, sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("raylm.serving.program.run", {"ray", "torch", "fastapi"}),
        ("raylm.serving.program.keeper", {"ray", "torch", "pydantic"}),
        ("raylm.serving.directory", {"ray.serve", "torch", "transformers"}),
        ("raylm.serving.ingress", {"torch", "transformers"}),
        ("raylm.serving.replica", {"torch", "transformers"}),
        ("raylm.engine.actor", {"ray.serve", "torch", "transformers"}),
        ("raylm.executor.ray", {"ray.serve", "torch"}),
        ("raylm.worker.worker", {"ray", "transformers"}),
    ],
)
def test_a_process_does_not_import_what_another_needs(module, without):
    assert not without & imported(module)


def test_serve_comes_without_pandas_and_others_get_it():
    code = """
import raylm.serving.program.lean, ray.serve, sys
assert "pandas" not in sys.modules
import pandas
assert pandas.DataFrame
"""
    pytest.importorskip("pandas")
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("cores", "modules"), [(2, "raylm.serving.program.lean"), (16, "raylm.serving.program.lean,raylm.serving.replica")]
)
def test_processes_import_ahead_where_cores_are_idle(monkeypatch, cores, modules):
    monkeypatch.delenv(PRELOADED, raising=False)
    monkeypatch.setattr("ray._private.utils.get_num_cpus", lambda: cores)
    root = str(Path(run.__file__).parents[3])
    monkeypatch.setattr(sys, "path", [root, *(entry for entry in sys.path if entry != root)])
    run._set_preloaded()
    assert PRELOADED not in os.environ
    monkeypatch.setattr(sys, "path", [*sys.path, root])
    run._set_preloaded()
    assert os.environ[PRELOADED] == modules
    monkeypatch.setenv(PRELOADED, "mine")
    run._set_preloaded()
    assert os.environ[PRELOADED] == "mine"
