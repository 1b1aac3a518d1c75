"""Which kernels the operators' tests run: torch's fallbacks, and those of the compiled extension where it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from raylm.ops import extension, fallback

Kernel = Callable[..., Any]

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = tuple(TOLERANCES)
IMPLEMENTATIONS = [
    pytest.param(("fallback", "cpu"), id="fallback-cpu"),
    pytest.param(("extension", "cpu"), id="extension-cpu"),
    pytest.param(("fallback", "cuda"), id="fallback-cuda", marks=pytest.mark.gpu),
    pytest.param(("extension", "cuda"), id="extension-cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(kind, device); tests that ask for it run once for each."""
    kind, device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if kind == "extension" and not extension.load().ops.get(device):
        pytest.skip(f"no kernels for {device}: {extension.load()}")
    return kind, device


@pytest.fixture
def device(implementation: tuple[str, str]) -> str:
    return implementation[1]


@pytest.fixture
def op(implementation: tuple[str, str]) -> Callable[[str], Kernel]:
    """op(name) is that operator's kernel of the implementation under test."""
    kind, device = implementation

    def pick(name: str) -> Kernel:
        if kind == "fallback":
            kernel: Kernel = getattr(fallback, name)
            return kernel
        if name not in extension.load().ops[device]:
            pytest.skip(f"the extension has no {name} for {device}")
        return getattr(torch.ops.raylm, name).default

    return pick


@pytest.fixture
def needs_extension() -> None:
    if not extension.load().loaded:
        pytest.skip(str(extension.load()))


def close(actual: torch.Tensor, expected: torch.Tensor, *, scale: float = 1.0) -> None:
    """Compare with a float64 reference, as closely as the dtype of `actual` allows."""
    tolerance = TOLERANCES[actual.dtype] * scale
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), atol=tolerance, rtol=tolerance)
