"""The operators that raylm adds to torch: each schema is declared here, once, with the shapes it returns.

`torch.library` keeps them under the namespace "raylm". The kernels live elsewhere and torch's dispatcher picks one by
device: raylm.ops.fallback has a torch implementation for every device, the compiled extension has faster ones for CPU
and CUDA, which win wherever it is loaded. Only those over peer memory are the extension's alone: torch's way is a
process group.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

from raylm.ops.block_fallback import block_size
from raylm.ops.patches import PATCH_ROWS
from raylm.ops.scaled_fallback import CODES
from raylm.ops.tokens import Placed

NAMESPACE = "raylm"

SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "add_rms_norm": "(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor",
    "add_halves_rms_norm": "(Tensor halves, Tensor(a!) residual, Tensor weight, float eps) -> Tensor",
    "rotary": "(Tensor(a!) q, Tensor(b!) k, Tensor positions, Tensor cos_sin) -> ()",
    "store_kv": (
        "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
        "float k_scale=1., float v_scale=1.) -> ()"
    ),
    "rope_store": (
        "(Tensor(a!) q, Tensor(b!) k, Tensor v, Tensor? q_weight, Tensor? k_weight, float eps, Tensor positions, "
        "Tensor cos_sin, Tensor(c!) k_cache, Tensor(d!) v_cache, Tensor slot_mapping, bool frozen=False, "
        "float k_scale=1., float v_scale=1.) -> ()"
    ),
    "paged_attention": (
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start, Tensor seq_lens, "
        "int max_query_len, int max_seq_len, float scale, int window, float soft_cap, Tensor? alibi_slopes, "
        "Tensor(a!)? arrivals=None, Tensor? sinks=None, float k_scale=1., float v_scale=1., "
        "Tensor? prefixes=None, bool frozen=False) -> Tensor"
    ),
    "shared_prefixes": "(Tensor block_table, Tensor query_start, Tensor seq_lens, int block_size) -> Tensor",
    "invariant_attention": (
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start, Tensor seq_lens, "
        "int max_query_len, int max_seq_len, float scale, int window, float soft_cap, Tensor? alibi_slopes, "
        "Tensor? sinks=None, float k_scale=1., float v_scale=1.) -> Tensor"
    ),
    "attention_kernels": (
        "(Tensor q, int num_kv_heads, int block_size, bool biased, bool codes=False) -> (bool, bool)"
    ),
    "silu_mul": "(Tensor x) -> Tensor",
    "gelu_tanh_mul": "(Tensor x) -> Tensor",
    "linear": "(Tensor x, Tensor weight, Tensor? bias, bool frozen=False) -> Tensor",
    "invariant_linear": "(Tensor x, Tensor weight, Tensor? bias, bool frozen=False) -> Tensor",
    "linear_rows": "(Tensor weight) -> int",
    "gated_linear": "(Tensor x, Tensor weight, Tensor? bias, bool gelu_tanh, bool frozen=False) -> Tensor",
    "block_linear": "(Tensor x, Tensor[] blocks, int[] kinds, Tensor? bias) -> Tensor",
    "block_gated_linear": "(Tensor x, Tensor[] blocks, int[] kinds, Tensor? bias, bool gelu_tanh) -> Tensor",
    "block_experts": (
        "(Tensor x, Tensor[] blocks, int[] kinds, Tensor weights, Tensor chosen, Tensor? gate_up_bias, "
        "Tensor? down_bias, int activation, float limit) -> Tensor"
    ),
    "decode_blocks": "(Tensor blocks, int kind) -> Tensor",
    "block_kernels": "(Tensor like, int kind) -> bool",
    "scale_rows": "(Tensor x) -> (Tensor, Tensor)",
    "scaled_rms_norm": "(Tensor x, Tensor(a!)? residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    "scaled_gated": "(Tensor x, bool gelu_tanh) -> (Tensor, Tensor)",
    "scaled_linear": (
        "(Tensor x, Tensor x_scales, Tensor weight, Tensor scales, Tensor? bias, ScalarType dtype, "
        "bool frozen=False) -> Tensor"
    ),
    "scaled_gated_linear": (
        "(Tensor x, Tensor x_scales, Tensor weight, Tensor scales, Tensor? bias, ScalarType dtype, bool gelu_tanh, "
        "bool frozen=False) -> (Tensor, Tensor)"
    ),
    "patched_linear": "(Tensor x, Tensor weight, Tensor? bias, int numbers, int group, bool frozen=False) -> Tensor",
    "patched_gated_linear": (
        "(Tensor x, Tensor weight, Tensor? bias, bool gelu_tanh, int numbers, int group, bool frozen=False) -> Tensor"
    ),
    "route": (
        "(Tensor logits, Tensor? bias, int per_token, bool sigmoid, bool normalized, float scale, int groups, "
        "int groups_per_token) -> (Tensor, Tensor)"
    ),
    "experts": (
        "(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor chosen, Tensor? gate_up_bias, "
        "Tensor? down_bias, int activation, float limit) -> Tensor"
    ),
    "patched_experts": (
        "(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor chosen, Tensor? gate_up_bias, "
        "Tensor? down_bias, int activation, float limit, int numbers, int group) -> Tensor"
    ),
    "experts_kernels": "(Tensor x, Tensor down) -> bool",
    "few_layers": (
        "(Tensor(a!) residual, Tensor[] products, Tensor[] scales, Tensor[] norms, Tensor[] head_norms, "
        "Tensor[] biases, int numbers, int group, int per_token, bool sigmoid, bool normalized, float route_scale, "
        "Tensor(b!)[] k_caches, Tensor(c!)[] v_caches, Tensor positions, "
        "Tensor slot_mapping, Tensor seq_lens, Tensor block_table, Tensor cos_sin, float eps, float scale, "
        "bool gelu_tanh, Tensor(d!) cells, Tensor(e!) counters, Tensor? windows, int rank, int capacity, "
        "float limit_s) -> ()"
    ),
    "few_layers_rows": (
        "(Tensor x, int width, int num_heads, int num_kv_heads, int head_dim, int num_layers, bool scaled, "
        "int numbers, int group, int experts, int per_token) -> int"
    ),
    "decode_layers": (
        "(Tensor(a!) residual, Tensor[] weights, int[] kinds, Tensor[] norms, Tensor[] head_norms, Tensor[] biases, "
        "Tensor(b!)[] k_caches, Tensor(c!)[] v_caches, Tensor positions, Tensor slot_mapping, Tensor seq_lens, "
        "Tensor block_table, Tensor cos_sin, float eps, float scale, bool gelu_tanh) -> ()"
    ),
    "sample": (
        "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor position) "
        "-> Tensor"
    ),
    "sample_columns": "(Tensor like) -> int",
    "penalize": (
        "(Tensor logits, Tensor token_ids, Tensor rows, Tensor prompt_lens, Tensor seq_lens, Tensor repetition, "
        "Tensor frequency, Tensor presence) -> Tensor"
    ),
    "place": (
        "(Tensor num_computed, Tensor token_ids, Tensor block_table, Tensor token_rows, Tensor offsets, Tensor rows, "
        "Tensor query_start, int block_size) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "accept": (
        "(Tensor(a!) token_ids, Tensor(b!) num_known, Tensor(c!) num_computed, Tensor rows, Tensor query_start, "
        "Tensor sample_start, Tensor sampled) -> Tensor"
    ),
    "token_logprobs": "(Tensor logits, Tensor token_ids, int num_top) -> (Tensor, Tensor, Tensor, Tensor)",
    "gather_logprobs": "(Tensor logits, Tensor token_ids) -> Tensor",
    "mask_logits": "(Tensor(a!) logits, Tensor bitmask, Tensor mask_rows) -> ()",
    "bias_logits": "(Tensor(a!) logits, Tensor table_rows, Tensor ids, Tensor values, Tensor counts) -> ()",
    "peer_all_reduce": ("(Tensor(a!) x, Tensor windows, int rank, int capacity, float limit_s, bool two_shot) -> ()"),
    "peer_all_gather": "(Tensor x, Tensor windows, int rank, int capacity, float limit_s, bool split) -> Tensor",
    "peer_add_rms_norm": (
        "(Tensor x, Tensor(a!) residual, Tensor weight, float eps, Tensor windows, int rank, int capacity, "
        "float limit_s) -> Tensor"
    ),
    "peer_send_rows": "(Tensor x, int to, int rows, Tensor windows, int rank, int capacity, int number) -> ()",
    "peer_sent_add_rms_norm": (
        "(Tensor x, Tensor(a!) residual, Tensor weight, float eps, Tensor windows, int rank, int capacity, "
        "float limit_s, int number) -> Tensor"
    ),
    "peer_split_add_rms_norm": (
        "(Tensor x, Tensor(a!) residual, Tensor weight, float eps, Tensor windows, int rank, int capacity, "
        "float limit_s) -> Tensor"
    ),
}

LIBRARY = Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema)


def _like(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _gathered(x: Tensor, windows: Tensor, rank: int, capacity: int, limit_s: float, split: bool) -> Tensor:
    ranks = windows.shape[0]
    return x.new_empty(x.shape[0] // ranks if split else x.shape[0], x.shape[1] * ranks)


def _nothing(*_: object) -> None:
    return None


def _half_width(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _linear(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gated_linear(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


def _block_linear(x: Tensor, blocks: list[Tensor], *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(part.shape[0] for part in blocks))


def _block_gated_linear(x: Tensor, blocks: list[Tensor], *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], blocks[0].shape[0])


def _decode_blocks(blocks: Tensor, kind: int) -> Tensor:
    values, num_bytes = block_size(kind)
    return blocks.new_empty(blocks.shape[0], blocks.shape[1] // num_bytes * values, dtype=torch.float32)


def _scaled(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=CODES), x.new_empty(x.shape[0], dtype=torch.float32)


def _scaled_gated(x: Tensor, gelu_tanh: bool) -> tuple[Tensor, Tensor]:
    return _scaled(_half_width(x))


def _scaled_linear(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *_: object
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


def _scaled_gated_linear(x: Tensor, x_scales: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _scaled(x.new_empty(x.shape[0], weight.shape[0] // 2))


def _patched_linear(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] * PATCH_ROWS)


def _patched_gated_linear(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return _half_width(_patched_linear(x, weight))


def _routed(logits: Tensor, bias: Tensor | None, per_token: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], per_token)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def _token_each(logits: Tensor, *_: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def _placed(
    num_computed: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    token_rows: Tensor,
    offsets: Tensor,
    rows: Tensor,
    query_start: Tensor,
    block_size: int,
) -> Placed:
    num_tokens, num_seqs = token_rows.shape[0], rows.shape[0]
    num_groups, _, columns = block_table.shape
    ids, positions, following = (token_rows.new_empty(num_tokens) for _ in range(3))
    slots = token_rows.new_empty(num_groups, num_tokens)
    block_tables = block_table.new_empty(num_groups, num_seqs, columns)
    return Placed(ids, positions, following, slots, query_start.new_empty(num_seqs), block_tables)


def _accepted(token_ids: Tensor, num_known: Tensor, num_computed: Tensor, rows: Tensor, *_: Tensor) -> Tensor:
    return rows.new_empty(rows.shape)


def _token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows = logits.shape[0]
    values = logits.new_empty(num_rows, dtype=torch.float32)
    top_values = logits.new_empty(num_rows, num_top, dtype=torch.float32)
    return values, token_ids.new_empty(num_rows), token_ids.new_empty(num_rows, num_top), top_values


def _gather_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    return logits.new_empty(token_ids.shape, dtype=torch.float32)


_FAKES = {
    "rms_norm": _like,
    "add_rms_norm": _like,
    "add_halves_rms_norm": lambda halves, residual, *_: residual.new_empty(residual.shape),
    "rotary": _nothing,
    "store_kv": _nothing,
    "rope_store": _nothing,
    "paged_attention": _like,
    "shared_prefixes": lambda _table, _start, lens, _size: lens.new_empty(3, lens.shape[0]),
    "invariant_attention": _like,
    "attention_kernels": lambda *_: (False, False),
    "silu_mul": _half_width,
    "gelu_tanh_mul": _half_width,
    "linear": _linear,
    "invariant_linear": _linear,
    "linear_rows": lambda *_: 0,
    "gated_linear": _gated_linear,
    "block_linear": _block_linear,
    "block_gated_linear": _block_gated_linear,
    "block_experts": _like,
    "decode_blocks": _decode_blocks,
    "block_kernels": lambda *_: False,
    "scale_rows": _scaled,
    "scaled_rms_norm": _scaled,
    "scaled_gated": _scaled_gated,
    "scaled_linear": _scaled_linear,
    "scaled_gated_linear": _scaled_gated_linear,
    "patched_linear": _patched_linear,
    "patched_gated_linear": _patched_gated_linear,
    "route": _routed,
    "experts": _like,
    "patched_experts": _like,
    "experts_kernels": lambda *_: False,
    "few_layers": _nothing,
    "few_layers_rows": lambda *_: 0,
    "decode_layers": _nothing,
    "sample": _token_each,
    "sample_columns": lambda *_: 0,
    "penalize": _like,
    "place": _placed,
    "accept": _accepted,
    "token_logprobs": _token_logprobs,
    "gather_logprobs": _gather_logprobs,
    "mask_logits": _nothing,
    "bias_logits": _nothing,
    "peer_all_reduce": _nothing,
    "peer_all_gather": _gathered,
    "peer_add_rms_norm": _like,
    "peer_send_rows": _nothing,
    "peer_sent_add_rms_norm": lambda x, residual, *_: residual.new_empty(residual.shape),
    "peer_split_add_rms_norm": _like,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=LIBRARY)
