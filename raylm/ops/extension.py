"""The compiled extension: found, loaded once, and described. raylm works without it, only slower."""

from __future__ import annotations

import functools
import importlib
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from raylm.ops.library import NAMESPACE, SCHEMAS

PACKAGE = "raylm_cuda"
BUILD_COMMAND = "make ext"
"""In raylm's repository."""
_AGAIN = f"to build it again, in raylm's repository: `{BUILD_COMMAND}`"
_DEVICES = {"cpu": "CPU", "cuda": "CUDA"}
_OF_CPUS = frozenset(
    ("block_linear", "block_gated_linear", "block_experts", "decode_blocks", "block_kernels", "decode_layers")
)
"""Operators without a kernel for GPUs: weights stay in blocks on CPUs alone, and GPUs have few_layers."""
_NOT_OF_CPUS = frozenset(
    (
        *("penalize", "sample", "sample_columns", "token_logprobs", "gather_logprobs", "mask_logits", "bias_logits"),
        *(
            "route",
            "experts",
            "patched_experts",
            "patched_linear",
            "patched_gated_linear",
            "gated_linear",
            "few_layers",
        ),
        *("experts_kernels", "few_layers_rows", "linear_rows", "attention_kernels"),
        *("shared_prefixes", "add_halves_rms_norm"),
    )
)
_NOT_OF_CPUS_BEGIN = ("peer_", "scale", "invariant_")
"""Operators without a kernel for CPUs: there torch does what is done with logits and codes, a gated product is two
operators, ranks reduce through a process group, and no engine is deterministic."""
_ARCHITECTURE = re.compile(r"(\d{2,3})([af]?)(-real|-virtual)?")


@dataclass(frozen=True, slots=True)
class ExtensionStatus:
    """What the compiled extension gives to this process."""

    path: Path | None
    """The shared library, or None where the package is not installed."""
    error: str | None = None
    """Why the library at `path` could not be loaded."""
    architectures: tuple[str, ...] = ()
    """CUDA architectures that its kernels were compiled for, as CMake writes them."""
    ops: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Device ("cpu", "cuda") -> operators that have a compiled kernel there."""

    @property
    def loaded(self) -> bool:
        return self.path is not None and self.error is None

    def misfit(self, capability: tuple[int, int]) -> str | None:
        """Why its CUDA kernels cannot run on a GPU of this compute capability; None where they can, or it has none."""
        if not self.architectures or any(_runs_on(name, capability) for name in self.architectures):
            return None
        major, minor = capability
        return (
            f"the compiled extension {self.path} is for {', '.join(self.architectures)}, and this GPU has compute "
            f"capability {major}.{minor}; build it again, in raylm's repository: "
            f'`{BUILD_COMMAND} CUDA_ARCHS="{major}{minor}-real"`'
        )

    def outdated(self, device: str) -> str | None:
        """Which kernels for a device the library lacks, as it was built from older sources; None where it lacks none,
        or was not built for the device at all."""
        built = self.ops.get(device, ())
        lacking = [name for name in kernels_for(device) if name not in built]
        if not built or not lacking:
            return None
        return (
            f"the compiled extension {self.path} was built from older sources: it has no {', '.join(lacking)} for "
            f"{_DEVICES[device]}, and slower ways are taken in place of these; {_AGAIN}"
        )

    def __str__(self) -> str:
        if self.path is None:
            return f"The compiled extension is not installed; to build it, in raylm's repository: `{BUILD_COMMAND}`."
        if self.error is not None:
            return f"The compiled extension {self.path} does not load ({self.error}); {_AGAIN}."
        kernels = "; ".join(f"{device}: {', '.join(names)}" for device, names in self.ops.items() if names)
        outdated = [sentence[0].upper() + sentence[1:] for device in self.ops if (sentence := self.outdated(device))]
        return ". ".join((f"The compiled extension {self.path} is loaded ({kernels})", *outdated)) + "."


@functools.cache
def load() -> ExtensionStatus:
    """Load the extension if it is installed, once a process, and say what came of it."""
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        return ExtensionStatus(None)
    path: Path = package.LIBRARY_PATH
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return ExtensionStatus(path, " ".join(str(error).split()))
    ops = {device: _kernels(key) for device, key in _DEVICES.items()}
    return ExtensionStatus(path, architectures=getattr(package, "ARCHITECTURES", ()), ops=ops)


def kernels_for(device: str) -> tuple[str, ...]:
    """The operators that the extension's sources have a kernel for on a device, "cpu" or "cuda"."""
    if device == "cuda":
        return tuple(name for name in SCHEMAS if name not in _OF_CPUS)
    return tuple(name for name in SCHEMAS if name not in _NOT_OF_CPUS and not name.startswith(_NOT_OF_CPUS_BEGIN))


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for an architecture runs on a GPU: machine code within a generation, with "a" on that very chip
    alone; what is not "-real" carries code for later generations as well."""
    found = _ARCHITECTURE.fullmatch(architecture)
    if found is None:
        return True  # "native", "all": CMake's words for what fits.
    digits, special, kind = found.groups()
    own = (int(digits[:-1]), int(digits[-1]))
    if special == "a":
        return capability == own
    return capability >= own and (capability[0] == own[0] or (not special and kind != "-real"))


def _kernels(key: str) -> tuple[str, ...]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return tuple(name for name in SCHEMAS if has_kernel(f"{NAMESPACE}::{name}", key))
