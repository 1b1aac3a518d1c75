"""How a checkpoint's weights are quantised, as its configuration says it. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["values", "nibbles", "packed", "gptq", "awq", "nf4", "fp4", "bnb8", "signed_nibbles", "tiles"]
Zero = Literal["none", "middle", "stored", "stored_less_1", "added"]
CacheNumbers = Literal["fp8", "other"]

MXFP4 = "mxfp4"
"""The method of GPT-OSS, whose family knows its layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one weight [N, K] is stored: a value is (code - zero point) * scale."""

    layout: Layout
    """How its parts lie in the files. values: `weight`, a code of 8 bits an element. nibbles: `weight` or
    `weight_packed`, two floats of 4 bits a byte. packed: `weight_packed`, integers along a row in int32. gptq:
    `qweight`, the transposed weight, integers along a column in int32. awq: `qweight`, the transposed weight, integers
    along a row in int32, in AWQ's order. nf4, fp4, bnb8: bitsandbytes' of 4 and 8 bits. signed_nibbles: TorchAO's
    integers of 4 bits with a sign, two a byte. tiles: the same in the order of tinygemm's kernels."""
    numbers: Literal["int", "float"]
    """What a code is."""
    bits: int
    rows: int = 1
    """Rows that share one scale; 0: all."""
    columns: int = 0
    """Columns that share one scale; 0: all. For nf4 and fp4 bitsandbytes' default, until a weight's own file says it: a
    configuration does not."""
    zero: Zero = "none"
    """Zero points: none (codes have a sign), in the middle of what the bits can say (symmetric), or stored. added: in
    the middle, and a stored number of each group is added behind the scale."""
    exponents: bool = False
    """Scales are powers of two, of which the exponents are stored (e8m0)."""
    ordered: bool = False
    """Which group a column is of is stored (g_idx), not told by its place."""
    two_scales: bool = False
    """Scales of 8 bits are scaled by one number of the whole weight (NVFP4)."""
    weights_only: bool = False
    """Activations are not to be quantised."""

    @property
    def scales_rows(self) -> bool:
        """Whether codes are floats of 8 bits, each row has one scale, which may be that of all rows, and activations
        are such rows too."""
        return self.numbers == "float" and not self.two_scales and self._by_rows

    @property
    def rounds_rows(self) -> bool:
        """Whether codes are integers of 8 bits, each row has one scale, which may be that of all rows, and activations
        are such rows too."""
        return self.numbers == "int" and self._by_rows

    @property
    def _by_rows(self) -> bool:
        is_scaled = self.zero == "none" and self.rows in (0, 1) and self.columns == 0
        return self.layout == "values" and self.bits == 8 and is_scaled and not self.weights_only

    @property
    def symmetric(self) -> bool:
        return self.zero in ("none", "middle")

    def __str__(self) -> str:
        kind = "floats" if self.numbers == "float" else "integers"
        if self.rows != 1:
            shared = f"blocks of {self.rows}x{self.columns}" if self.rows else "a scale a tensor"
        else:
            shared = f"groups of {self.columns}" if self.columns else "a scale a row"
        return f"{kind} of {self.bits} bits, {shared}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Modules that are stored in one way."""

    targets: tuple[str, ...]
    """Names of modules, as raylm.models.quantised.patterns reads them; empty: all."""
    scheme: Scheme | None
    """None: they are not quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """What config.json (or ModelOpt's hf_quant_config.json) says of a whole checkpoint."""

    method: str
    """quant_method, as config.json has it."""
    groups: tuple[Group, ...] = ()
    """A module is of the first group that names it, else of the first one of all modules. There are none for GPT-OSS's
    layout, and where only the KV cache is to be quantised."""
    ignored: tuple[str, ...] = ()
    """Names of modules that are not quantised, as raylm.models.quantised.patterns reads them. Loading goes by the
    tensors that are there: a module without quantised parts is not quantised."""
    in_files: bool = False
    """The files say of each weight how it is stored (TorchAO): `groups` are what to expect, and decide nothing."""
    cache: CacheNumbers | None = None
    """What keys and values are to be quantised to; None where nothing is said of it."""

    @property
    def has_parts(self) -> bool:
        """Whether weights are to be joined from parts; GPT-OSS's are by its family's names."""
        return self.method != MXFP4

    @property
    def of_weights(self) -> bool:
        """Whether any weight is quantised, not the KV cache alone."""
        return bool(self.schemes) or not self.has_parts

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All of them, each once."""
        return tuple(dict.fromkeys(group.scheme for group in self.groups if group.scheme is not None))

    @property
    def scales_rows(self) -> bool:
        """Whether all its schemes do."""
        return bool(self.schemes) and all(scheme.scales_rows for scheme in self.schemes)

    def __str__(self) -> str:
        schemes = "; ".join(map(str, self.schemes))
        return f"{self.method} ({schemes})" if schemes else self.method
