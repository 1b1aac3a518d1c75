"""The operators of a transformer step, one function each; torch's dispatcher picks the kernel by device.

Tensors may be strided views as long as their last dimension is contiguous: queries, keys and values are usually slices
of one fused projection. T is the number of tokens of the step, S the number of sequences, Hq and Hk the query and
key/value heads, D the head size. The kernels do not record gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from raylm.ops import extension, fallback, library  # noqa: F401  (registers schemas and fallbacks)
from raylm.ops.blocks import block_experts as block_experts
from raylm.ops.blocks import block_gated_linear as block_gated_linear
from raylm.ops.blocks import block_kernels as block_kernels
from raylm.ops.blocks import block_linear as block_linear
from raylm.ops.blocks import decode_blocks as decode_blocks
from raylm.ops.decode_layers import PLAIN as PLAIN
from raylm.ops.experts import ACTIVATIONS as ACTIVATIONS
from raylm.ops.experts import sparse_mixer as _sparse_mixer
from raylm.ops.invariant import invariant_attention as invariant_attention
from raylm.ops.invariant import invariant_experts as invariant_experts
from raylm.ops.invariant import invariant_linear as invariant_linear
from raylm.ops.invariant import invariant_rms_norm as invariant_rms_norm
from raylm.ops.layer_weights import FEW_ROWS as FEW_ROWS
from raylm.ops.layer_weights import LayerWeights as LayerWeights
from raylm.ops.layer_weights import Mixture as Mixture
from raylm.ops.layer_weights import PeerCells as PeerCells
from raylm.ops.layer_weights import few_layers as few_layers
from raylm.ops.layer_weights import few_layers_memory as few_layers_memory
from raylm.ops.layer_weights import few_layers_rows as few_layers_rows
from raylm.ops.layer_weights import peer_cells_bytes as peer_cells_bytes
from raylm.ops.patched import PATCHED_UNIT as PATCHED_UNIT
from raylm.ops.patched import patched_experts as patched_experts
from raylm.ops.patched import patched_gated_linear as patched_gated_linear
from raylm.ops.patched import patched_linear as patched_linear
from raylm.ops.patched import takes_patched as takes_patched
from raylm.ops.patched import takes_patched_experts as takes_patched_experts
from raylm.ops.patches import GROUPS as GROUPS
from raylm.ops.patches import MOST_CODE as MOST_CODE
from raylm.ops.patches import MOST_EXPONENT as MOST_EXPONENT
from raylm.ops.patches import MOST_SCALE as MOST_SCALE
from raylm.ops.patches import MOST_UNROUNDED as MOST_UNROUNDED
from raylm.ops.patches import MOST_ZERO as MOST_ZERO
from raylm.ops.patches import NF4 as NF4
from raylm.ops.patches import PATCH_COLUMNS as PATCH_COLUMNS
from raylm.ops.patches import PATCH_ROWS as PATCH_ROWS
from raylm.ops.patches import Numbers as Numbers
from raylm.ops.patches import pack_affine as pack_affine
from raylm.ops.patches import pack_fp8 as pack_fp8
from raylm.ops.patches import pack_integers as pack_integers
from raylm.ops.patches import pack_mxfp4 as pack_mxfp4
from raylm.ops.patches import pack_mxfp8 as pack_mxfp8
from raylm.ops.patches import pack_nf4 as pack_nf4
from raylm.ops.patches import patch_bytes as patch_bytes
from raylm.ops.patches import quantise_fp8 as quantise_fp8
from raylm.ops.patches import unpack as unpack
from raylm.ops.peers import peer_add_rms_norm as peer_add_rms_norm
from raylm.ops.peers import peer_all_gather as peer_all_gather
from raylm.ops.peers import peer_all_reduce as peer_all_reduce
from raylm.ops.peers import peer_send_rows as peer_send_rows
from raylm.ops.peers import peer_sent_add_rms_norm as peer_sent_add_rms_norm
from raylm.ops.peers import peer_split_add_rms_norm as peer_split_add_rms_norm
from raylm.ops.prefixes import MOST_PREFIX_SEQS as MOST_PREFIX_SEQS
from raylm.ops.prefixes import MOST_SHARERS as MOST_SHARERS
from raylm.ops.prefixes import PREFIX_HEAD_DIM as PREFIX_HEAD_DIM
from raylm.ops.prefixes import SHARED_DEPTHS as SHARED_DEPTHS
from raylm.ops.scaled import CODES as CODES
from raylm.ops.scaled import Rows as Rows
from raylm.ops.scaled import ScaledRows as ScaledRows
from raylm.ops.scaled import scale_rows as scale_rows
from raylm.ops.scaled import scaled_gated as scaled_gated
from raylm.ops.scaled import scaled_gated_linear as scaled_gated_linear
from raylm.ops.scaled import scaled_linear as scaled_linear
from raylm.ops.scaled import scaled_rms_norm as scaled_rms_norm
from raylm.ops.scaled import takes_scaled as takes_scaled
from raylm.ops.stored_layers import StoredLayers as StoredLayers
from raylm.ops.stored_layers import decode_layers as decode_layers
from raylm.ops.stored_layers import has_decode_layers as has_decode_layers
from raylm.ops.tokens import Placed as Placed

extension.load()

_rms_norm: Callable[..., Tensor] = torch.ops.raylm.rms_norm.default
_add_rms_norm: Callable[..., Tensor] = torch.ops.raylm.add_rms_norm.default
_add_halves_rms_norm: Callable[..., Tensor] = torch.ops.raylm.add_halves_rms_norm.default
_rotary: Callable[..., None] = torch.ops.raylm.rotary.default
_store_kv: Callable[..., None] = torch.ops.raylm.store_kv.default
_rope_store: Callable[..., None] = torch.ops.raylm.rope_store.default
_paged_attention: Callable[..., Tensor] = torch.ops.raylm.paged_attention.default
_silu_mul: Callable[..., Tensor] = torch.ops.raylm.silu_mul.default
_gelu_tanh_mul: Callable[..., Tensor] = torch.ops.raylm.gelu_tanh_mul.default
_linear: Callable[..., Tensor] = torch.ops.raylm.linear.default
_gated_linear: Callable[..., Tensor] = torch.ops.raylm.gated_linear.default
_linear_rows: Callable[..., int] = torch.ops.raylm.linear_rows.default
_attention_kernels: Callable[..., tuple[bool, bool]] = torch.ops.raylm.attention_kernels.default
_route: Callable[..., tuple[Tensor, Tensor]] = torch.ops.raylm.route.default
_experts: Callable[..., Tensor] = torch.ops.raylm.experts.default
_experts_kernels: Callable[..., bool] = torch.ops.raylm.experts_kernels.default
_sample: Callable[..., Tensor] = torch.ops.raylm.sample.default
_sample_columns: Callable[..., int] = torch.ops.raylm.sample_columns.default
_penalize: Callable[..., Tensor] = torch.ops.raylm.penalize.default
_shared_prefixes: Callable[..., Tensor] = torch.ops.raylm.shared_prefixes.default
_place: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]] = torch.ops.raylm.place.default
_accept: Callable[..., Tensor] = torch.ops.raylm.accept.default
_token_logprobs: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = torch.ops.raylm.token_logprobs.default
_gather_logprobs: Callable[..., Tensor] = torch.ops.raylm.gather_logprobs.default
_mask_logits: Callable[..., None] = torch.ops.raylm.mask_logits.default
_bias_logits: Callable[..., None] = torch.ops.raylm.bias_logits.default

MAX_ARRIVALS = 4096
"""Counters that paged_attention has a use for: two of prefill, and for decode more than any GPU runs blocks."""
MAX_KERNEL_EXPERTS = 512
"""Most experts that the compiled kernel of route chooses among."""
MAX_KERNEL_TOP = 64
"""Most likeliest tokens that the compiled kernel of token_logprobs gives; for more, torch sorts."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension of x [..., H], computed in float32, in x's dtype."""
    return _rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, H] += x [T, H] in place; returns the norm of the new residual."""
    return _add_rms_norm(x, residual, weight, eps)


def add_halves_rms_norm(halves: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """add_rms_norm of the sum of halves [2, T, H], which is not rounded before it is added."""
    return _add_halves_rms_norm(halves, residual, weight, eps)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate q [T, Hq, D] and k [T, Hk, D] in place by their positions [T] (int64).

    `cos_sin` [max_position, R] in float32 holds R/2 cosines, then R/2 sines. Dimension i < R/2 is paired with i + R/2
    (the "NeoX" layout of RoFormer, arXiv:2104.09864); dimensions from R on stay as they are.
    """
    _rotary(q, k, positions, cos_sin)


