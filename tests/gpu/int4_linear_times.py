"""What products with weights of 4-bit integers take, beside those of 16 bits.

python -m tests.gpu.int4_linear_times [ROWS ...]     on a CUDA host; prints one JSON line a shape and number of rows

In a CUDA graph, with weights that come from memory, groups of 128. `of_bandwidth` is the reading of the weight alone as
a share of what the memory gives to a large element-wise kernel.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import torch
from torch import Tensor

from raylm import ops
from tests.gpu.scaled_linear_times import SHAPES
from tests.gpu.timing import bandwidth, cold_copies, graph_us

ROWS = (1, 8, 16, 32, 64, 128, 256)
GROUP = 128


def main() -> None:
    most = bandwidth()
    print(json.dumps({"bench": "bandwidth", "tb_per_s": round(most / 1e6, 3)}), flush=True)
    for name, (n, k) in SHAPES.items():
        packed = _packed(n, k)
        weights = [packed.clone() for _ in range(cold_copies(packed.nbytes))]
        plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(cold_copies(2 * n * k))]
        first = torch.ones(1, k, dtype=torch.bfloat16, device="cuda")
        graph_us([partial(_product, first, weight) for weight in weights])  # what is timed first reads high
        for rows in [int(rows) for rows in sys.argv[1:]] or ROWS:
            x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
            us = graph_us([partial(_product, x, weight) for weight in weights])
            plain_us = graph_us([partial(ops.linear, x, weight, frozen=True) for weight in plain])
            line = {"bench": "int4_linear", "name": name, "n": n, "k": k, "rows": rows, "us": round(us, 2)}
            shares = {"plain_us": round(plain_us, 2), "of_bandwidth": round(packed.nbytes / us / most, 3)}
            print(json.dumps({**line, **shares}), flush=True)
        del weights, plain


def _packed(n: int, k: int) -> Tensor:
    groups = n, -(-k // GROUP)
    codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
    scales, zeros = torch.rand(groups, device="cuda") / 100, torch.randint(0, 16, groups, device="cuda")
    return ops.pack_int4(codes, scales, zeros, GROUP)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return ops.int4_linear(x, weight, GROUP, frozen=True)


if __name__ == "__main__":
    main()
