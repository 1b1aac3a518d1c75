"""From names in a checkpoint to this package's parameters, by tables over whole parts of a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from raylm.layers.slots import SlotName

WeightTable = Mapping[str, tuple[str, str | None]]
"""Part of a checkpoint's name -> the part that replaces it, and the shard that the tensor is (or None). A part is two
words with a dot between them, or one; a name may stand here whole as well, without prefix and parameter."""

HF_WEIGHTS: WeightTable = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", "gate"),
    "up_proj": ("gate_up_proj", "up"),
}
"""Checkpoints of transformers: other parts are named here as there."""

MIXTRAL_WEIGHTS: WeightTable = {
    **HF_WEIGHTS,
    "block_sparse_moe": ("mlp", None),
    "w1": ("gate_up_proj", "gate"),
    "w3": ("gate_up_proj", "up"),
    "w2": ("down_proj", None),
}
"""Mixtral's, and those of models that took its names for their experts."""

MEGATRON_WEIGHTS: WeightTable = {
    "query_key_value": ("qkv_proj", None),
    "dense": ("o_proj", None),
    "dense_h_to_4h": ("up_proj", None),
    "dense_4h_to_h": ("down_proj", None),
}
"""Of models that kept Megatron-LM's names for what their layers multiply by."""

GGUF_WEIGHTS: WeightTable = {
    "token_embd": ("embed_tokens", None),
    "output_norm": ("norm", None),
    "output": ("lm_head", None),
    "blk": ("layers", None),
    "attn_norm": ("input_layernorm", None),
    "attn_q": ("self_attn.qkv_proj", "q"),
    "attn_k": ("self_attn.qkv_proj", "k"),
    "attn_v": ("self_attn.qkv_proj", "v"),
    "attn_qkv": ("self_attn.qkv_proj", None),
    "attn_q_norm": ("self_attn.q_norm", None),
    "attn_k_norm": ("self_attn.k_norm", None),
    "attn_output": ("self_attn.o_proj", None),
    "ffn_norm": ("post_attention_layernorm", None),
    "ffn_gate": ("mlp.gate_up_proj", "gate"),
    "ffn_up": ("mlp.gate_up_proj", "up"),
    "ffn_down": ("mlp.down_proj", None),
    "ffn_gate_inp": ("mlp.gate", None),
    "ffn_gate_exps": ("mlp.experts.gate_up_proj", "gate"),
    "ffn_up_exps": ("mlp.experts.gate_up_proj", "up"),
    "ffn_gate_up_exps": ("mlp.experts.gate_up_proj", None),
    "ffn_down_exps": ("mlp.experts.down_proj", None),
    "exp_probs_b.bias": ("mlp.gate.e_score_correction_bias", None),
    "ffn_gate_inp_shexp": ("mlp.shared_expert_gate", None),
    "ffn_gate_shexp": ("mlp.shared_expert.gate_up_proj", "gate"),
    "ffn_up_shexp": ("mlp.shared_expert.gate_up_proj", "up"),
    "ffn_down_shexp": ("mlp.shared_expert.down_proj", None),
}
"""GGUF files, as llama.cpp names tensors."""

GGUF_SANDWICH_WEIGHTS: WeightTable = {
    **GGUF_WEIGHTS,
    "post_attention_norm": ("post_attention_layernorm", None),
    "ffn_norm": ("pre_feedforward_layernorm", None),
    "post_ffw_norm": ("post_feedforward_layernorm", None),
}
"""Of layers with norms behind attention and MLP."""

MISTRAL_WEIGHTS: WeightTable = {
    "tok_embeddings": ("embed_tokens", None),
    "output": ("lm_head", None),
    "attention_norm": ("input_layernorm", None),
    "attention": ("self_attn", None),
    "wq": ("qkv_proj", "q"),
    "wk": ("qkv_proj", "k"),
    "wv": ("qkv_proj", "v"),
    "wo": ("o_proj", None),
    "ffn_norm": ("post_attention_layernorm", None),
    "feed_forward": ("mlp", None),
    "w1": ("gate_up_proj", "gate"),
    "w2": ("down_proj", None),
    "w3": ("gate_up_proj", "up"),
}
"""Mistral's own files, consolidated.safetensors."""


ROTARY_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Ends of names: old checkpoints carry what follows from the configuration."""
BLOCKS, SCALES = "blocks", "scales"
"""Of a weight in MXFP4, the names of its two parameters, and the ends of their names in files behind a "_"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """What the checkpoints of a family call the tensors that its models need."""

    folder: WeightTable = field(default_factory=lambda: HF_WEIGHTS)
    """Of safetensors."""
    gguf: WeightTable = field(default_factory=lambda: GGUF_WEIGHTS)
    mistral: WeightTable = field(default_factory=lambda: MISTRAL_WEIGHTS)
    """Of Mistral's own files, whose rotary dimensions are in pairs."""
    pairs: bool = False
    """Safetensors have the rows of queries and keys in the order of a rotary embedding that pairs neighbouring
    dimensions of a head, not those half a head apart."""
    gguf_pairs: bool = False
    """So have GGUF files."""
    qkv_groups: bool = False
    """A tensor of queries, keys and values has them by heads of keys: each one's queries, then key, then value."""
    gate_up_turns: bool = False
    """A tensor of gate and up has their rows in turns: gate's first, up's first, gate's second."""
    transposed: tuple[str, ...] = ()
    """Parts of names of weights that are stored as [in, out]."""
    packed: bool = False
    """Weights may be stored as MXFP4: a tensor of BLOCKS and one of SCALES in place of the weight."""
    prefixes: tuple[str, ...] = ("model.",)
    """What may stand before the names."""
    ignored: tuple[str, ...] = ()
    """Prefixes of tensors that have no place here."""
    ignored_ends: tuple[str, ...] = ROTARY_BUFFERS
    """Their ends."""

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint's tensor has no place here. It may be of any type."""
        return name.startswith(self.ignored) or name.endswith(self.ignored_ends)


TEXT_BESIDE_VISION = TensorNames(
    prefixes=("model.language_model.", "language_model.model.", "language_model.", "model."),
    ignored=(
        *("model.vision_tower.", "vision_tower."),
        *("model.multi_modal_projector.", "multi_modal_projector."),
    ),
)
"""Of text models inside checkpoints that also see images, whose weights for that are not loaded."""


class Stored(NamedTuple):
    """How a file has tensors: what they are called, and whether rotary dimensions are paired (TensorNames.pairs)."""

    table: WeightTable
    pairs: bool = False


def slot_name(name: str, table: WeightTable, prefixes: tuple[str, ...] = ()) -> SlotName:
    """The slot that a checkpoint tensor is for. The first of `prefixes` that fits is cut off."""
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    path, _, parameter = name[len(prefix) :].rpartition(".")
    if path in table:
        renamed, shard = table[path]
        return f"{renamed}.{parameter}", shard
    words, parts, shard = name[len(prefix) :].split("."), [], None
    while words:
        size = 2 if ".".join(words[:2]) in table else 1
        part = ".".join(words[:size])
        renamed, found = table.get(part, (part, None))
        parts.append(renamed)
        shard = found or shard
        del words[:size]
    return ".".join(parts), shard
