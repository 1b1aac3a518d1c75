"""EAGLE-3 heads (arXiv:2503.01840): one decoder layer that drafts from the hidden states of the target model.

Checkpoints name the layer `midlayer` or `layers.0`. `d2t` holds, for every token that the head can draft, the target's
token minus the draft's; `t2d` says the same the other way round and is not read.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from raylm.errors import ConfigError
from raylm.layers.attention import LayerInput
from raylm.layers.attention_backends import RAYLM, AttentionBackend
from raylm.layers.embedding import VocabParallelEmbedding
from raylm.layers.linear import ReplicatedLinear
from raylm.layers.residual import ResidualStream
from raylm.layers.slots import Slot, SlotName, empty_parameter, slots_of
from raylm.model_files.source import ModelSource
from raylm.models.arch import LayerSpec
from raylm.models.arch_eagle3 import Eagle3Arch
from raylm.models.blocks import Build, SelfAttention
from raylm.models.decoder import DecoderModel
from raylm.models.layers import DecoderLayer
from raylm.models.names import HF_WEIGHTS, Stored, TensorNames
from raylm.models.safetensors import folder_tensors
from raylm.models.weights import WeightLoader, fill_dummy

_EMBEDDING, _HEAD, _MAP = "embed_tokens.weight", "lm_head.weight", "d2t"
_NAMES = TensorNames(folder={**HF_WEIGHTS, "midlayer": ("layers.0", None)}, ignored=("t2d",))


class Eagle3Attention(SelfAttention):
    """Attention over an embedding and a hidden state side by side."""

    def __init__(self, build: Build, spec: LayerSpec, *, norm_follows: bool) -> None:
        super().__init__(build, spec, norm_follows=norm_follows, in_size=2 * build.arch.hidden_size)


class Eagle3Layer(DecoderLayer):
    """A Llama's layer with that attention."""

    ATTENTION: ClassVar[type[SelfAttention]] = Eagle3Attention

    def __init__(self, build: Build, spec: LayerSpec, *, norm_before_residual: bool) -> None:
        super().__init__(build, spec)
        self._build = build
        self.hidden_norm = build.norm()
        self._norm_before_residual = norm_before_residual

    def draft(self, embedded: Tensor, hidden: Tensor, step: LayerInput) -> ResidualStream:
        """The residual stream behind the layer."""
        normed = self.hidden_norm(hidden)
        stream = self._build.stream((normed if self._norm_before_residual else hidden).clone())
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        self.self_attn.add_to(stream, x, step)
        self.mlp.add_to(stream, stream.normed(self.post_attention_layernorm))
        return stream

    def remember(self, embedded: Tensor, hidden: Tensor, step: LayerInput) -> None:
        """Write the keys and values of these inputs alone."""
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)
        self.self_attn.store(x, step)


class OwnedParts(NamedTuple):
    """What a head's checkpoint has of what it might take from its target."""

    embedding: bool
    head: bool
    map: bool


DUMMY = OwnedParts(embedding=False, head=True, map=True)
"""Those of a head of random weights."""