def _has_codes_on_cpu(cache: Tensor) -> bool:
    """Whether a KV cache is for torch's version of an operator: compiled CPU kernels read no codes."""
    return cache.dtype == CODES and cache.device.type == "cpu"


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write k and v [T, Hk, D] into the caches [num_blocks, block_size, Hk, D].

    Token t goes to slot_mapping[t] (int64) = block * block_size + offset. A slot outside the cache is an error; the
    CUDA kernel cannot raise one and skips the token.

    The caches have k's dtype, or hold CODES: then a key is stored as the code nearest to key / k_scale, one past the
    largest as that, and values likewise. Without codes both scales are 1.
    """
    store = fallback.store_kv if _has_codes_on_cpu(k_cache) else _store_kv
    store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    frozen: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """All that happens to q [T, Hq, D], k and v [T, Hk, D] before attention: rms_norm, rotary, store_kv, in this order.

    q is changed in place, k and v go to the caches; what k itself holds afterwards is not defined. `q_weight` and
    `k_weight` [D] norm each head; without them nothing is normed.

    `frozen`, as in linear, holds for both weights, positions, cos_sin and slot_mapping. The scales are store_kv's.
    """
    store = fallback.rope_store if _has_codes_on_cpu(k_cache) else _rope_store
    store(
        *(q, k, v, q_weight, k_weight, eps, positions, cos_sin, k_cache, v_cache, slot_mapping),
        *(frozen, k_scale, v_scale),
    )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    arrivals: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    prefixes: Tensor | None = None,
    *,
    frozen: bool = False,
) -> Tensor:
    """Causal attention of q [T, Hq, D] over a paged cache [num_blocks, block_size, Hk, D]; returns [T, Hq, D].

    Sequence s has seq_lens[s] cached keys, in the blocks block_table[s] (int32 [S, max_blocks]); its queries are the
    rows query_start[s] to query_start[s + 1] of q (int32 [S + 1]) and stand at its last positions. Prefill, a chunk of
    it and decode differ only in how many queries a sequence has. Rows of q past query_start[S] give zeros.

    `window` > 0 lets a query at position p see the keys in (p - window, p] only; `soft_cap` > 0 replaces each score x
    by soft_cap * tanh(x / soft_cap). `max_query_len` and `max_seq_len` bound the lengths of this call.

    `alibi_slopes` (float32 [Hq], on q's device) are linear biases (ALiBi, arXiv:2108.12409): slope * (j - i) is added
    to the score of a query at position i and a key at position j, after the scale and, as in FlashAttention, after the
    soft cap.

    `arrivals` (int32 [MAX_ARRIVALS], on q's device) are counters of the CUDA kernels, of decode for the parts of a
    sequence in several blocks, of prefill for its tiles: zeros before and after a call. Calls that may run at the same
    time need counters of their own. Without them the call makes some, which takes a launch.

    `sinks` (float32 [Hq], on q's device) are attention sinks (arXiv:2309.17453): a logit of each head's softmax that
    has no value, neither scaled nor capped. It takes its share of the weights, in every window.

    The caches have q's dtype, or hold CODES, of which a key is k_scale times its code and a value v_scale times.

    `prefixes`, of shared_prefixes, let the CUDA kernel of decode read what sequences share once for all of them, where
    heads have at most PREFIX_HEAD_DIM elements, neither a window nor biases; they change nothing else.

    `frozen`, as in linear, holds for block_table, query_start and seq_lens.
    """
    attend = fallback.paged_attention if _has_codes_on_cpu(k_cache) else _paged_attention
    tensors = (q, k_cache, v_cache, block_table, query_start, seq_lens)
    numbers = (max_query_len, max_seq_len, scale, window, soft_cap)
    return attend(*tensors, *numbers, alibi_slopes, arrivals, sinks, k_scale, v_scale, prefixes, frozen)


def shared_prefixes(block_table: Tensor, query_start: Tensor, seq_lens: Tensor, block_size: int) -> Tensor:
    """Which of at most MOST_PREFIX_SEQS sequences, as paged_attention takes them, begin with the same blocks.

    int32 [3, S]: the sequences in an order in which those of a prefix lie side by side; how many have it, where it
    begins in that order, else 0; each sequence's own prefix in keys, in the order of sequences, 0 where it has none.

    Sequences of one query share whole blocks, SHARED_DEPTHS[0] keys at least, at most MOST_SHARERS of them a prefix.
    Each is put beside those with which it shares most at one of SHARED_DEPTHS; a prefix is what all its members share.
    """
    return _shared_prefixes(block_table, query_start, seq_lens, block_size)


def attention_kernels(
    q: Tensor, num_kv_heads: int, block_size: int, *, biased: bool, codes: bool = False
) -> tuple[bool, bool]:
    """Whether paged_attention has kernels on tensor cores for decode, and for prefill, where heads are like those of
    q [T, Hq, D], linear biases are given or not, and the cache holds `codes` or has q's dtype. Elsewhere a plain kernel
    serves, which is many times slower."""
    return _attention_kernels(q, num_kv_heads, block_size, biased, codes)


def silu_mul(x: Tensor) -> Tensor:
    """silu(first half) * second half of x [T, 2I]; returns [T, I]."""
    return _silu_mul(x)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """gelu(first half, tanh approximation) * second half of x [T, 2I]; returns [T, I]."""
    return _gelu_tanh_mul(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, frozen: bool = False) -> Tensor:
    """x [T, K] times the transpose of weight [N, K], plus bias [N]; returns [T, N] in x's dtype.

    On a CPU, x of float32 may meet a weight of 16 bits, which is read as it is and multiplied in float32; else the
    dtypes are equal.

    With `frozen` a CUDA kernel may read weight and bias while the kernel ahead of it on the stream still runs, where
    that lets it begin: raylm's kernels do, torch's do not. So if one of raylm's operators writes them, one of torch's
    must come between.
    """
    return _linear(x, weight, bias, frozen)


def takes_narrow_weights(x: Tensor) -> bool:
    """Whether linear has a kernel for such an x and weights of 16 bits: for float32 on a CPU, the extension's."""
    is_wide = x.dtype == torch.float32 and x.device.type == "cpu"
    return is_wide and "linear" in extension.load().ops.get("cpu", ())


def linear_rows(weight: Tensor) -> int:
    """Up to how many rows linear has kernels of raylm's for weights of this type on this device; 0: none."""
    return _linear_rows(weight)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    activation: Literal["silu", "gelu_tanh"],
    bias: Tensor | None = None,
    *,
    frozen: bool = False,
) -> Tensor:
    """act(gate) * up, where gate and up are the halves of linear(x, weight, bias): x [T, K], weight [2I, K] with gate's
    rows first, bias [2I]; returns [T, I].

    With many rows on Hopper GPUs one kernel does all of it and rounds once, at the end; elsewhere gate and up are
    rounded to x's dtype before the activation, also where few rows have a kernel. That for many takes 16-bit numbers, K
    of a multiple of 64, I of a multiple of 128, tensors and rows that begin at multiples of 16 bytes, and no bias.
    `frozen`: as in linear.
    """
    return _gated_linear(x, weight, bias, activation == "gelu_tanh", frozen)


def route(
    logits: Tensor,
    bias: Tensor | None,
    *,
    per_token: int,
    sigmoid: bool,
    normalized: bool,
    scale: float,
    groups: int,
    groups_per_token: int,
) -> tuple[Tensor, Tensor]:
    """The experts of each token in a mixture of experts: logits [T, E] -> weights (float32) and experts (int64), [T,
    per_token] each, best first.

    Scores are the softmax of the logits, or their `sigmoid`. The experts with the highest scores are chosen, of scores
    plus `bias` (float32 [E]) where there is one; with `groups` > 1 only among the groups_per_token groups of neighbours
    whose two best sum to most (DeepSeek-V3, arXiv:2412.19437). Weights are the chosen ones' scores, `normalized` to sum
    to 1, times `scale`.
    """
    if logits.is_cuda and logits.shape[1] > MAX_KERNEL_EXPERTS:
        return fallback.route(logits, bias, per_token, sigmoid, normalized, scale, groups, groups_per_token)
    return _route(logits, bias, per_token, sigmoid, normalized, scale, groups, groups_per_token)


def sparse_mixer(logits: Tensor, *, jitter: float) -> tuple[Tensor, Tensor]:
    """Two experts of each token by SparseMixer (arXiv:2409.12136), as `route` gives them: the one with the highest
    logit, and the one with the highest of the others. A weight is the expert's share of a softmax over the logits,
    without those chosen before, that are at most 2 * jitter below it, relative to the larger of both."""
    return _sparse_mixer(logits, jitter)


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"],
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """What the experts of each token make of it, summed with their weights: x [T, H]; gate_up [E, 2I, H], gate's rows
    first; down [E, H, I]; weights and chosen [T, n] as route gives them -> [T, H]. Between the products numbers are
    rounded to x's dtype; the sum is in float32.

    `gate_up_bias` [E, 2I] and `down_bias` [E, H], both of x's dtype, are added to the products. "clamped_swiglu" (that
    of GPT-OSS) is g * sigmoid(1.702 g) * (u + 1), where g is the gate, at most `limit`, and u is up within -limit and
    limit; `limit` counts for it alone.

    On Hopper GPUs kernels of raylm's do it for 16-bit numbers, up to 512 experts, H and I of multiples of 8, and rows
    that begin at multiples of 16 bytes.
    """
    code = ACTIVATIONS.index(activation)
    if x.is_cuda and not _experts_kernels(x, down):
        return fallback.experts(x, gate_up, down, weights, chosen, gate_up_bias, down_bias, code, limit)
    return _experts(x, gate_up, down, weights, chosen, gate_up_bias, down_bias, code, limit)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """One token a row of logits [S, V]; returns int64 [S]. The settings are [S]: temperature, top_p and min_p float32,
    top_k, seed and position int64.

    At temperature 0 the likeliest token, the first of equals. Otherwise one of those that top_k (0: off), top_p (1:
    off) and min_p (0: off) all leave of softmax(logits / temperature): the first whose running sum of kept
    probabilities, in the order of the vocabulary, passes a uniform number's share of their total. The number follows
    from (seed, position), so a row's token does not depend on the other rows.
    """
    if logits.is_cuda and not sample_is_async(logits.device, logits.shape[1]):
        return fallback.sample(logits, temperature, top_k, top_p, min_p, seed, position)
    return _sample(logits, temperature, top_k, top_p, min_p, seed, position)


def penalize(
    logits: Tensor,
    token_ids: Tensor,
    rows: Tensor,
    prompt_lens: Tensor,
    seq_lens: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """A copy of logits [S, V], lower where a row repeats itself. Row s has the first seq_lens[s] tokens of
    token_ids[rows[s]] (int32 [R, W]), of which the first prompt_lens[s] are its prompt and the others generated.

    A logit x of a token among them becomes x / repetition where x > 0, else x * repetition; of a token that was
    generated `count` > 0 times it then falls by frequency * count + presence. It is computed in float32 and is at most
    the largest finite number of the dtype. Other logits, and all of a row with repetition 1, frequency 0 and presence
    0, stay the same to the bit.

    rows, prompt_lens and seq_lens are int64 [S], the penalties float32 [S]. Cells that are no token of the vocabulary
    count for nothing. A row outside the table is an error; the CUDA kernel cannot raise one and takes it as empty.
    """
    return _penalize(logits, token_ids, rows, prompt_lens, seq_lens, repetition, frequency, presence)


def place(
    num_computed: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    token_rows: Tensor,
    offsets: Tensor,
    rows: Tensor,
    query_start: Tensor,
    block_size: int,
) -> Placed:
    """All that a step reads of the counts and tables on the device, in one kernel.

    The tables have R rows: num_computed int64 [R], token_ids int32 [R, L], block_table int32 [G, R, C]. Token t is
    number offsets[t] of the step's tokens of row token_rows[t] (both int64 [T]); sequence s is row rows[s] (int64 [S])
    and computes query_start[s + 1] - query_start[s] tokens (int32 [S + 1]). Returns

    - token_ids, int64 [T]: token_ids[token_rows, positions];
    - positions, int64 [T]: num_computed[token_rows] + offsets, kept within 0 and L - 1;
    - following, int64 [T]: positions + 1, where what is sampled after the tokens goes;
    - slots, int64 [G, T]: block_table[g, row, position // block_size] * block_size + position % block_size, of the
      last column where there is no such column;
    - seq_lens, int32 [S]: num_computed[rows] plus the tokens that are computed now, at most L;
    - block_tables, int32 [G, S, C]: block_table[:, rows].

    A row outside the tables is an error; the CUDA kernel cannot raise one and takes the last row.
    """
    return Placed(*_place(num_computed, token_ids, block_table, token_rows, offsets, rows, query_start, block_size))


def accept(
    token_ids: Tensor,
    num_known: Tensor,
    num_computed: Tensor,
    rows: Tensor,
    query_start: Tensor,
    sample_start: Tensor,
    sampled: Tensor,
) -> Tensor:
    """Verify drafts, write sampled tokens to the table and advance its counts, in place; returns how many of its
    sampled tokens each sequence keeps, int64 [S].

    Sequence s is row rows[s] (int64 [S]) of token_ids int32 [R, L], num_known and num_computed int64 [R]. It computed
    q = query_start[s + 1] - query_start[s] tokens and has the m sampled tokens from sample_start[s] up to
    sample_start[s + 1] of `sampled` (int64 [M]; both starts int32 [S + 1]). m is 0 for a sequence that does not sample,
    else one more than its drafts, which stand in token_ids[row, known + j] for j < m - 1. It keeps the sampled tokens
    that equal their drafts, up to the first that does not, and this one; they go to token_ids[row, known + j]. Then
    known grows by the tokens kept and computed by q less the tokens not kept.

    What would go to a cell past L - 1 is not written, and a draft there is not kept. The last row of the table is
    padding: it may occur in `rows` any number of times, nothing of it changes, and it keeps one token where m > 0. Any
    other row occurs once at most. A row outside the table is an error; the CUDA kernel cannot raise one and takes it as
    padding.
    """
    return _accept(token_ids, num_known, num_computed, rows, query_start, sample_start, sampled)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log probabilities of one token a row, and of each row's num_top likeliest tokens.

    Of logits [M, V] and token_ids int64 [M]. Returns values, float32 [M]: log_softmax(logits) of the tokens; ranks,
    int64 [M]: 1 + how many logits are greater; top_ids, int64 [M, num_top]: the likeliest tokens, likeliest first and
    of equals the first; top_values, float32 [M, num_top]: theirs. A logit of minus infinity gives minus infinity, and
    so does what is no token of the vocabulary. Arithmetic is in float32. num_top is at most V.
    """
    if logits.is_cuda and num_top > MAX_KERNEL_TOP:
        return fallback.token_logprobs(logits, token_ids, num_top)
    return _token_logprobs(logits, token_ids, num_top)


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """log_softmax(logits) of the tokens token_ids int64 [M, N] of each row of logits [M, V]: float32 [M, N].

    A logit of minus infinity gives minus infinity, and so does what is no token of the vocabulary.
    """
    return _gather_logprobs(logits, token_ids)


def mask_logits(logits: Tensor, bitmask: Tensor, mask_rows: Tensor) -> None:
    """Logits [M, V] become minus infinity, in place, where a bit mask does not allow their token.

    Row m has the mask bitmask[mask_rows[m]] (bitmask int32 [B, ceil(V / 32)], mask_rows int64 [M]): bit t % 32 of word
    t // 32 allows token t. A row with -1 stays as it is. A mask outside of bitmask is an error; the CUDA kernel cannot
    raise one and leaves the row as it is.
    """
    _mask_logits(logits, bitmask, mask_rows)


def bias_logits(logits: Tensor, table_rows: Tensor, ids: Tensor, values: Tensor, counts: Tensor) -> None:
    """Add a row's biases to logits [M, V], in place.

    Row m has the first counts[x] entries of row x = table_rows[m] of ids (int32 [X, N]) and values (float32 [X, N]),
    none where x is -1: logits[m, ids[x, i]] += values[x, i], computed in float32 and kept finite. Infinite logits stay
    as they are. The ids of a row are different ones; those outside of the vocabulary are skipped. table_rows is int64
    [M], counts int32 [X]. A row outside the tables is an error; the CUDA kernel cannot raise one and adds nothing.
    """
    _bias_logits(logits, table_rows, ids, values, counts)


@functools.cache
def sample_is_async(device: torch.device, vocab_size: int) -> bool:
    """Whether `sample` only queues work, whatever the values, of logits of so many columns on this device: torch's
    operators, which are slower too, look at them."""
    return device.type == "cpu" or vocab_size <= _sample_columns(torch.empty(0, device=device))
