"""Every operator in terms of torch's own: the kernels of devices for which the compiled extension has none.

They are registered for all devices at once, below any kernel of the extension, and are what the extension's kernels
are compared with. Arithmetic is in float32 whatever the tensors hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raylm.ops.block_fallback import block_experts, block_gated_linear, block_kernels, block_linear, decode_blocks
from raylm.ops.decode_layers import decode_layers
from raylm.ops.experts import experts, experts_kernels, route
from raylm.ops.few_layers import few_layers, few_layers_rows
from raylm.ops.library import LIBRARY
from raylm.ops.logits import bias_logits, mask_logits
from raylm.ops.logprobs import gather_logprobs, token_logprobs
from raylm.ops.patches import patched_experts, patched_linear
from raylm.ops.penalties import penalize
from raylm.ops.prefixes import shared_prefixes
from raylm.ops.sampling import sample
from raylm.ops.scaled_fallback import CODES, codes_of, scale_rows, scaled_linear
from raylm.ops.tokens import accept, place

_QUERY_CHUNK = 256
"""Queries of one sequence whose scores are in memory at a time."""
INVARIANT_ROWS = 64
"""Rows that invariant_linear gives torch's linear at a time."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()
    return h.to(x.dtype).contiguous()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def add_halves_rms_norm(halves: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.copy_(halves[0].float() + halves[1].float() + residual.float())
    return rms_norm(residual, weight, eps)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # each [T, 1, R/2]
    half = cos.shape[-1]
    for x in (q, k):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        # Both before either is written: in float32 `first` and `second` are views of x.
        rotated = first * cos - second * sin, second * cos + first * sin
        x[..., :half], x[..., half : 2 * half] = rotated


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    block_size = k_cache.shape[1]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    for cache, x, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        if cache.dtype == CODES:
            # As bytes: torch indexes few devices' tensors of codes.
            cache.view(torch.uint8)[blocks, offsets] = codes_of(x, scale).view(torch.uint8)
        else:
            cache[blocks, offsets] = x


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
    frozen: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    if q_weight is not None and k_weight is not None:
        q.copy_(rms_norm(q, q_weight, eps))
        k.copy_(rms_norm(k, k_weight, eps))
    rotary(q, k, positions, cos_sin)
    store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


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
    window: int,
    soft_cap: float,
    alibi_slopes: Tensor | None = None,
    arrivals: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    prefixes: Tensor | None = None,
    frozen: bool = False,
) -> Tensor:
    lengths = attention_lengths(query_start, seq_lens, max_query_len, max_seq_len)
    return attend_paged(
        *(q, k_cache, v_cache, block_table, lengths, scale, window, soft_cap, alibi_slopes, sinks, k_scale, v_scale)
    )


class AttentionLengths(NamedTuple):
    """What attend_paged needs of the lengths of a step: the same for all layers."""

    starts: list[int]
    """query_start and seq_lens, on the host."""
    seq_lens: list[int]
    decode: Decode | None
    """Where each sequence has one query, else None."""


class Decode(NamedTuple):
    """One query a sequence, and keys up to the longest one's, L."""

    max_seq_len: int
    distance: Tensor
    """int64 [S, 1, L]: how far each key is before the query."""
    seen: Tensor
    """bool [S, 1, L]: keys that the query sees without a window."""


def attention_lengths(query_start: Tensor, seq_lens: Tensor, max_query_len: int, max_seq_len: int) -> AttentionLengths:
    """Arguments as for paged_attention. It reads both tensors on the host."""
    starts, lens = query_start.tolist(), seq_lens.tolist()
    if max_query_len > 1 or len(lens) != starts[-1]:
        return AttentionLengths(starts, lens, None)
    distance = _distance(seq_lens.long() - 1, 0, max_seq_len).unsqueeze(1)
    return AttentionLengths(starts, lens, Decode(max_seq_len, distance, distance >= 0))


