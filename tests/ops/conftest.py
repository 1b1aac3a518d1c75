"""Which kernels the operators' tests run: torch's fallbacks, and those of the compiled extension where it is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raylm.ops import extension, fallback

Kernel = Callable[..., Any]

IMPLEMENTATIONS = [
    pytest.param(("fallback", "cpu"), id="fallback-cpu"),
    pytest.param(("avx512vnni", "cpu"), id="avx512vnni"),
    pytest.param(("avx512", "cpu"), id="avx512"),
    pytest.param(("avx2", "cpu"), id="avx2"),
    pytest.param(("generic", "cpu"), id="generic"),
    pytest.param(("fallback", "cuda"), id="fallback-cuda", marks=pytest.mark.gpu),
    pytest.param(("extension", "cuda"), id="extension-cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """(kind, device); tests that ask for it run once for each. Kinds of the CPU's extension are instruction sets."""
    kind, device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if kind != "fallback" and not extension.load().ops.get(device):
        pytest.skip(f"no kernels for {device}: {extension.load()}")
    if kind in ("fallback", "extension"):
        yield kind, device
        return
    before = _use_isa(kind)
    yield kind, device
    _use_isa(before)


@pytest.fixture
def use_isa(needs_extension: None) -> Iterator[Callable[[str], None]]:
    """Lets the CPU's kernels of an instruction set run until the end of the test."""
    before: list[str] = []
    yield lambda isa: before.append(_use_isa(isa))
    for isa in reversed(before):
        _use_isa(isa)


def _use_isa(isa: str) -> str:
    """Returns the instruction set that was in use. Skips the test where this machine or this build has not `isa`."""
    library = ctypes.CDLL(str(extension.load().path))
    library.raylm_cpu_isa.restype = ctypes.c_char_p
    library.raylm_use_cpu_isa.restype = ctypes.c_bool
    before: str = library.raylm_cpu_isa().decode()
    if not library.raylm_use_cpu_isa(isa.encode()):
        pytest.skip(f"this machine or this build has no {isa}")
    return before


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


@pytest.fixture
def needs_cuda_extension() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if not extension.load().ops.get("cuda"):
        pytest.skip(str(extension.load()))


@pytest.fixture
def needs_block_kernels() -> None:
    if "block_linear" not in extension.load().ops.get("cpu", ()):
        pytest.skip(f"the extension has no block_linear for cpu: {extension.load()}")