class Eagle3Head(nn.Module):
    """Fuses hidden states of the target, runs its layer over them and the next tokens, and drafts."""

    def __init__(
        self,
        head: Eagle3Arch,
        target: DecoderModel,
        attention: AttentionBackend = RAYLM,
        owned: OwnedParts | None = None,
    ) -> None:
        """What the head does not own it takes from `target`; None stands for DUMMY."""
        super().__init__()
        owned = owned or DUMMY
        arch, context, dtype = head.arch, target.context, target.dtype
        self.arch = arch
        self.context = context
        self.attention = attention
        fused_size = len(head.target_layers) * head.target_hidden_size
        self.fc = ReplicatedLinear(fused_size, arch.hidden_size, context=context, dtype=dtype)
        build = Build(arch, context, dtype, attention)
        layer = Eagle3Layer(build, arch.layers[0], norm_before_residual=head.norm_before_residual)
        self.layers = nn.ModuleDict({"0": layer})
        self.norm = build.norm(sums=arch.norms_sum)
        if owned.embedding:
            self.embed_tokens = VocabParallelEmbedding(arch.vocab_size, arch.hidden_size, context=context, dtype=dtype)
        if owned.head:
            self.lm_head = VocabParallelEmbedding(head.draft_vocab_size, arch.hidden_size, context=context, dtype=dtype)
        self.d2t = empty_parameter(head.draft_vocab_size, dtype=torch.int64, device=context.device)
        # In tuples: the target's modules are no part of this one.
        self._layer = (layer,)
        self._embedding = (self.embed_tokens if owned.embedding else target.embed_tokens,)
        self._head = (self.lm_head if owned.head else target.head,)
        self.eval()

    def fuse(self, hidden: Tensor) -> Tensor:
        """The target's hidden states of all tapped layers, [T, layers * target hidden size] -> [T, hidden_size]."""
        fused: Tensor = self.fc(hidden)
        return fused

    def forward(self, token_ids: Tensor, hidden: Tensor, step: LayerInput) -> tuple[Tensor, Tensor]:
        """hidden: the fused state at the step's positions, or this head's own state of the position before; token_ids:
        the tokens one position on, [T].

        Returns normed states for `draft`, and states for the next position: [T, hidden_size] each.
        """
        stream = self._layer[0].draft(self._embedding[0](token_ids), hidden, step)
        return stream.normed(self.norm), stream.total()

    def remember(self, token_ids: Tensor, hidden: Tensor, step: LayerInput) -> None:
        """Write the keys and values that forward() would, and compute nothing else."""
        self._layer[0].remember(self._embedding[0](token_ids), hidden, step)

    def draft(self, normed: Tensor) -> Tensor:
        """The likeliest tokens, [S] int64 of the target's vocabulary."""
        found = self._head[0].logits(normed).argmax(dim=-1)
        return found + self.d2t.index_select(0, found)

    def slots(self) -> dict[SlotName, Slot]:
        """Every slot that the checkpoint must fill."""
        return {**slots_of(self), (_MAP, None): Slot(self.d2t, tuple(self.d2t.shape))}

    def is_elsewhere(self, parameter: str) -> bool:
        return False


def owned_parts(source: ModelSource, head: Eagle3Arch, target: DecoderModel) -> OwnedParts:
    """What the files of a head have. Raises ConfigError where it lacks what its target cannot give."""
    names = {tensor.name.removeprefix("model.") for tensor in folder_tensors(source, integers=True)}
    fits = head.arch.hidden_size == target.arch.hidden_size
    drafts_all = head.draft_vocab_size == target.arch.vocab_size
    if _EMBEDDING not in names and not fits:
        raise ConfigError(
            f"{source.path}: {_EMBEDDING} is missing, and the target's has {target.arch.hidden_size} columns, "
            f"not hidden_size {head.arch.hidden_size}"
        )
    if _HEAD not in names and not (fits and drafts_all):
        raise ConfigError(f"{source.path}: {_HEAD} is missing, and the target's has another shape")
    return OwnedParts(_EMBEDDING in names, _HEAD in names, _MAP in names or not drafts_all)


@torch.inference_mode()
def load_eagle3(
    source: ModelSource,
    head: Eagle3Arch,
    target: DecoderModel,
    *,
    attention: AttentionBackend = RAYLM,
    dummy: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> Eagle3Head:
    """Build the head beside its target and fill it from its folder, or with random weights where `dummy`.

    A head without an embedding uses the target's; so does one without a head over the vocabulary, or without a map,
    where it drafts every token. Raises ConfigError.
    """
    owned = DUMMY if dummy else owned_parts(source, head, target)
    model = Eagle3Head(head, target, attention, owned)
    if dummy:
        fill_dummy(model, seed=seed)
        return model
    if not owned.map:
        model.d2t.zero_()
    loader = WeightLoader(model, _NAMES, progress=progress, filled=() if owned.map else (_MAP,))
    loader.load(folder_tensors(source, integers=True), Stored(_NAMES.folder))
    limit = head.arch.vocab_size
    drafted = model.d2t + torch.arange(head.draft_vocab_size, device=model.d2t.device)
    if int(drafted.min()) < 0 or int(drafted.max()) >= limit:
        raise ConfigError(f"{source.path}: {_MAP} names tokens outside of the target's {limit}")
    return model
