"""Weights of integers with a scale a group, repacked while they are read into blocks of GGUF files that hold the same
numbers: kernels compute with such blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import gguf
import torch
from gguf import GGMLQuantizationType as GGMLType
from torch import Tensor

from raylm.errors import ConfigError
from raylm.layers.slots import BlockForm
from raylm.models.quantised.grid import PlainZeros, Scales
from raylm.models.quantised.joined import Grouped, Kept, QuantisedTensor
from raylm.models.quantised.matrix import Span
from raylm.models.quantised.scheme import Scheme

if TYPE_CHECKING:
    from raylm.models.checkpoint import Room

_VALUES = 32
"""Of a block, in all forms."""
_HALF = _VALUES // 2
_LESS = {GGMLType.Q4_0: 8, GGMLType.Q5_0: 16, GGMLType.Q8_0: 0}
"""What a form's codes have less to be what the scale is multiplied by. Those of 8 bits have a sign."""
FORMS = {
    bits: BlockForm(kind.value, kind.name, *gguf.GGML_QUANT_SIZES[kind])
    for bits, kind in ((4, GGMLType.Q4_0), (5, GGMLType.Q5_0), (8, GGMLType.Q8_0))
}
"""Bits of an integer with its sign -> the blocks that hold it."""
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


def may_be_blocks(scheme: Scheme) -> bool:
    """Whether the numbers of weights that are stored so may be those of blocks."""
    has_own_groups = scheme.ordered and scheme.columns > 0
    # bitsandbytes' scales are 127ths of numbers, which float16 does not hold.
    is_integer = scheme.numbers == "int" and scheme.layout not in ("bnb8", "tiles")
    return is_integer and scheme.columns % _VALUES == 0 and not has_own_groups


def block_form(tensor: QuantisedTensor) -> BlockForm | None:
    """The smallest blocks that hold the weight's numbers as they are; None where none do. Zero points, and scales that
    are not float16, are read to find out. Raises ConfigError for scales that are no numbers, or have an impossible
    sign."""
    decoder, scheme = tensor.decoder, tensor.scheme
    if not may_be_blocks(scheme) or not isinstance(decoder, Grouped) or tensor.shape[1] % _VALUES:
        return None
    if not isinstance(decoder.scales, Scales) or _is_shifted(decoder):
        return None
    bits = _signed_bits(decoder, scheme.bits)
    form = next((form for most, form in FORMS.items() if bits <= most), None)
    return form if form is not None and _has_half_scales(decoder) else None


def _signed_bits(decoder: Grouped, bits: int) -> int:
    """Of code - zero point."""
    if decoder.zeros is None:
        return bits
    if isinstance(decoder.zeros, PlainZeros):
        # They may be any number. Programs write those of symmetric weights too.
        is_symmetric = bool((decoder.zeros.read(*decoder.grid) == decoder.zeros.offset).all())
        return bits if is_symmetric else max(FORMS) + 1
    # Symmetric weights of GPTQ have zero points in their files too.
    middle = bool((decoder.zeros.read(*decoder.grid) == 1 << bits - 1).all())
    return bits if middle else bits + 1


def _is_shifted(decoder: Grouped) -> bool:
    """Whether a shift is not 0."""
    return decoder.shifts is not None and bool(decoder.shifts.read(*decoder.grid).any())


def _has_half_scales(decoder: Grouped) -> bool:
    """Whether float16 holds the scales as they are."""
    scales = decoder.scales
    assert isinstance(scales, Scales) and scales.factor == 1.0 and scales.whole is None
    dtype = scales.tensor.encoding.dtype
    if dtype == torch.float16 or dtype not in _SCALES:
        return dtype == torch.float16
    found = scales.read(*decoder.grid)
    return torch.equal(found.half().float(), found)


@dataclass(frozen=True, slots=True)
class RepackedTensor(Kept[QuantisedTensor]):
    """A QuantisedTensor whose `block_form` is `form`, as such blocks: uint8 [N, bytes of a row]."""

    form: BlockForm

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.source.shape
        return rows, columns // self.form.values * self.form.num_bytes

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """As CheckpointTensor.pieces. `columns` are bytes, of whole blocks."""
        first, last = columns or (0, self.shape[1])
        span = first // self.form.num_bytes * _VALUES, last // self.form.num_bytes * _VALUES
        for row, stretches in self.source.stretches(start, stop, span):
            piece = torch.cat([self._blocks(rows, span) for rows in stretches])
            yield row, piece if self.source.rearrange is None else self.source.rearrange(piece)

    def _blocks(self, rows: Span, columns: Span) -> Tensor:
        decoder = self.source.decoder
        assert isinstance(decoder, Grouped)
        scales, zeros, _ = decoder.numbers(rows, columns, _VALUES)
        # Modulo 256, which is what negative numbers are stored by.
        codes = decoder.codes.read(rows, columns).to(torch.uint8).unflatten(1, (-1, _VALUES))
        added = _LESS[GGMLType(self.form.kind)] - (torch.zeros(1, 1) if zeros is None else zeros)
        if bool(added.any()):
            codes = codes + added.to(torch.int16).to(torch.uint8).unsqueeze(-1)
        most = 2 * _LESS[GGMLType(self.form.kind)] - 1
        if self.source.scheme.layout == "values" and most > 0 and bool((codes > most).any()):
            main = self.source.main
            raise ConfigError(
                f"{main.path}: tensor {main.name} holds integers of more than {self.source.scheme.bits} bits"
            )
        halves = scales.half().expand(codes.shape[:2]).unsqueeze(-1).contiguous().view(torch.uint8)
        return torch.cat((halves, *_PACKED[GGMLType(self.form.kind)](codes)), dim=-1).flatten(1)


def _nibbles(codes: Tensor) -> tuple[Tensor, ...]:
    """Codes [..., 32] of 4 bits, the second half of a block in the upper bits of the first half's bytes."""
    return (codes[..., :_HALF] | codes[..., _HALF:] << 4,)


def _fifths(codes: Tensor) -> tuple[Tensor, ...]:
    """Codes of 5 bits: the fifth bits of all, in the order of codes, and then the others."""
    places = torch.arange(8, dtype=torch.uint8)
    fifths = ((codes >> 4).unflatten(-1, (-1, 8)) << places).sum(dim=-1, dtype=torch.uint8)
    return fifths, *_nibbles(codes & 0xF)


_PACKED: dict[GGMLType, Callable[[Tensor], tuple[Tensor, ...]]] = {
    GGMLType.Q4_0: _nibbles,
    GGMLType.Q5_0: _fifths,
    GGMLType.Q8_0: lambda codes: (codes,),
}
"""Codes of blocks [R, B, 32] to their bytes [R, B, n], in parts."""
