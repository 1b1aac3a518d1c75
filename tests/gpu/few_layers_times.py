"""What a layer of a decode step of few rows takes where all layers run in one kernel.

python -m tests.gpu.few_layers_times [--forms plain,fp8,int4] [--models 8b,0.6b] [--lengths 256] [ROWS ...]

On a CUDA host. Prints one JSON line a model, form of products, length of the sequences and number of rows: microseconds
a layer, in a CUDA graph, with weights that come from memory. `of_bandwidth` is the rate at which the products' weights
are read, as a share of what a large element-wise kernel reaches.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from raylm import ops
from raylm.layers.slots import PatchForm, row_bytes
from tests.gpu.timing import COLD_BYTES, bandwidth, graph_us

BLOCK_SIZE, GROUP = 16, 128


class Model(NamedTuple):
    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    head_norms: bool


MODELS = {"8b": Model(4096, 14336, 32, 8, 128, False), "0.6b": Model(1024, 3072, 16, 8, 128, True)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--forms", default="plain,fp8,int4")
    parser.add_argument("--models", default="8b,0.6b")
    parser.add_argument("--lengths", default="256")
    parser.add_argument("rows", nargs="*", type=int, default=[1, 2])
    args = parser.parse_args()
    most = bandwidth()
    print(json.dumps({"bench": "bandwidth", "tb_per_s": round(most / 1e6, 3)}), flush=True)
    for name in args.models.split(","):
        for form in args.forms.split(","):
            weights = _weights(MODELS[name], form)
            for length in map(int, args.lengths.split(",")):
                for rows in args.rows:
                    _time(name, form, MODELS[name], weights, rows, length, most)


def _weights(model: Model, form: str) -> ops.LayerWeights:
    hidden, width, heads, kv_heads, head_dim, head_norms = model
    qkv = (heads + 2 * kv_heads) * head_dim
    shapes = [(qkv, hidden), (hidden, heads * head_dim), (2 * width, hidden), (hidden, width)]
    layers = max(2, -(-COLD_BYTES // sum(_product(*shape, form).nbytes for shape in shapes)))
    products = [_product(*shape, form) for _ in range(layers) for shape in shapes]
    scales = [torch.full((n,), 0.01, device="cuda") for _ in range(layers) for n, _ in shapes]
    return ops.LayerWeights(
        products=products,
        scales=scales if form == "fp8" else [],
        norms=[_ones(hidden) for _ in range(2 * layers)],
        head_norms=[_ones(head_dim) for _ in range(2 * layers)] if head_norms else [],
        biases=[],
        group=GROUP if form == "int4" else 0,
        num_heads=heads,
        width=width,
        eps=1e-5,
        scale=head_dim**-0.5,
        gelu_tanh=False,
    )


def _product(n: int, k: int, form: str) -> Tensor:
    if form == "int4":
        size = (n // 16, row_bytes(PatchForm("int4", GROUP), k))
        # As scales none of these is large or no number.
        return torch.randint(0, 256, size, device="cuda", dtype=torch.uint8) & 0x37
    product = torch.randn(n, k, device="cuda") / k**0.5
    return product.to(torch.float8_e4m3fn if form == "fp8" else torch.bfloat16)


def _ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bfloat16, device="cuda")


def _time(name: str, form: str, model: Model, weights: ops.LayerWeights, rows: int, length: int, most: float) -> None:
    layers, per_row = len(weights.norms) // 2, -(-length // BLOCK_SIZE)
    shape = (rows * per_row, BLOCK_SIZE, model.kv_heads, model.head_dim)
    caches = [torch.randn(shape, device="cuda").bfloat16() for _ in range(2 * layers)]
    table = torch.arange(rows * per_row, dtype=torch.int32, device="cuda").view(rows, per_row)
    step = partial(
        ops.few_layers,
        torch.randn(rows, model.hidden, device="cuda").bfloat16(),
        weights,
        caches[:layers],
        caches[layers:],
        torch.full((rows,), length - 1, device="cuda"),
        table[:, -1].long() * BLOCK_SIZE + (length - 1) % BLOCK_SIZE,
        torch.full((rows,), length, dtype=torch.int32, device="cuda"),
        table,
        torch.randn(length, model.head_dim, device="cuda"),
        *ops.few_layers_memory(weights, num_kv_heads=model.kv_heads),
    )
    us = graph_us([step]) / layers
    read = sum(product.nbytes for product in weights.products) / layers
    line = {"bench": "few_layers", "model": name, "form": form, "rows": rows, "length": length, "layers": layers}
    print(json.dumps({**line, "layer_us": round(us, 2), "of_bandwidth": round(read / us / most, 3)}), flush=True)


if __name__ == "__main__":
    main()