def attend_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: AttentionLengths,
    scale: float,
    window: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """paged_attention, from what attention_lengths returned."""
    starts, lens, decode = lengths
    caches = _Cached(k_cache, k_scale), _Cached(v_cache, v_scale)
    if decode is not None and len(lens) == q.shape[0]:
        return _attend_decode(q, caches, block_table, decode, scale, window, soft_cap, alibi_slopes, sinks)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for s, seq_len in enumerate(lens):
        # Keys that every query of the chunk lies behind, or that slid out of its window, are never gathered.
        for start in range(starts[s], starts[s + 1], _QUERY_CHUNK):
            end = min(start + _QUERY_CHUNK, starts[s + 1])
            last = seq_len - (starts[s + 1] - end)  # keys that the chunk's last query sees
            positions = torch.arange(last - (end - start), last, device=q.device)
            low = max(last - (end - start) - window + 1, 0) if window else 0
            k, v = (cache.gather(block_table[s : s + 1], low, last) for cache in caches)
            distance = _distance(positions, low, last).unsqueeze(0)
            mask = _in_window(distance >= 0, distance, window)
            attended = _attend(q[start:end].unsqueeze(0), k, v, distance, mask, scale, soft_cap, alibi_slopes, sinks)
            out[start:end] = attended[0]
    return out


def invariant_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
    soft_cap: float,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Each query as a sequence of its own: the shapes that torch's operators see follow from its position."""
    starts, lens = query_start.tolist(), seq_lens.tolist()
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for s, seq_len in enumerate(lens):
        for token in range(starts[s], starts[s + 1]):
            lengths = AttentionLengths([0, 1], [seq_len - (starts[s + 1] - 1 - token)], None)
            out[token : token + 1] = attend_paged(
                *(q[token : token + 1], k_cache, v_cache, block_table[s : s + 1], lengths),
                *(scale, window, soft_cap, alibi_slopes, sinks, k_scale, v_scale),
            )
    return out


def attention_kernels(
    q: Tensor, num_kv_heads: int, block_size: int, biased: bool, codes: bool = False
) -> tuple[bool, bool]:
    return False, False


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, frozen: bool = False) -> Tensor:
    return F.linear(x, weight.to(x.dtype), bias)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, frozen: bool = False) -> Tensor:
    """Always of as many rows: torch's library chooses how it sums by their number."""
    filled = F.pad(x, (0, 0, 0, -len(x) % INVARIANT_ROWS))
    parts = [F.linear(part, weight.to(x.dtype), bias) for part in filled.split(INVARIANT_ROWS)]
    return torch.cat(parts)[: len(x)]


def linear_rows(weight: Tensor) -> int:
    return 0


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu_tanh: bool, frozen: bool = False) -> Tensor:
    """Made of the operators, not of this file's functions: those may have compiled kernels where this has none."""
    return _gated(torch.ops.raylm.linear(x, weight, bias, frozen), gelu_tanh)


def patched_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gelu_tanh: bool, numbers: int, group: int, frozen: bool = False
) -> Tensor:
    """As gated_linear."""
    return _gated(torch.ops.raylm.patched_linear(x, weight, bias, numbers, group, frozen), gelu_tanh)


def _gated(product: Tensor, gelu_tanh: bool) -> Tensor:
    out: Tensor = (torch.ops.raylm.gelu_tanh_mul if gelu_tanh else torch.ops.raylm.silu_mul)(product)
    return out


def scaled_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return scale_rows(rms_norm(x, weight, eps) if residual is None else add_rms_norm(x, residual, weight, eps))


def scaled_gated(x: Tensor, gelu_tanh: bool) -> tuple[Tensor, Tensor]:
    return scale_rows(gelu_tanh_mul(x) if gelu_tanh else silu_mul(x))


def scaled_gated_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    gelu_tanh: bool,
    frozen: bool = False,
) -> tuple[Tensor, Tensor]:
    return scaled_gated(scaled_linear(x, x_scales, weight, scales, bias, dtype), gelu_tanh)


