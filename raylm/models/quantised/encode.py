"""Weights [N, K] rounded to few bits, as compressed-tensors has them: what raylm and vLLM read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from raylm.errors import ConfigError
from raylm.layers.dtypes import dtype_name

Method = Literal["fp8", "int8", "int4"]
METHODS: tuple[Method, ...] = get_args(Method)
GROUP_SIZES = (32, 64, 128)
_FORMATS = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}
_LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
"""The code of a row's or group's largest weight."""
_FLOAT8 = torch.float8_e4m3fn
_WORD_BYTES, _MIDDLE = 4, 8


@dataclass(frozen=True, slots=True)
class Encoder:
    """Rounds to nearest: a scale is the largest absolute weight of a row or group, over the largest code."""

    method: Method
    group_size: int
    """Columns that share a scale, of int4. The other methods have one scale a row."""
    dtype: torch.dtype
    """Of the scales of groups: the model's, as vLLM has them. A scale a row is float32."""

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises ConfigError where groups do not fill a row."""
        if self.method == "int4" and shape[1] % self.group_size:
            fitting = [str(size) for size in GROUP_SIZES if shape[1] % size == 0]
            allowed = f"--group-size {' or '.join(fitting)}" if fitting else "another --quantization"
            raise ConfigError(
                f"tensor {name} has rows of {shape[1]} values, which groups of {self.group_size} cannot fill; "
                f"allowed for it: {allowed}"
            )

    def parts(self, shape: Sequence[int]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Ends of names, types and shapes of the tensors of a weight: codes, scales, and the shape where codes are
        packed."""
        rows, columns = shape
        if self.method == "int4":
            return [
                ("weight_packed", torch.int32, (rows, columns // (2 * _WORD_BYTES))),
                ("weight_scale", self.dtype, (rows, columns // self.group_size)),
                ("weight_shape", torch.int64, (2,)),
            ]
        codes = _FLOAT8 if self.method == "fp8" else torch.int8
        return [("weight", codes, (rows, columns)), ("weight_scale", torch.float32, (rows, 1))]

    def encode(
        self, name: str, shape: Sequence[int], pieces: Iterator[tuple[int, Tensor]]
    ) -> Iterator[tuple[int, Tensor]]:
        """Pieces of the parts, each with the part's number. Raises ConfigError for weights that are no finite
        numbers."""
        for _, piece in pieces:
            codes, scales = self._rounded(name, piece.float())
            yield 0, codes
            yield 1, scales
        if self.method == "int4":
            yield 2, torch.tensor(list(shape))

    def _rounded(self, name: str, weights: Tensor) -> tuple[Tensor, Tensor]:
        largest = _LARGEST[self.method]
        groups = weights.unflatten(1, (-1, self.group_size if self.method == "int4" else weights.shape[1]))
        most = groups.abs().amax(-1, keepdim=True)
        if not bool(most.isfinite().all()):
            raise ConfigError(f"tensor {name} holds weights that are no finite numbers (NaN or inf)")
        scales = (most / largest).to(self.dtype if self.method == "int4" else torch.float32)
        if not bool(scales.isfinite().all()):
            raise ConfigError(f"tensor {name} holds weights that are too large for scales of {dtype_name(self.dtype)}")
        # A row of zeros has the scale 0. The scale as it is stored divides, so that its own rounding costs nothing.
        codes = groups / torch.where(scales > 0, scales.float(), 1.0)
        codes = codes.clamp_(-largest, largest).flatten(1)
        if self.method == "fp8":
            return codes.to(_FLOAT8), scales.squeeze(-1)
        codes = codes.round_().to(torch.int8)
        return codes if self.method == "int8" else _packed(codes), scales.squeeze(-1)

    def config(self, ignored: Sequence[str]) -> dict[str, object]:
        """The quantization_config of a model, of which the modules `ignored` are not quantised."""
        kind = "float" if self.method == "fp8" else "int"
        bits = 4 if self.method == "int4" else 8
        shared: dict[str, object] = {"num_bits": bits, "type": kind, "symmetric": True}
        weights: dict[str, object] = {**shared, "strategy": "channel", "group_size": None, "dynamic": False}
        activations: dict[str, object] | None = {**shared, "strategy": "token", "dynamic": True}
        if self.method == "int4":
            weights |= {"strategy": "group", "group_size": self.group_size}
            activations = None
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": activations,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": _FORMATS[self.method],
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
            "kv_cache_scheme": None,
        }


def _packed(codes: Tensor) -> Tensor:
    """Integers -8 to 7 as 0 to 15, eight in an int32, the first in the lowest bits."""
    shifted = (codes + _MIDDLE).view(torch.uint8)
    return (shifted[:, ::2] | shifted[:, 1::2] << 4).view(torch.int32)
