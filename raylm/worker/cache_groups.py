"""Which layers share a block of the KV cache."""

from __future__ import annotations

from typing import NamedTuple

from raylm.core.step import CacheLayout
from raylm.models.arch import ArchConfig

_MAX_PADDING = 1 / 8


class CacheGroups(NamedTuple):
    """The layers of a model in groups: those of one group keep their keys and values in the same blocks.

    layers[g] are the layers of group g, at most `size` of them. The i-th layer of every group uses the i-th pair of
    tensors of the cache, so any block can belong to any group. (Groups of one pool as in Jenga, arXiv:2503.18292.)
    """

    layers: list[list[int]]
    size: int
    layout: CacheLayout

    @classmethod
    def choose(cls, arch: ArchConfig, *, block_size: int, max_len: int) -> CacheGroups:
        """Groups for requests of at most `max_len` tokens.

        A window that such a request does not outgrow counts as full attention. A model of one kind of layer has one
        group. Otherwise a group has as many layers as the rarest kind, or as many fewer as it takes for the groups
        that a kind does not fill to waste at most an eighth of the layers.
        """
        kinds: dict[int, list[int]] = {}
        for layer, spec in enumerate(arch.layers):
            kinds.setdefault(spec.window if spec.window < max_len else 0, []).append(layer)
        size = _group_size([len(layers) for layers in kinds.values()])
        layers: list[list[int]] = []
        windows: list[int] = []
        for window in sorted(kinds):
            of_kind = kinds[window]
            layers += [of_kind[first : first + size] for first in range(0, len(of_kind), size)]
            windows += [window] * (len(layers) - len(windows))
        return cls(layers, size, CacheLayout(block_size, windows))

    def of_stage(self, stage: range) -> CacheGroups:
        """The same groups with the layers of one pipeline stage alone. The layout stays, so that all stages understand
        the same blocks; what a block holds of a stage, and so its bytes, is the stage's own."""
        layers = [[layer for layer in group if layer in stage] for group in self.layers]
        return CacheGroups(layers, max(map(len, layers)), self.layout)

    @property
    def full_group(self) -> int | None:
        """A group whose blocks keep every token of a request; None where all layers slide."""
        return next((group for group, window in enumerate(self.layout.windows) if not window), None)

    def places(self) -> list[tuple[int, int]]:
        """The group of every layer and its place there, in the order of layers."""
        found = {layer: (group, i) for group, layers in enumerate(self.layers) for i, layer in enumerate(layers)}
        return [found[layer] for layer in sorted(found)]


def _group_size(counts: list[int]) -> int:
    """Layers of a group, for kinds of `counts` layers each."""
    for size in range(min(counts), 1, -1):
        padding = sum(-count % size for count in counts)
        if padding <= _MAX_PADDING * (sum(counts) + padding):
            return size
    return 1
