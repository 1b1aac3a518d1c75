"""Compiled kernels of raylm: a shared library that registers itself with torch when it is loaded."""

from __future__ import annotations

from pathlib import Path

LIBRARY_PATH = Path(__file__).parent / "raylm_kernels.so"
"""Pass it to torch.ops.load_library, after the operators' schemas have been declared."""
ARCHITECTURES = tuple(filter(None, (Path(__file__).parent / "architectures.txt").read_text().split(";")))
"""The CUDA architectures that it was compiled for, as CMake writes them ("90a-real"); none without CUDA kernels."""
