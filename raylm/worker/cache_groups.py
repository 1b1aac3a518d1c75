"""Which layers share a block of the KV cache."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from raylm.core.step import CacheLayout
from raylm.models.cache_spec import BlockPart, CacheSpec

_MAX_PADDING = 1 / 8


class CacheGroups(NamedTuple):
    """The layers of a model in groups: those of one group keep their keys and values in the same blocks.

    layers[g] are the layers of group g, equal in their CacheSpec; specs[i] is that of layer i of the whole model. All
    groups use the same tensors of the cache (`parts`), so any block can belong to any group. (Groups of one pool as in
    Jenga, arXiv:2503.18292.)
    """

    layers: list[list[int]]
    specs: Sequence[CacheSpec]
    layout: CacheLayout
    drafts: Sequence[CacheSpec] = ()
    """Layers that draft: every block has tensors for them too, beside those of its group."""

    @classmethod
    def choose(cls, specs: Sequence[CacheSpec], *, block_size: int, max_len: int) -> CacheGroups:
        """Groups for requests of at most `max_len` tokens.

        A window that such a request does not outgrow counts as full attention. A model of one kind of layer has one
        group. Otherwise a group has as many layers as the rarest kind, or as many fewer as it takes for the groups
        that a kind does not fill to waste at most an eighth of the layers.
        """
        specs = [spec if spec.window < max_len else dataclasses.replace(spec, window=0) for spec in specs]
        kinds: dict[CacheSpec, list[int]] = {}
        for layer, spec in enumerate(specs):
            kinds.setdefault(spec, []).append(layer)
        size = _group_size([len(layers) for layers in kinds.values()])
        layers: list[list[int]] = []
        windows: list[int] = []
        for spec in sorted(kinds, key=lambda kind: kind.window):
            of_kind = kinds[spec]
            layers += [of_kind[first : first + size] for first in range(0, len(of_kind), size)]
            windows += [spec.window] * (len(layers) - len(windows))
        return cls(layers, specs, CacheLayout(block_size, windows))

    def of_stage(self, stage: range) -> CacheGroups:
        """The same groups with the layers of one pipeline stage alone. The layout stays, so that all stages understand
        the same blocks; what a block holds of a stage, and so its bytes, is the stage's own."""
        return self._replace(layers=[[layer for layer in group if layer in stage] for group in self.layers])

    @property
    def full_groups(self) -> list[int]:
        """Groups whose blocks keep every token of a request."""
        return [group for group, window in enumerate(self.layout.windows) if not window]

    @property
    def key_bytes(self) -> int:
        """Bytes of a token's keys and values in the largest layer of full attention; 0 where all slide."""
        return max((spec.block_bytes for spec in self.specs if not spec.window), default=0) // self.layout.block_size

    def of_layers(self) -> list[int]:
        """The group of every layer, in the order of layers."""
        found = {layer: group for group, layers in enumerate(self.layers) for layer in layers}
        return [found[layer] for layer in sorted(found)]

    def parts(self) -> Counter[BlockPart]:
        """How many tensors of each part the cache has: as many as the group that needs most of them, and those of the
        layers that draft. Where groups differ in their parts, a block leaves those of other groups empty."""
        most: Counter[BlockPart] = Counter()
        for group in self.layers:
            most |= parts_of(self.specs[layer] for layer in group)
        return most + parts_of(self.drafts)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank."""
        return sum(count * part.num_bytes for part, count in self.parts().items())


def parts_of(specs: Iterable[CacheSpec]) -> Counter[BlockPart]:
    """How many tensors of each part some layers have."""
    return Counter(part for spec in specs for part in spec.parts)


def _group_size(counts: list[int]) -> int:
    """Layers of a group, for kinds of `counts` layers each."""
    for size in range(min(counts), 1, -1):
        padding = sum(-count % size for count in counts)
        if padding <= _MAX_PADDING * (sum(counts) + padding):
            return size
    return 1
