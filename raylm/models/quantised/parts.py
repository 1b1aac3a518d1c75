"""The tensors that one quantised weight is stored as, checked as they are taken."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from raylm.errors import ConfigError
from raylm.models.checkpoint import CheckpointTensor, plain
from raylm.models.quantised.matrix import shaped
from raylm.models.quantised.scheme import Scheme

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Parts:
    """Of the weight of `module`: part's name -> tensor."""

    def __init__(
        self,
        module: str,
        tensors: Mapping[str, CheckpointTensor],
        scheme: Scheme,
        shape: tuple[int, int] | None = None,
    ) -> None:
        """`scheme`: as the configuration has it; a file may say something else of its weight. `shape`: the weight's,
        where the file says it beside the tensors."""
        self.module = module
        self.scheme = scheme
        self.shape = shape
        self._tensors = tensors
        self._left = set(tensors)

    def take(self, *names: str, types: Collection[torch.dtype]) -> CheckpointTensor:
        """The first of these that is there. Raises ConfigError where none is, or where it is of another type."""
        found = self.maybe(*names, types=types)
        if found is None:
            there, missing = next(iter(self._tensors.values())), " or ".join(names)
            raise ConfigError(
                f"{there.path}: {there.name} is there, but {self.module}.{missing} is missing, which a weight of "
                f"{self.scheme} needs"
            )
        return found

    def maybe(self, *names: str, types: Collection[torch.dtype]) -> CheckpointTensor | None:
        """The same, or None."""
        name = next((name for name in names if name in self._tensors), None)
        if name is None:
            return None
        self._left.discard(name)
        tensor = self._tensors[name]
        if tensor.encoding.dtype not in types:
            allowed = ", ".join(_named(each) for each in types)
            raise self.error(tensor, f"has type {_named(tensor.encoding.dtype)}", allowed)
        return tensor

    def ignore(self, *names: str) -> None:
        """What these say is known otherwise."""
        self._left -= set(names)

    def matrix(self, tensor: CheckpointTensor) -> CheckpointTensor:
        """Raises ConfigError where it is none, or without elements."""
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise self.error(tensor, f"has shape {tensor.shape}", "a matrix")
        return tensor

    def grid(self, tensor: CheckpointTensor, shape: tuple[int, int]) -> CheckpointTensor:
        """As a matrix of this shape. Raises ConfigError where the tensor's shape is another; dimensions of 1 do not
        count."""
        if [size for size in tensor.shape if size != 1] != [size for size in shape if size != 1]:
            raise self.error(tensor, f"has shape {tensor.shape}", f"{shape} ({self.scheme})")
        return shaped(tensor, shape)

    def bytes(self, tensor: CheckpointTensor) -> CheckpointTensor:
        """A tensor of any type as its bytes, in one row."""
        return replace(tensor, shape=(1, tensor.num_bytes), encoding=plain(torch.uint8))

    def finish(self) -> None:
        """Raises ConfigError where a part has not been taken."""
        if self._left:
            tensor = self._tensors[min(self._left)]
            raise ConfigError(f"{tensor.path}: tensor {tensor.name} is no part of a weight of {self.scheme}")

    def error(self, tensor: CheckpointTensor, found: str, allowed: str) -> ConfigError:
        return ConfigError(f"{tensor.path}: tensor {tensor.name} {found}; allowed: {allowed}")


def _named(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
