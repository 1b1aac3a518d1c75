"""ArchConfig: one description of a model, whatever file it came from, read without torch and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raylm.config.engine import Implementation
from raylm.layers.rope_settings import RopeSettings
from raylm.model_files.source import ModelSource
from raylm.models.quantised.scheme import Quantisation

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
NormKind = Literal["rms", "layer"]
QKNorm = Literal["head", "each_head", "heads_apart", "all_heads"]
NormPlace = Literal["pre", "post", "sandwich", "parallel", "after"]
DTypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpec:
    """down(act(gate(x)) * up(x)), or, not gated, down(act(up(x)))."""

    size: int
    """Columns between the projections."""
    activation: Activation
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts: gated MLPs, of which a router chooses a few for each token. ops.route says how."""

    num_experts: int
    per_token: int
    size: int
    """Columns between an expert's projections."""
    activation: Activation | Literal["clamped_swiglu"]
    limit: float = 0.0
    """clamped_swiglu: the gate is at most this, what it multiplies between this and its negative."""
    bias: bool = False
    """An expert's projections have biases."""
    router_bias: bool = False
    """So has the router."""
    scores: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
    """sparse_mixer is ops.sparse_mixer: it chooses two, and nothing below counts for the choice but `jitter`."""
    jitter: float = 0.0
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    choice_bias: bool = False
    """The router has a bias that counts for the choice alone."""
    shared: MLPSpec | None = None
    """What every token goes through as well."""
    shared_gate: bool = False
    """Its output is multiplied by the sigmoid of a projection of the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one layer has of its own."""

    mlp: MLPSpec | ExpertsSpec
    rope: RopeSettings | None
    """None where attention knows no positions (NoPE), or knows them otherwise."""
    window: int = 0
    """Tokens that attention sees, the current one included; 0 means all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchConfig:
    """A decoder-only transformer. Sizes are those of the whole model, before any split between ranks."""

    architecture: str
    """A name that raylm.models.registry knows, such as "LlamaForCausalLM"."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Tokens of one sequence at most."""
    norm: NormKind
    """By the root mean square, or by mean and variance with a bias."""
    norm_eps: float
    tie_embeddings: bool
    """The head over the vocabulary uses the embedding's weights."""
    qkv_bias: bool
    o_bias: bool
    qk_norm: QKNorm | None
    """Queries and keys are normed before the rotary embedding: head by head with the weights of one (head), each head
    with its own weights by mean and variance (each_head; heads_apart where checkpoints have a tensor for each), or all
    heads together (all_heads)."""
    attention_scale: float
    attention_soft_cap: float
    """0 where attention scores are not capped."""
    logits_soft_cap: float
    """0 where logits are not capped."""
    embedding_multiplier: float
    norm_offset: float
    """What is added to the checkpoint's norm weights."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text: those of config.json and generation_config.json, or of the GGUF file."""
    sinks: bool = False
    """Each head of attention has a sink: a logit of its softmax that has no value."""
    alibi: float = 0.0
    """Positions are told by linear biases of attention scores (ALiBi), whose usual slopes are multiplied by it; 0 where
    there are none."""
    norm_place: NormPlace = "pre"
    """Attention and MLP have a norm before them (pre), behind them (post), or both (sandwich); or they read the same
    stream, each behind a norm before it (parallel); or the stream itself is normed after each has been added to it
    (after), and not once more behind the layers."""
    shared_norm: bool = False
    """parallel: attention and MLP have one norm together."""
    embed_norm: bool = False
    """Embeddings are normed before the first layer."""
    norm_bias: bool = True
    """Norms by mean and variance have a bias."""
    head_bias: bool = False
    """The head over the vocabulary has a bias; it is not the embedding then."""
    position_embeddings: int = 0
    """Positions are learned: rows of their table; 0 where there is none."""
    position_offset: int = 0
    """The row of the first position."""
    embedding_size: int = 0
    """Columns of the embedding and of the head over the vocabulary, where projections lead from there to hidden_size
    and back; 0 where there are none."""
    norm_head: bool = False
    """Each token's weights in the head over the vocabulary have length 1."""
    residual_multiplier: float = 1.0
    """What attention and MLP return is multiplied by it before it joins the residual stream."""
    logits_divisor: float = 1.0
    mtp_layers: int = 0
    """Layers for multi-token prediction (MTP) that the checkpoint has beside its num_layers."""
    unused_layers: int = 0
    """Layers behind the others that the checkpoint has and raylm does not load."""
    uses_mtp: bool = False
    """Whether the MTP layers are loaded: speculative decoding uses them, nothing else does."""
    quantisation: Quantisation | None = None
    """How the checkpoint's weights are quantised."""
    transformers_config: str = ""
    """The text of config.json, where the model runs through transformers' modules; empty otherwise. Then the other
    fields describe the cache and the sizes alone, not what the layers compute."""
    dtype: DTypeName
    """The checkpoint's own type of weights (for quantised ones, a type that holds them)."""

    @classmethod
    def from_source(cls, source: ModelSource, implementation: Implementation = "auto") -> ArchConfig:
        """Read config.json, or a GGUF file's metadata; `implementation` as in the configuration.

        Raises ConfigError naming the field at fault, its value and what is allowed.
        """
        # Each reader makes an ArchConfig, so it is imported when this class exists.
        from raylm.models.registry import read_folder_arch, read_gguf_arch

        return (
            read_gguf_arch(source.path)
            if source.kind == "gguf"
            else read_folder_arch(source.path, implementation=implementation)
        )

    @property
    def norms_sum(self) -> bool:
        """Whether what attention and MLP return goes straight into the next norm, which may sum it over the ranks, and
        then may keep only this rank's rows of the residual: nothing but norms reads it, all of the same rows."""
        return self.norm == "rms" and self.norm_place == "pre" and not self.transformers_config

    @property
    def num_layers(self) -> int:
        return len(self.layers)
