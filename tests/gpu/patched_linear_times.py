"""What products with weights in patches take, beside those of 16 bits.

python -m tests.gpu.patched_linear_times [--kinds int4:128,fp8:128] [--shapes 8b] [ROWS ...]     on a CUDA host

Prints one JSON line a kind, shape and number of rows. In a CUDA graph, with weights that come from memory.
`of_bandwidth` is the reading of the weight alone as a share of what the memory gives to a large element-wise kernel.
"""

from __future__ import annotations

import argparse
import json
from functools import partial

import torch

from raylm import ops
from raylm.layers.slots import PatchForm, row_bytes
from tests.gpu.scaled_linear_times import SHAPES
from tests.gpu.timing import add_kinds, bandwidth, cold_copies, graph_us

ROWS = (1, 8, 16, 32, 64, 128, 256)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_kinds(parser, "int4:128")
    parser.add_argument("rows", nargs="*", type=int, default=ROWS)
    args = parser.parse_args()
    most = bandwidth()
    print(json.dumps({"bench": "bandwidth", "tb_per_s": round(most / 1e6, 3)}), flush=True)
    for form in args.kinds:
        for name, (n, k) in SHAPES.items():
            if name.startswith(args.shapes):
                _time(form, name, n, k, args.rows, most)


def _time(form: PatchForm, name: str, n: int, k: int, sizes: list[int], most: float) -> None:
    drawn = torch.randint(0, 256, (n // 16, row_bytes(form, k)), device="cuda", dtype=torch.uint8)
    packed = drawn & 0x37  # as scales none of these is large or no number
    weights = [packed.clone() for _ in range(cold_copies(packed.nbytes))]
    plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(cold_copies(2 * n * k))]
    product = partial(ops.patched_linear, numbers=form.numbers, group=form.group, frozen=True)
    first = torch.ones(1, k, dtype=torch.bfloat16, device="cuda")
    graph_us([partial(product, first, weight) for weight in weights])  # what is timed first reads high
    for rows in sizes:
        x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
        us = graph_us([partial(product, x, weight) for weight in weights])
        plain_us = graph_us([partial(ops.linear, x, weight, frozen=True) for weight in plain])
        line = {"bench": "patched_linear", "form": str(form), "name": name, "n": n, "k": k, "rows": rows}
        shares = {"plain_us": round(plain_us, 2), "of_bandwidth": round(packed.nbytes / us / most, 3)}
        print(json.dumps({**line, "us": round(us, 2), **shares}), flush=True)


if __name__ == "__main__":
    main()
