"""Compiled kernels of raylm: a shared library that registers itself with torch when it is loaded."""

from __future__ import annotations

from pathlib import Path

LIBRARY_PATH = Path(__file__).parent / "raylm_kernels.so"
"""Pass it to torch.ops.load_library, after the operators' schemas have been declared."""
