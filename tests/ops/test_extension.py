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
        assert status.ops["cpu"] == extension.kernels_for("cpu")
        assert status.outdated("cpu") is None and "older" not in str(status)
        assert str(status.path) in str(status)


def test_a_build_for_cuda_has_every_kernel():
    status = extension.load()
    if not status.ops.get("cuda"):
        pytest.skip(f"built without CUDA: {status}")
    assert status.ops["cuda"] == extension.kernels_for("cuda")
    library = status.path.read_bytes()
    for kernel in (
        "decode_attention_kernel",
        "prefill_kernel",
        "prefill_hopper_kernel",
        "grouped_linear_kernel",
        "skinny_linear_kernel",
        "patched_linear_kernel",
        "split_linear_kernel",
        "scaled_rows_kernel",
        "gated_linear_kernel",
        "penalize_kernel",
        "sample_kernel",
        "place_kernel",
        "accept_kernel",
        "row_strips_kernel",
        "token_logprobs_kernel",
        "gather_logprobs_kernel",
        "mask_logits_kernel",
        "bias_logits_kernel",
        "one_shot_all_reduce_kernel",
        "two_shot_all_reduce_kernel",
        "peer_all_gather_kernel",
        "peer_add_rms_norm_kernel",
        "peer_split_add_rms_norm_kernel",
        "peer_rows_sent_kernel",
        "raylm_peer_allocate",
    ):
        assert kernel.encode() in library


@pytest.mark.parametrize(
    ("architectures", "capability", "fits"),
    [
        ((), (8, 0), True),
        (("90a-real",), (9, 0), True),
        (("90a-real",), (10, 0), False),
        (("90a-real",), (8, 9), False),
        (("80-real", "90a-real"), (8, 9), True),
        (("80-real",), (9, 0), False),
        (("86-real",), (8, 0), False),
        (("80",), (9, 0), True),
        (("100f-real",), (10, 3), True),
        (("100f-real",), (12, 0), False),
        (("all-major",), (7, 5), True),
    ],
)
def test_a_gpu_that_the_kernels_are_not_for_is_named(architectures, capability, fits):
    status = extension.ExtensionStatus(Path("kernels.so"), architectures=architectures, ops={"cuda": ("linear",)})
    misfit = status.misfit(capability)
    assert (misfit is None) == fits
    if misfit is not None:
        major, minor = capability
        assert f"capability {major}.{minor}" in misfit and f'ARCHS="{major}{minor}-real"' in misfit


def test_kernels_that_older_sources_did_not_have_are_named():
    cpu = tuple(name for name in extension.kernels_for("cpu") if name not in ("linear", "block_experts"))
    status = extension.ExtensionStatus(Path("kernels.so"), ops={"cpu": cpu, "cuda": ()})
    told = status.outdated("cpu")
    assert told is not None and "it has no linear, block_experts for CPU" in told and "`make ext`" in told
    assert str(status).endswith(f"). T{told[1:]}.")
    assert status.outdated("cuda") is None  # it was not built for GPUs
    assert set(extension.kernels_for("cuda")) | set(extension.kernels_for("cpu")) == set(SCHEMAS)


def test_missing_package_names_the_build_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, extension.PACKAGE, None)
    status = extension.load.__wrapped__()
    assert not status.loaded and status.path is None
    assert str(status).endswith("to build it, in raylm's repository: `make ext`.")


def test_broken_library_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    package = ModuleType(extension.PACKAGE)
    package.LIBRARY_PATH = tmp_path / "raylm_kernels.so"
    package.LIBRARY_PATH.write_bytes(b"not a library")
    monkeypatch.setitem(sys.modules, extension.PACKAGE, package)
    status = extension.load.__wrapped__()
    assert not status.loaded and status.path == package.LIBRARY_PATH
    assert "does not load" in str(status) and extension.BUILD_COMMAND in str(status)
