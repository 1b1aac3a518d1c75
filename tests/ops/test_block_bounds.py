"""The C++ readers of quantised blocks read and write nothing outside their buffers: under the address sanitizer."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.check_layers import ROOT
from tests.ops.block_cases import KINDS

FLAGS = {
    "generic": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"],
    "avx512vnni": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"],
}
FLAGS["amx"] = [*FLAGS["avx512vnni"], "-mamx-tile", "-mamx-int8"]
"""As in cuda_ext/CMakeLists.txt."""
NEEDED = {
    "generic": set(),
    "avx2": {"avx2"},
    "avx512": {"avx512bw"},
    "avx512vnni": {"avx512bw", "avx512_vnni"},
    "amx": {"avx512bw", "avx512_vnni", "amx_int8"},
}
"""Of the flags in /proc/cpuinfo."""


def _cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not path.exists():
        return set()
    return set(next(line for line in path.read_text().splitlines() if line.startswith("flags")).split())


@pytest.mark.nightly
@pytest.mark.parametrize("isa", FLAGS)
def test_within_their_buffers(isa, tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    if missing := NEEDED[isa] - _cpu_flags():
        pytest.skip(f"this machine has no {', '.join(sorted(missing))}")
    program, source = tmp_path / "block_bounds", ROOT / "tests/ops/block_bounds.cpp"
    sanitize = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    include = ["-I", str(ROOT / "cuda_ext/include")]
    subprocess.run(
        [compiler, "-std=c++20", *sanitize, *FLAGS[isa], *include, str(source), "-o", str(program)], check=True
    )
    whole = subprocess.run([program], capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout == f"{len(KINDS)} kinds\n"
    for kind in KINDS:
        for reader in ("read", "product"):
            truncated = subprocess.run([program, str(int(kind)), reader], capture_output=True, text=True)
            assert "ERROR: AddressSanitizer" in truncated.stderr, (kind, reader)
