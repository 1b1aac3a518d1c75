"""What a process of a server imports: each has a start to pay for, and Ray reads its settings when it is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest


def imported(module: str) -> set[str]:
    """What a fresh process has loaded once it has imported a module."""
    code = f"import {module}, sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("raylm.serving.run", {"ray", "torch", "fastapi"}),
        ("raylm.serving.keeper", {"ray", "torch", "pydantic"}),
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