def sample_columns(like: Tensor) -> int:
    return 0


class _Cached(NamedTuple):
    """Keys or values."""

    cache: Tensor
    scale: float

    def gather(self, block_table: Tensor, low: int, high: int) -> Tensor:
        """Cached positions low..high-1 of some sequences: [S, high - low, Hk, D] in float32."""
        cache = self.cache
        num_blocks, block_size = cache.shape[:2]
        first = low // block_size
        blocks = block_table[:, first : -(-high // block_size)].long().clamp(0, num_blocks - 1)
        is_codes = cache.dtype == CODES
        rows = (cache.view(torch.uint8)[blocks].view(CODES) if is_codes else cache[blocks]).flatten(1, 2)
        found = rows[:, low - first * block_size : high - first * block_size].float()
        return found.mul_(self.scale) if is_codes else found


def _attend_decode(
    q: Tensor,
    caches: tuple[_Cached, _Cached],
    block_table: Tensor,
    decode: Decode,
    scale: float,
    window: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """One query a sequence: all sequences at once, padded to the longest."""
    k, v = (cache.gather(block_table, 0, decode.max_seq_len) for cache in caches)
    mask = _in_window(decode.seen, decode.distance, window)
    # Slots past a sequence's end may hold anything, and 0 * NaN is NaN.
    v = v.masked_fill(~mask[:, 0, :, None, None], 0)
    return _attend(q.unsqueeze(1), k, v, decode.distance, mask, scale, soft_cap, alibi_slopes, sinks).squeeze(1)


def _distance(positions: Tensor, low: int, high: int) -> Tensor:
    """How far each of the keys low..high-1 is before each query position: int64 [len(positions), high - low]."""
    return positions.unsqueeze(1) - torch.arange(low, high, device=positions.device)


def _in_window(seen: Tensor, distance: Tensor, window: int) -> Tensor:
    """Which of the keys that a query sees are in its window, by their distance before it."""
    return seen & (distance < window) if window else seen


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distance: Tensor,
    mask: Tensor,
    scale: float,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [S, Q, Hq, D], k and v [S, L, Hk, D], distance and mask [S, Q, L] -> contiguous [S, Q, Hq, D] of q's dtype."""
    num_seqs, num_queries, num_heads, head_dim = q.shape
    grouped = q.float().reshape(num_seqs, num_queries, k.shape[2], -1, head_dim)
    scores = torch.einsum("sqhgd,slhd->shgql", grouped, k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.view(k.shape[2], -1, 1, 1) * distance[:, None, None]
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    if sinks is None:
        shares = scores.softmax(-1)
    else:
        column = sinks.view(k.shape[2], -1, 1, 1).expand(*scores.shape[:-1], 1)
        shares = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    out = torch.einsum("shgql,slhd->sqhgd", shares, v)
    return out.reshape(num_seqs, num_queries, num_heads, head_dim).to(q.dtype).contiguous()


_KERNELS = (
    rms_norm,
    add_rms_norm,
    add_halves_rms_norm,
    rotary,
    store_kv,
    rope_store,
    paged_attention,
    invariant_attention,
    attention_kernels,
    silu_mul,
    gelu_tanh_mul,
    linear,
    invariant_linear,
    linear_rows,
    gated_linear,
    block_linear,
    block_gated_linear,
    block_experts,
    decode_blocks,
    block_kernels,
    scale_rows,
    scaled_rms_norm,
    scaled_gated,
    scaled_linear,
    scaled_gated_linear,
    patched_linear,
    patched_gated_linear,
    route,
    experts,
    experts_kernels,
    patched_experts,
    few_layers,
    few_layers_rows,
    decode_layers,
    sample,
    sample_columns,
    penalize,
    shared_prefixes,
    place,
    accept,
    token_logprobs,
    gather_logprobs,
    mask_logits,
    bias_logits,
)
for _kernel in _KERNELS:
    LIBRARY.impl(_kernel.__name__, _kernel, "CompositeExplicitAutograd")
