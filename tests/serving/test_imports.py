"""What a process of a server imports: each has a start to pay for, and Ray reads its settings when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raylm.serving.program import run

PRELOADED = "RAY_preload_python_modules"


WITHOUT = {
    "raylm.serving.program.keeper": {"ray", "torch", "pydantic"},
    "raylm.serving.program.run": {"ray", "torch", "fastapi"},
    "raylm.executor.ray": {"ray.serve", "torch"},
    "raylm.engine.actor": {"ray.serve", "torch", "transformers"},
    "raylm.serving.directory": {"ray.serve", "torch", "transformers"},
    "raylm.serving.replica": {"torch", "transformers"},
    "raylm.serving.ingress": {"torch", "transformers"},
}
"""What each module must not import. The first have the least: one process imports all in this order, and what it has
loaded after each is all that a process of that module alone would have, and more."""


def imported(*modules: str) -> list[set[str]]:
    """What a fresh process has loaded once it has imported each of the modules."""
    code = "\n".join(["import sys", *(f"import {module}; print(*sys.modules)" for module in modules)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_a_process_does_not_import_what_another_needs():
    found = imported(*WITHOUT)
    assert [module in each for module, each in zip(WITHOUT, found, strict=True)] == [True] * len(WITHOUT)
    needless = {module: WITHOUT[module] & each for module, each in zip(WITHOUT, found, strict=True)}
    assert not any(needless.values()), needless


def test_a_worker_imports_neither_ray_nor_transformers():
    (found,) = imported("raylm.worker.worker")
    assert "raylm.worker.worker" in found and not found & {"ray", "transformers"}


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
