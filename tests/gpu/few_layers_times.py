"""What a layer of a decode step of few rows takes where all layers run in one kernel.

python -m tests.gpu.few_layers_times [--forms plain,fp8,fp8-blocks,int4] [--models 8b,0.6b,30b-a3b] [--lengths 256]
    [ROWS ...]

On a CUDA host. Prints one JSON line a model, form of products, length of the sequences and number of rows: microseconds
a layer, in a CUDA graph, with weights that come from memory. `of_bandwidth` is the rate at which the products' weights
are read, as a share of what a large element-wise kernel reaches. A mixture of experts is there for one row.
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
    experts: int = 0


MODELS = {
    "8b": Model(4096, 14336, 32, 8, 128, False),
    "0.6b": Model(1024, 3072, 16, 8, 128, True),
    "30b-a3b": Model(2048, 768, 32, 4, 128, True, experts=128),
}
MIXTURE = ops.Mixture(per_token=8, sigmoid=False, normalized=True, scale=1.0)
NUMBERS: dict[str, ops.Numbers] = {"int4": "int4", "fp8-blocks": "fp8"}


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
                for rows in args.rows[:1] if MODELS[name].experts else args.rows:
                    _time(name, form, MODELS[name], weights, rows, length, most)


def _weights(model: Model, form: str) -> ops.LayerWeights:
    hidden, width, heads, kv_heads, head_dim, head_norms, experts = model
    qkv = (heads + 2 * kv_heads) * head_dim
    of_attention = [((qkv, hidden), form), ((hidden, heads * head_dim), form)]
    if experts:
        of_experts = "fp8-blocks" if form == "fp8" else form
        mlp = [((experts, hidden), "plain"), *(((experts, *n_k), of_experts) for n_k in _mlp(model))]
    else:
        mlp = [(n_k, form) for n_k in _mlp(model)]
    wanted = [*of_attention, *mlp]
    layers = max(2, -(-COLD_BYTES // _bytes_read([_product(*one) for one in wanted])))
    scaled = [shape[0] for shape, kept in wanted if kept == "fp8"]
    numbers = NUMBERS.get("fp8-blocks" if form == "fp8" and experts else form)
    return ops.LayerWeights(
        products=[_product(*one) for _ in range(layers) for one in wanted],
        scales=[torch.full((n,), 0.01, device="cuda") for _ in range(layers) for n in scaled],
        norms=[_ones(hidden) for _ in range(2 * layers)],
        head_norms=[_ones(head_dim) for _ in range(2 * layers)] if head_norms else [],
        biases=[],
        numbers=numbers,
        group=GROUP if numbers else 0,
        mixture=MIXTURE if experts else None,
        num_heads=heads,
        width=width,
        eps=1e-5,
        scale=head_dim**-0.5,
        gelu_tanh=False,
    )


def _mlp(model: Model) -> list[tuple[int, int]]:
    return [(2 * model.width, model.hidden), (model.hidden, model.width)]


def _bytes_read(products: list[Tensor]) -> int:
    of_experts = [MIXTURE.per_token * one[0].nbytes for one in products if one.dim() == 3]
    return sum(of_experts) + sum(one.nbytes for one in products if one.dim() == 2)


def _product(shape: tuple[int, ...], form: str) -> Tensor:
    *stacked, n, k = shape
    if form in NUMBERS:
        size = (*stacked, n // 16, row_bytes(PatchForm(NUMBERS[form], GROUP), k))
        # As scales none of these is large or no number.
        return torch.randint(0, 256, size, device="cuda", dtype=torch.uint8) & 0x37
    product = torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / k**0.5
    return product.to(torch.float8_e4m3fn) if form == "fp8" else product


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
    read = _bytes_read(weights.products) / layers
    line = {"bench": "few_layers", "model": name, "form": form, "rows": rows, "length": length, "layers": layers}
    print(json.dumps({**line, "layer_us": round(us, 2), "of_bandwidth": round(read / us / most, 3)}), flush=True)


if __name__ == "__main__":
    main()
