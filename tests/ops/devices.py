"""Which of the implementations of tests/ops/conftest.py a test is for."""

from __future__ import annotations

import pytest

ON_CUDA = pytest.mark.parametrize(
    "implementation", [pytest.param(("extension", "cuda"), id="extension-cuda", marks=pytest.mark.gpu)], indirect=True
)
"""For tests of how the CUDA kernels share out their work, which would only take the others long."""
