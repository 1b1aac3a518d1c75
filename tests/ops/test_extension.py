"""Finding and loading the compiled extension."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from raylm.ops import extension
from raylm.ops.library import SCHEMAS


def test_status_of_what_is_installed():
    status = extension.load()
    assert extension.load() is status
    if status.path is None:
        assert not status.loaded and extension.BUILD_COMMAND in str(status)
    else:
        assert status.loaded, str(status)
        # Sampling on a CPU is torch's, and CPUs reduce through a process group.
        assert set(status.ops["cpu"]) == set(SCHEMAS) - {"sample", "peer_all_reduce", "peer_add_rms_norm"}
        assert str(status.path) in str(status)


def test_a_build_for_cuda_has_every_kernel():
    status = extension.load()
    if not status.ops.get("cuda"):
        pytest.skip(f"built without CUDA: {status}")
    assert set(status.ops["cuda"]) == set(SCHEMAS)
    library = status.path.read_bytes()
    for kernel in (
        "decode_attention_kernel",
        "prefill_kernel",
        "prefill_hopper_kernel",
        "skinny_linear_kernel",
        "sample_kernel",
        "one_shot_all_reduce_kernel",
        "two_shot_all_reduce_kernel",
        "peer_add_rms_norm_kernel",
        "raylm_peer_allocate",
    ):
        assert kernel.encode() in library


def test_missing_package_names_the_build_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, extension.PACKAGE, None)
    status = extension.load.__wrapped__()
    assert not status.loaded and status.path is None
    assert str(status).endswith("build it with `pip install ./cuda_ext`.")


def test_broken_library_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    package = ModuleType(extension.PACKAGE)
    package.LIBRARY_PATH = tmp_path / "raylm_kernels.so"
    package.LIBRARY_PATH.write_bytes(b"not a library")
    monkeypatch.setitem(sys.modules, extension.PACKAGE, package)
    status = extension.load.__wrapped__()
    assert not status.loaded and status.path == package.LIBRARY_PATH
    assert "does not load" in str(status) and extension.BUILD_COMMAND in str(status)
