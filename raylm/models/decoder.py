"""The decoder-only transformer that every family shares. A family's file says only in what it differs."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from raylm import ops
from raylm.layers.alibi import alibi_slopes_of_rank
from raylm.layers.attention import Attention, AttentionMetadata, KVCache
from raylm.layers.attention_backends import RAYLM, AttentionBackend
from raylm.layers.embedding import VocabParallelEmbedding
from raylm.layers.linear import GatedParallelLinear, QKVParallelLinear, RowParallelLinear
from raylm.layers.norm import LayerNorm, RMSNorm
from raylm.layers.rotary import rotary_table
from raylm.layers.slots import Slot, SlotName, slots_of
from raylm.models.arch import ArchConfig
from raylm.models.few_rows import FewRows
from raylm.models.names import GGUF_WEIGHTS, HF_WEIGHTS, WeightTable
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext


class SelfAttention(nn.Module):
    """Attention of one layer: project, norm heads where the family does, rotate, attend, project back."""

    def __init__(
        self,
        arch: ArchConfig,
        layer: int,
        rotary: Tensor,
        attention: AttentionBackend,
        *,
        context: ParallelContext,
        dtype: torch.dtype,
        norm_follows: bool,
        in_size: int | None = None,
    ) -> None:
        """`in_size`: columns of the input, where they are not hidden_size."""
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            in_size or arch.hidden_size,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            bias=arch.qkv_bias,
            context=context,
            dtype=dtype,
        )
        self.o_proj = RowParallelLinear(
            arch.num_heads * arch.head_dim,
            arch.hidden_size,
            bias=arch.o_bias,
            context=context,
            dtype=dtype,
            norm_follows=norm_follows,
        )
        self.q_norm = self._head_norm(arch, context, dtype) if arch.qk_norm else None
        self.k_norm = self._head_norm(arch, context, dtype) if arch.qk_norm else None
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self._splits = [num_heads, num_kv_heads, num_kv_heads]
        self._heads = (num_heads + 2 * num_kv_heads, arch.head_dim)
        self._norm_eps = arch.norm_eps
        self._rotary = rotary
        self._attention = Attention(
            attention, scale=arch.attention_scale, window=arch.window(layer), soft_cap=arch.attention_soft_cap
        )

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        residual: Tensor | None = None,
    ) -> Tensor | None:
        """What is to be added to the residual stream; None where `residual` has it already."""
        out = self._attention(self.store(x, positions, cache, meta), cache, meta)
        added: Tensor | None = self.o_proj(out.view(len(x), -1), residual)
        return added

    def store(self, x: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """Write keys and values into the cache. Returns the queries, [T, num_heads, head_dim]."""
        # Views of the fused output, [num_tokens, heads, head_dim] each: the operators take strides.
        q, k, v = self.qkv_proj(x).view(len(x), *self._heads).split(self._splits, dim=1)
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        # `positions` and the slots were written before the embedding or the previous stage gave x.
        ops.rope_store(
            *(q, k, v, q_weight, k_weight, self._norm_eps, positions, self._rotary, *cache, meta.slot_mapping),
            frozen=True,
        )
        return q

    @staticmethod
    def _head_norm(arch: ArchConfig, context: ParallelContext, dtype: torch.dtype) -> RMSNorm:
        return RMSNorm(arch.head_dim, arch.norm_eps, context=context, dtype=dtype, offset=arch.norm_offset)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, arch: ArchConfig, *, context: ParallelContext, dtype: torch.dtype, norm_follows: bool) -> None:
        super().__init__()
        size = arch.intermediate_size
        self.gate_up_proj = GatedParallelLinear(
            arch.hidden_size, size, arch.activation, bias=arch.mlp_bias, context=context, dtype=dtype
        )
        self.down_proj = RowParallelLinear(
            size, arch.hidden_size, bias=arch.mlp_bias, context=context, dtype=dtype, norm_follows=norm_follows
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | None:
        """As SelfAttention.forward."""
        added: Tensor | None = self.down_proj(self.gate_up_proj(x), residual)
        return added


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm. The residual stream is one tensor that the norms add to in place.

    `ATTENTION` and `MLP` are made as SelfAttention and GatedMLP are. `NORMS_SUM`: what they return goes straight into
    the next norm, which may sum it over the ranks, and then may keep only this rank's rows of the residual: nothing but
    norms reads it, all of the same rows.
    """

    NORMS_SUM: ClassVar[bool] = True
    ATTENTION: ClassVar[type[nn.Module]] = SelfAttention
    MLP: ClassVar[type[nn.Module]] = GatedMLP

    def __init__(
        self,
        arch: ArchConfig,
        layer: int,
        position_table: Tensor,
        attention: AttentionBackend,
        *,
        context: ParallelContext,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        sums = self.NORMS_SUM
        self.self_attn = self.ATTENTION(
            arch, layer, position_table, attention, context=context, dtype=dtype, norm_follows=sums
        )
        self.mlp = self.MLP(arch, context=context, dtype=dtype, norm_follows=sums)
        self.input_layernorm = layer_norm(arch, context, dtype, sums=sums)
        self.post_attention_layernorm = layer_norm(arch, context, dtype, sums=sums)

    def forward(
        self, delta: Tensor | None, residual: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMetadata
    ) -> Tensor | None:
        """Adds delta (what the layer below has left to add, if anything) and the attention's output to residual in
        place; returns the MLP's output, which the layer above adds, or None where it is added. All are [T,
        hidden_size]."""
        x = self.input_layernorm(residual, delta)
        delta = self.self_attn(x, positions, cache, meta, residual)
        added: Tensor | None = self.mlp(self.post_attention_layernorm(residual, delta), residual)
        return added


class DecoderModel(nn.Module):
    """Embedding, layers, norm and head of one family: the part of them that one rank has.

    The first stage has the embedding, the last one norm and head, each its own layers, which keep their numbers in the
    whole model. `WEIGHTS` maps the parts of a checkpoint tensor's name to this model's parameters, `GGUF_WEIGHTS` does
    so for GGUF files. `PREFIXES` are what a checkpoint may put before its names, `IGNORED` prefixes of tensors that
    have no place here, `LAYER` the class of a layer.
    """

    WEIGHTS: ClassVar[WeightTable] = HF_WEIGHTS
    GGUF_WEIGHTS: ClassVar[WeightTable] = GGUF_WEIGHTS
    PREFIXES: ClassVar[tuple[str, ...]] = ("model.",)
    IGNORED: ClassVar[tuple[str, ...]] = ()
    LAYER: ClassVar[type[DecoderLayer]] = DecoderLayer

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
        self.layers = nn.ModuleDict(
            {
                str(layer): self.LAYER(arch, layer, tables[layer], attention, context=context, dtype=dtype)
                for layer in self.layer_numbers
            }
        )
        self._layer_list = list(self.layers.values())
        self.runs_layers_together = attention is RAYLM and self.LAYER is DecoderLayer
        """Whether one operator may run all layers of a step of few rows."""
        self._few_rows: FewRows | None = None
        if context.is_last_stage:
            self.norm = layer_norm(arch, context, dtype, sums=self.LAYER.NORMS_SUM)
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
        left = self.LAYER.NORMS_SUM and collectives.norm_sums(delta, self.context)
        return collectives.all_reduce(delta, self.context) if left else delta

    def _embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(token_ids)
        return embedded.mul_(self._embedding_multiplier) if self._embedding_multiplier != 1.0 else embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size], as forward returns it at the last stage -> [S, vocab_size] on each of its ranks, of
        the model's type; float32 where the logits are capped."""
        logits = self._head.logits(hidden)
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
        return top in ("embed_tokens", "norm", "lm_head") and not hasattr(self, top)

    def slots(self) -> dict[SlotName, Slot]:
        """Every slot that a checkpoint must fill, by the full name of its parameter."""
        return slots_of(self)


def layer_norm(
    arch: ArchConfig, context: ParallelContext, dtype: torch.dtype, *, sums: bool = False
) -> RMSNorm | LayerNorm:
    """A norm over the hidden size."""
    if arch.norm == "layer":
        return LayerNorm(arch.hidden_size, arch.norm_eps, context=context, dtype=dtype)
    return RMSNorm(arch.hidden_size, arch.norm_eps, context=context, dtype=dtype, offset=arch.norm_offset, sums=sums)


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
