"""Which kernels the operators' tests run: torch's fallbacks, and those of the compiled extension where it is loaded."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raylm.ops import extension, fallback

Kernel = Callable[..., Any]

ISAS = ("amx", "avx512vnni", "avx512", "avx2", "generic")
"""Instruction sets that the CPU's kernels are compiled for, the widest first."""
ONE_FOR_ALL = {"accept", "block_kernels", "decode_blocks", "place"}
"""Compiled for a CPU once, whatever its instructions."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "operators(*names, one_isa=False): those whose kernels a test runs")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrises `implementation`: only with those that this machine and this build have, of the operators that the
    test is marked with. There are thousands of others, each of which would be a skipped test."""
    if "implementation" not in metafunc.fixturenames or "implementation" in _given(metafunc):
        return
    marker = metafunc.definition.get_closest_marker("operators")
    assert marker is not None, f"{metafunc.definition.nodeid}: pytest.mark.operators says which operators it tests"
    metafunc.parametrize("implementation", _implementations(set(marker.args), **marker.kwargs), indirect=True)


def _given(metafunc: pytest.Metafunc) -> set[str]:
    """Parameters that the test chooses itself."""
    names: set[str] = set()
    for marker in metafunc.definition.iter_markers("parametrize"):
        names |= {marker.args[0]} if isinstance(marker.args[0], str) else set(marker.args[0])
    return names


def _implementations(names: set[str], *, one_isa: bool = False) -> list[object]:
    compiled = extension.load().ops
    found = [pytest.param(("fallback", "cpu"), id="fallback-cpu")]
    if kernels := names.intersection(compiled.get("cpu", ())):
        isas = _isas()[:1] if one_isa or kernels <= ONE_FOR_ALL else _isas()
        found += [pytest.param((isa, "cpu"), id=isa) for isa in isas]
    if torch.cuda.is_available():
        found.append(pytest.param(("fallback", "cuda"), id="fallback-cuda", marks=pytest.mark.gpu))
        if names.intersection(compiled.get("cuda", ())):
            found.append(pytest.param(("extension", "cuda"), id="extension-cuda", marks=pytest.mark.gpu))
    return found


@functools.cache
def _isas() -> list[str]:
    """Those that this machine and this build have."""
    before = _library().raylm_cpu_isa()
    found = [isa for isa in ISAS if _library().raylm_use_cpu_isa(isa.encode())]
    _library().raylm_use_cpu_isa(before)
    return found


@pytest.fixture
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
    before: str = _library().raylm_cpu_isa().decode()
    if not _library().raylm_use_cpu_isa(isa.encode()):
        pytest.skip(f"this machine or this build has no {isa}")
    return before


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(extension.load().path))
    library.raylm_cpu_isa.restype = ctypes.c_char_p
    library.raylm_use_cpu_isa.restype = ctypes.c_bool
    return library


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
