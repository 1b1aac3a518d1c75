"""The decoder-only transformer that every family shares; an ArchConfig says what it is in detail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from raylm.layers.attention import UNSCALED, CacheScales, LayerInput
from raylm.layers.attention_backends import RAYLM, AttentionBackend
from raylm.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from raylm.layers.linear import ReplicatedLinear
from raylm.layers.slots import Slot, SlotName, slots_of
from raylm.models.blocks import Build, SelfAttention
from raylm.models.few_rows import FewRows, most_rows
from raylm.models.layers import make_layer

_BESIDE_LAYERS = ("embed_tokens", "embed_positions", "embed_norm", "norm", "lm_head")
_PROJECTIONS = ("project_in", "project_out")


class DecoderModel(nn.Module):
    """Embedding, layers, norm and head of a model: the part of them that one rank has.

    The first stage has the embedding, the last one norm and head, each its own layers, which keep their numbers in the
    whole model.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.arch = arch = build.arch
        self.context = context = build.context
        self.dtype = dtype = build.dtype
        self.layer_numbers = context.layers(arch.num_layers)
        """The layers of this stage."""
        self._build = build
        self._logits_soft_cap = arch.logits_soft_cap
        self._embedding_multiplier = _rounded(arch.embedding_multiplier, dtype)
        if context.is_first_stage or (context.is_last_stage and arch.tie_embeddings):
            forms = build.forms("embed_tokens")
            self.embed_tokens = VocabParallelEmbedding(
                arch.vocab_size, arch.embedding_size or arch.hidden_size, context=context, dtype=dtype, forms=forms
            )
        if arch.embedding_size and context.is_first_stage:
            self.project_in = _projection(build, "project_in", arch.embedding_size, arch.hidden_size)
        if arch.embed_norm and context.is_first_stage:
            self.embed_norm = build.norm()
        if arch.position_embeddings and context.is_first_stage:
            shape = (arch.position_embeddings, arch.hidden_size)
            self.embed_positions = PositionEmbedding(*shape, offset=arch.position_offset, context=context, dtype=dtype)
        self.layers = nn.ModuleDict({str(number): make_layer(build, number) for number in self.layer_numbers})
        self._layer_list = list(self.layers.values())
        self.runs_layers_together = build.attention is RAYLM
        """Whether one operator may run all layers of a step of few rows."""
        self._few_rows: FewRows | None = None
        self._most_few_rows = most_rows(context.device)
        if context.is_last_stage:
            if arch.norm_place != "after":
                self.norm = build.norm(sums=arch.norms_sum)
            if arch.embedding_size:
                self.project_out = _projection(build, "project_out", arch.hidden_size, arch.embedding_size)
            if not arch.tie_embeddings:
                self.lm_head = VocabParallelEmbedding(
                    *(arch.vocab_size, arch.embedding_size or arch.hidden_size),
                    context=context,
                    dtype=dtype,
                    bias=arch.head_bias,
                    forms=build.forms("lm_head"),
                )
            self._head = self.embed_tokens if arch.tie_embeddings else self.lm_head
        self.eval()

    def forward(self, given: Tensor, step: list[LayerInput]) -> Tensor:
        """given: token ids, int64 [T], at the first stage, else the stage before's output, [T, hidden_size]; it may be
        overwritten. Returns hidden states [T, hidden_size], normed at the last stage.

        `step` has one element a layer of this stage; keys and values are written into the caches.
        """
        hidden = self._embed(given, step[0].positions) if self.context.is_first_stage else given
        stream = self._build.stream(hidden)
        few_rows = self._few_rows_of(step[0])
        if few_rows is not None:
            few_rows(hidden, step)
        else:
            for layer, of_layer in zip(self._layer_list, step, strict=True):
                layer(stream, of_layer)
        if self.context.is_last_stage and self.arch.norm_place != "after":
            return stream.normed(self.norm)
        return stream.total()

    def _few_rows_of(self, step: LayerInput) -> FewRows | None:
        """What runs all layers of a step of few rows of one token each; None for others, and where nothing does."""
        rows, most = len(step.meta.seq_lens), self._most_few_rows
        if not self.runs_layers_together or step.meta.max_query_len > 1 or rows > most:
            return None
        if len(step.positions) > rows:  # Tokens that are nobody's fill up a shape of a graph.
            return None
        if self._few_rows is None:  # By now the weights have their places.
            keys = step.cache[0]
            self._few_rows = FewRows(self._build, self._layer_list, block_size=keys.shape[1], cache_dtype=keys.dtype)
        return self._few_rows if rows <= self._few_rows.most_rows else None

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(token_ids)
        if self._embedding_multiplier != 1.0:
            embedded.mul_(self._embedding_multiplier)
        if self.arch.embedding_size:
            embedded = self.project_in(embedded)
        if self.arch.position_embeddings:
            embedded += self.embed_positions(positions)
        return self.embed_norm(embedded) if self.arch.embed_norm else embedded

    def logits(self, hidden: Tensor, *, split: bool = False) -> Tensor:
        """hidden [S, hidden_size], as forward returns it at the last stage -> [S, vocab_size] on each of its ranks, of
        the model's type; float32 where the logits are capped. With `split`, each rank gets only its share of the
        rows (collectives.share_of)."""
        if self.arch.embedding_size:
            hidden = self.project_out(hidden)
        logits = self._head.logits(hidden, split=split)
        if self.arch.logits_divisor != 1.0:
            logits = logits.div_(self.arch.logits_divisor)
        if self._logits_soft_cap:
            logits = torch.tanh(logits.float() / self._logits_soft_cap).mul_(self._logits_soft_cap)
        return logits

    @property
    def attention(self) -> AttentionBackend:
        """What plans the metadata of `step` that forward() takes."""
        return self._build.attention

    @property
    def cache_scales(self) -> Mapping[int, CacheScales]:
        """Scales of the KV cache by the numbers of layers; layers that are not there have scales of 1."""
        return self._build.cache_scales

    def scale_cache(self, scales: Mapping[int, CacheScales]) -> None:
        """Set `cache_scales`. Nothing may be stored yet, and no CUDA graph hold the model."""
        self._build = replace(self._build, cache_scales=scales)
        for number, layer in self.layers.items():
            attention = layer.get_submodule("self_attn")
            assert isinstance(attention, SelfAttention), "layers of a family have their attention there"
            attention.scale_cache(scales.get(int(number), UNSCALED))

    @property
    def head(self) -> VocabParallelEmbedding:
        """The head over the vocabulary; only at the last stage."""
        return self._head

    def is_elsewhere(self, parameter: str) -> bool:
        """Whether another stage has this parameter of the whole model, or none needs it."""
        top, _, rest = parameter.partition(".")
        if top == "layers":
            number = rest.partition(".")[0]
            count = self.arch.num_layers + self.arch.unused_layers
            return number.isdecimal() and int(number) < count and int(number) not in self.layer_numbers
        known = (*_BESIDE_LAYERS, *_PROJECTIONS) if self.arch.embedding_size else _BESIDE_LAYERS
        return top in known and not hasattr(self, top)

    def slots(self) -> dict[SlotName, Slot]:
        """Every slot that a checkpoint must fill, by the full name of its parameter."""
        return slots_of(self)


def _projection(build: Build, name: str, in_size: int, out_size: int) -> ReplicatedLinear:
    return ReplicatedLinear(in_size, out_size, context=build.context, dtype=build.dtype, forms=build.forms(name))


def _rounded(value: float, dtype: torch.dtype) -> float:
    """The value as the model's type holds it: Gemma was trained with its multiplier in bfloat16."""
    return torch.tensor(value, dtype=dtype).item()
