"""The decoder-only transformer that every family shares; an ArchConfig says what it is in detail."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raylm import ops
from raylm.layers.alibi import alibi_slopes_of_rank
from raylm.layers.attention import AttentionMetadata, KVCache
from raylm.layers.attention_backends import RAYLM, AttentionBackend
from raylm.layers.embedding import VocabParallelEmbedding
from raylm.layers.rotary import rotary_table
from raylm.layers.slots import Slot, SlotName, slots_of
from raylm.models.arch import ArchConfig
from raylm.models.blocks import Build, layer_class
from raylm.models.few_rows import FewRows
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext


class DecoderModel(nn.Module):
    """Embedding, layers, norm and head of a model: the part of them that one rank has.

    The first stage has the embedding, the last one norm and head, each its own layers, which keep their numbers in the
    whole model.
    """

    def __init__(
        self, arch: ArchConfig, context: ParallelContext, dtype: torch.dtype, attention: AttentionBackend = RAYLM
    ) -> None:
        super().__init__()
        self.arch = arch
        self.context = context
        self.dtype = dtype
        self.layer_numbers = context.layers(arch.num_layers)
        """The layers of this stage."""
        self._logits_soft_cap = arch.logits_soft_cap
        self._embedding_multiplier = _rounded(arch.embedding_multiplier, dtype)
        self._position_tables = tables = _position_tables(arch, self.layer_numbers, context)
        if context.is_first_stage or (context.is_last_stage and arch.tie_embeddings):
            self.embed_tokens = VocabParallelEmbedding(arch.vocab_size, arch.hidden_size, context=context, dtype=dtype)
        build = Build(arch, context, dtype, attention)
        if arch.embed_norm and context.is_first_stage:
            self.embed_norm = build.norm()
        make = layer_class(arch)
        self.layers = nn.ModuleDict({str(layer): make(build, layer, tables[layer]) for layer in self.layer_numbers})
        self._layer_list = list(self.layers.values())
        self.runs_layers_together = attention is RAYLM
        """Whether one operator may run all layers of a step of few rows."""
        self._few_rows: FewRows | None = None
        if context.is_last_stage:
            self.norm = build.norm(sums=arch.norms_sum)
            if not arch.tie_embeddings:
                self.lm_head = VocabParallelEmbedding(arch.vocab_size, arch.hidden_size, context=context, dtype=dtype)
            self._head = self.embed_tokens if arch.tie_embeddings else self.lm_head
        self.eval()

    def forward(
        self, given: Tensor, positions: Tensor, kv_caches: list[KVCache], metas: list[AttentionMetadata]
    ) -> Tensor:
        """given: token ids, int64 [T], at the first stage, else the stage before's output, [T, hidden_size]; it may be
        overwritten. positions: int64 [T]. Returns hidden states [T, hidden_size], normed at the last stage.

        `kv_caches` and `metas` have one element a layer of this stage; the step's keys and values are written into the
        caches.
        """
        residual = self._embed(given) if self.context.is_first_stage else given
        delta = None
        few_rows = self._few_rows_of(metas[0], kv_caches[0][0])
        if few_rows is not None:
            few_rows(residual, positions, kv_caches, metas[0])
        else:
            for layer, cache, meta in zip(self._layer_list, kv_caches, metas, strict=True):
                delta = layer(delta, residual, positions, cache, meta)
        if not self.context.is_last_stage:
            return residual if delta is None else residual.add_(self._summed(delta))
        normed: Tensor = self.norm(residual, delta)
        return normed

    def _few_rows_of(self, meta: AttentionMetadata, keys: Tensor) -> FewRows | None:
        """What runs all layers of a step of few rows of one token each; None for others, and where nothing does.
        `keys`: a layer's cache."""
        rows = len(meta.seq_lens)
        if not self.runs_layers_together or meta.max_query_len > 1 or rows > ops.FEW_ROWS:
            return None
        if self._few_rows is None:  # By now the weights have their places.
            tables, block_size = self._position_tables, keys.shape[1]
            self._few_rows = FewRows(self.arch, self._layer_list, tables, self.context, block_size=block_size)
        return self._few_rows if rows <= self._few_rows.most_rows else None

    def _summed(self, delta: Tensor) -> Tensor:
        """What the last layer of a stage returned, without a norm behind it to sum it."""
        left = self.arch.norms_sum and collectives.norm_sums(delta, self.context)
        return collectives.all_reduce(delta, self.context) if left else delta

    def _embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(token_ids)
        if self._embedding_multiplier != 1.0:
            embedded.mul_(self._embedding_multiplier)
        return self.embed_norm(embedded) if self.arch.embed_norm else embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size], as forward returns it at the last stage -> [S, vocab_size] on each of its ranks, of
        the model's type; float32 where the logits are capped."""
        logits = self._head.logits(hidden)
        if self.arch.logits_divisor != 1.0:
            logits = logits.div_(self.arch.logits_divisor)
        if self._logits_soft_cap:
            logits = torch.tanh(logits.float() / self._logits_soft_cap).mul_(self._logits_soft_cap)
        return logits

    @property
    def head(self) -> VocabParallelEmbedding:
        """The head over the vocabulary; only at the last stage."""
        return self._head

    def is_elsewhere(self, parameter: str) -> bool:
        """Whether another stage has this parameter of the whole model."""
        top, _, rest = parameter.partition(".")
        if top == "layers":
            number = rest.partition(".")[0]
            return number.isdecimal() and int(number) < self.arch.num_layers and int(number) not in self.layer_numbers
        return top in ("embed_tokens", "embed_norm", "norm", "lm_head") and not hasattr(self, top)

    def slots(self) -> dict[SlotName, Slot]:
        """Every slot that a checkpoint must fill, by the full name of its parameter."""
        return slots_of(self)


def _position_tables(arch: ArchConfig, layers: range, context: ParallelContext) -> dict[int, Tensor]:
    """What each layer's attention knows positions by: a rotary table, one for all layers of equal settings (at 131,072
    positions it has 64 MiB), or the slopes of linear biases."""
    if arch.alibi:
        return dict.fromkeys(layers, alibi_slopes_of_rank(arch.num_heads, context))
    tables = {
        rope: rotary_table(rope, head_dim=arch.head_dim, max_position=arch.max_position, device=context.device)
        for rope in {arch.rope(layer) for layer in layers}
    }
    return {layer: tables[arch.rope(layer)] for layer in layers}


def _rounded(value: float, dtype: torch.dtype) -> float:
    """The value as the model's type holds it: Gemma was trained with its multiplier in bfloat16."""
    return torch.tensor(value, dtype=dtype).item()
