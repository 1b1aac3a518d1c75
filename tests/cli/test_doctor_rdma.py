"""What raylm doctor says of the way between nodes."""

from __future__ import annotations

import resource

import pytest

from raylm.cli import doctor


@pytest.mark.parametrize(
    ("devices", "library", "limit", "said"),
    [
        ([], None, 8 << 20, "none: NCCL goes over TCP between nodes"),
        (["mlx5_1", "mlx5_0"], "libibverbs.so.1", resource.RLIM_INFINITY, "mlx5_0, mlx5_1; libibverbs is there"),
        (["mlx5_0"], None, 8 << 20, "mlx5_0; libibverbs is not installed; memory that may be locked ends at 8192 KiB"),
    ],
)
def test_rdma(devices, library, limit, said, tmp_path, monkeypatch):
    for name in devices:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path if devices else tmp_path / "none")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: library)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (limit, limit))
    assert doctor._rdma().startswith(said)
