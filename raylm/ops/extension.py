"""The compiled extension: found, loaded once, and described. raylm works without it, only slower."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from raylm.ops.library import NAMESPACE, SCHEMAS

PACKAGE = "raylm_cuda"
BUILD_COMMAND = "pip install ./cuda_ext"
_DEVICES = {"cpu": "CPU", "cuda": "CUDA"}


@dataclass(frozen=True, slots=True)
class ExtensionStatus:
    """What the compiled extension gives to this process."""

    path: Path | None
    """The shared library, or None where the package is not installed."""
    error: str | None = None
    """Why the library at `path` could not be loaded."""
    ops: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Device ("cpu", "cuda") -> operators that have a compiled kernel there."""

    @property
    def loaded(self) -> bool:
        return self.path is not None and self.error is None

    def __str__(self) -> str:
        if self.path is None:
            return f"The compiled extension is not installed; build it with `{BUILD_COMMAND}`."
        if self.error is not None:
            return f"The compiled extension {self.path} does not load ({self.error}); rebuild it: `{BUILD_COMMAND}`."
        kernels = "; ".join(f"{device}: {', '.join(names)}" for device, names in self.ops.items() if names)
        return f"The compiled extension {self.path} is loaded ({kernels})."


@functools.cache
def load() -> ExtensionStatus:
    """Load the extension if it is installed, once a process, and say what came of it."""
    path = _find()
    if path is None:
        return ExtensionStatus(None)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return ExtensionStatus(path, " ".join(str(error).split()))
    return ExtensionStatus(path, ops={device: _kernels(key) for device, key in _DEVICES.items()})


def _find() -> Path | None:
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        return None
    path: Path = package.LIBRARY_PATH
    return path


def _kernels(key: str) -> tuple[str, ...]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return tuple(name for name in SCHEMAS if has_kernel(f"{NAMESPACE}::{name}", key))
