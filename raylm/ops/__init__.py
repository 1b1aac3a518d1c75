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

extension.load()

_rms_norm: Callable[..., Tensor] = torch.ops.raylm.rms_norm.default
_add_rms_norm: Callable[..., Tensor] = torch.ops.raylm.add_rms_norm.default
_rotary: Callable[..., None] = torch.ops.raylm.rotary.default
_store_kv: Callable[..., None] = torch.ops.raylm.store_kv.default
_rope_store: Callable[..., None] = torch.ops.raylm.rope_store.default
_paged_attention: Callable[..., Tensor] = torch.ops.raylm.paged_attention.default
_silu_mul: Callable[..., Tensor] = torch.ops.raylm.silu_mul.default
_gelu_tanh_mul: Callable[..., Tensor] = torch.ops.raylm.gelu_tanh_mul.default
_linear: Callable[..., Tensor] = torch.ops.raylm.linear.default
_gated_linear: Callable[..., Tensor] = torch.ops.raylm.gated_linear.default
_sample: Callable[..., Tensor] = torch.ops.raylm.sample.default
_penalize: Callable[..., Tensor] = torch.ops.raylm.penalize.default
_peer_all_reduce: Callable[..., None] = torch.ops.raylm.peer_all_reduce.default
_peer_add_rms_norm: Callable[..., Tensor] = torch.ops.raylm.peer_add_rms_norm.default
_peer_split_add_rms_norm: Callable[..., Tensor] = torch.ops.raylm.peer_split_add_rms_norm.default


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension of x [..., H], computed in float32, in x's dtype."""
    return _rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, H] += x [T, H] in place; returns the norm of the new residual."""
    return _add_rms_norm(x, residual, weight, eps)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate q [T, Hq, D] and k [T, Hk, D] in place by their positions [T] (int64).

    `cos_sin` [max_position, R] in float32 holds R/2 cosines, then R/2 sines. Dimension i < R/2 is paired with i + R/2
    (the "NeoX" layout of RoFormer, arXiv:2104.09864); dimensions from R on stay as they are.
    """
    _rotary(q, k, positions, cos_sin)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k and v [T, Hk, D] into the caches [num_blocks, block_size, Hk, D].

    Token t goes to slot_mapping[t] (int64) = block * block_size + offset. A slot outside the cache is an error; the
    CUDA kernel cannot raise one and skips the token.
    """
    _store_kv(k, v, k_cache, v_cache, slot_mapping)


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
) -> None:
    """All that happens to q [T, Hq, D], k and v [T, Hk, D] before attention: rms_norm, rotary, store_kv, in this order.

    q is changed in place, k and v go to the caches; what k itself holds afterwards is not defined. `q_weight` and
    `k_weight` [D] norm each head; without them nothing is normed.
    """
    _rope_store(q, k, v, q_weight, k_weight, eps, positions, cos_sin, k_cache, v_cache, slot_mapping)


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
    """
    return _paged_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        query_start,
        seq_lens,
        max_query_len,
        max_seq_len,
        scale,
        window,
        soft_cap,
        alibi_slopes,
    )


def silu_mul(x: Tensor) -> Tensor:
    """silu(first half) * second half of x [T, 2I]; returns [T, I]."""
    return _silu_mul(x)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """gelu(first half, tanh approximation) * second half of x [T, 2I]; returns [T, I]."""
    return _gelu_tanh_mul(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times the transpose of weight [N, K], plus bias [N]; returns [T, N].

    A captured CUDA graph may read `weight` while the kernel before still runs: weights are written before the graph
    is replayed, not in it.
    """
    return _linear(x, weight, bias)


def gated_linear(
    x: Tensor, weight: Tensor, activation: Literal["silu", "gelu_tanh"], bias: Tensor | None = None
) -> Tensor:
    """act(gate) * up, where gate and up are the halves of linear(x, weight, bias): x [T, K], weight [2I, K] with gate's
    rows first, bias [2I]; returns [T, I].

    With many rows on Hopper GPUs one kernel does all of it and rounds once, at the end; elsewhere gate and up are
    rounded to x's dtype before the activation. The kernel takes 16-bit numbers, K of a multiple of 64, I of a multiple
    of 128, tensors and rows that begin at multiples of 16 bytes, and no bias. Weights in captured graphs: as in linear.
    """
    return _gated_linear(x, weight, bias, activation == "gelu_tanh")


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
    if logits.is_cuda and not _has_clusters(logits.device):
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
    token_ids[rows[s]] (int64 [R, W]), of which the first prompt_lens[s] are its prompt and the others generated.

    A logit x of a token among them becomes x / repetition where x > 0, else x * repetition; of a token that was
    generated `count` > 0 times it then falls by frequency * count + presence. It is computed in float32 and is at most
    the largest finite number of the dtype. Other logits, and all of a row with repetition 1, frequency 0 and presence
    0, stay the same to the bit.

    rows, prompt_lens and seq_lens are int64 [S], the penalties float32 [S]. Cells that are no token of the vocabulary
    count for nothing. A row outside the table is an error; the CUDA kernel cannot raise one and takes it as empty.
    """
    return _penalize(logits, token_ids, rows, prompt_lens, seq_lens, repetition, frequency, presence)


def peer_all_reduce(
    x: Tensor, windows: Tensor, rank: int, capacity: int, limit_s: float, *, two_shot: bool = False
) -> None:
    """x = the sum of every rank's x, in place: the same bits on every rank, from either kind of shot.

    Every rank calls it with a contiguous x of the same shape (a multiple of 16 bytes, at most `capacity`), in the same
    order on one stream. `windows` (int64 [ranks], on the CPU) are the addresses of the ranks' windows, each of
    `capacity` bytes (raylm.ops.peer_memory), in the order of ranks. A rank that waits for another one longer than
    limit_s fails: its CUDA context is lost. On CUDA with the compiled extension only;
    raylm.parallel.peer_reduce.PeerReducer sets all of it up.
    """
    _peer_all_reduce(x, windows, rank, capacity, limit_s, two_shot)


def peer_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    windows: Tensor,
    rank: int,
    capacity: int,
    limit_s: float,
) -> Tensor:
    """residual [T, H] += the sum of every rank's x [T, H], in place; returns the norm of the new residual.

    As peer_all_reduce and add_rms_norm one after the other, for T up to 64 and rows of a multiple of 16 bytes, up to
    32 KiB. x itself stays as it is.
    """
    return _peer_add_rms_norm(x, residual, weight, eps, windows, rank, capacity, limit_s)


def peer_split_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    windows: Tensor,
    rank: int,
    capacity: int,
    limit_s: float,
) -> Tensor:
    """As peer_add_rms_norm for any number of rows T, of which each rank norms its share and gives it to the others.

    Rank r of n owns the rows T * r // n up to T * (r + 1) // n, and only their residual is changed: what it holds of
    other rows is not read. The norm has all rows, with the same bits on every rank. `windows` are not those of other
    operators, and `capacity` covers (n - 1) shares of the most rows that a rank owns, ceil(T / n).
    """
    return _peer_split_add_rms_norm(x, residual, weight, eps, windows, rank, capacity, limit_s)


def sample_is_async(device: torch.device) -> bool:
    """Whether `sample` on this device only queues work, whatever the values: torch's operators look at them."""
    return device.type == "cpu" or ("sample" in extension.load().ops.get("cuda", ()) and _has_clusters(device))


@functools.cache
def _has_clusters(device: torch.device) -> bool:
    """Whether the device has what the compiled kernel of `sample` is built on."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
