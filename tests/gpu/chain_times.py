"""What stands around decode attention takes with it: norm, queries, keys and values, rotary, attention, o.

python -m tests.gpu.chain_times     on a CUDA host; prints one JSON line a case, in all in half a minute

Microseconds a layer, in a CUDA graph of several layers whose weights and caches are their own, bf16, blocks of 16 in
random order. In it kernels begin while those ahead of them end, as in a model; alone none does (attention_times).
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
from torch import Tensor

from raylm import ops
from tests.gpu.timing import graph_us

BLOCK, HEAD, MOST_TOKENS = 16, 128, 8192
MOST_CACHE_BYTES = 24 << 30
"""Of all layers."""


class Model(NamedTuple):
    heads: int
    kv_heads: int
    hidden: int


MODELS = {"0.6b": Model(16, 8, 1024), "8b": Model(32, 8, 4096)}
CASES = [
    *(("0.6b", *case) for case in ((16, 200), (32, 150), (32, 300), (32, 1000), (32, 4096), (64, 300), (64, 4096))),
    *(("0.6b", *case) for case in ((14, 1500), (16, 4096), (256, 300))),
    *(("8b", *case) for case in ((32, 300), (64, 1024), (256, 384))),
]
"""Model, rows, keys of each."""


class Layer(NamedTuple):
    qkv: Tensor
    o: Tensor
    norm: Tensor
    k_cache: Tensor
    v_cache: Tensor


def main() -> None:
    for name, rows, keys in CASES:
        us = layer_us(MODELS[name], rows, keys)
        print(json.dumps({"bench": "chain", "model": name, "rows": rows, "keys": keys, "layer_us": us}), flush=True)


def layer_us(model: Model, rows: int, keys: int) -> float:
    """Of a decode step of so many rows of so many keys."""
    columns = -(-keys // BLOCK)
    cache_bytes = 4 * rows * columns * BLOCK * model.kv_heads * HEAD
    layers = [_layer(model, rows * columns) for _ in range(max(4, min(28, MOST_CACHE_BYTES // cache_bytes)))]
    table = torch.randperm(rows * columns, device="cuda").int().view(rows, columns)
    lens = torch.full((rows,), keys, dtype=torch.int32, device="cuda")
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    positions = lens.long() - 1
    slots = table[:, (keys - 1) // BLOCK].long() * BLOCK + (keys - 1) % BLOCK
    cos_sin = torch.randn(MOST_TOKENS, HEAD, device="cuda")
    arrivals = torch.zeros(ops.MAX_ARRIVALS, dtype=torch.int32, device="cuda")
    given = torch.randn(rows, model.hidden, dtype=torch.bfloat16, device="cuda")
    sizes = [model.heads, model.kv_heads, model.kv_heads]

    def run() -> None:
        residual, x = given.clone(), given
        for layer in layers:
            x = ops.add_rms_norm(x, residual, layer.norm, 1e-6)
            q, k, v = ops.linear(x, layer.qkv, frozen=True).view(rows, sum(sizes), HEAD).split(sizes, dim=1)
            caches = (layer.k_cache, layer.v_cache)
            ops.rope_store(q, k, v, None, None, 1e-6, positions, cos_sin, *caches, slots, frozen=True)
            numbers = (1, MOST_TOKENS, HEAD**-0.5)
            out = ops.paged_attention(q, *caches, table, starts, lens, *numbers, arrivals=arrivals, frozen=True)
            x = ops.linear(out.view(rows, -1), layer.o, frozen=True)

    return round(graph_us([run]) / len(layers), 2)


def _layer(model: Model, num_blocks: int) -> Layer:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda") / 50

    width = (model.heads + 2 * model.kv_heads) * HEAD
    caches = [random(num_blocks, BLOCK, model.kv_heads, HEAD) for _ in range(2)]
    return Layer(random(width, model.hidden), random(model.hidden, model.heads * HEAD), random(model.hidden), *caches)


if __name__ == "__main__":
    main()
