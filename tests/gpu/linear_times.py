"""What products of few rows take, beside torch's library; that of gate and up with its activation.

python -m tests.gpu.linear_times [ROWS ...]     on a CUDA host; prints one JSON line a shape and number of rows

bf16, in a CUDA graph, with weights that come from memory. A call of ours begins while the one ahead drains, as it does
in a model; the library's do not. `of_bandwidth` is the reading of the weight alone as a share of what the memory gives
to a large element-wise kernel, measured before.
"""

from __future__ import annotations

import json
import sys

import torch
from torch.nn import functional

from raylm import ops
from tests.gpu.timing import Call, bandwidth, cold_copies, graph_us

ROWS = (1, 8, 12, 16, 17, 24, 32, 48, 64)
SHAPES = {
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate, up": (28672, 4096),
    "8b down": (4096, 14336),
    "8b head": (128256, 4096),
    "0.6b qkv": (4096, 1024),
    "0.6b o": (1024, 2048),
    "0.6b gate, up": (6144, 1024),
    "0.6b down": (1024, 3072),
    "0.6b head": (151936, 1024),
}
"""Name: rows of the weight, columns."""


def main() -> None:
    most = bandwidth()
    print(json.dumps({"bench": "bandwidth", "tb_per_s": round(most / 1e6, 3)}), flush=True)
    for name, (n, k) in SHAPES.items():
        weights = [
            torch.randn(n, k, dtype=torch.bfloat16, device="cuda") / k**0.5 for _ in range(cold_copies(2 * n * k))
        ]
        graph_us(
            [lambda w=w: ops.linear(w[:1], w, frozen=True) for w in weights]
        )  # what is timed first of new weights reads high
        for rows in [int(rows) for rows in sys.argv[1:]] or ROWS:
            x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
            ours: list[Call] = [lambda x=x, w=w: ops.linear(x, w, frozen=True) for w in weights]
            library: list[Call] = [lambda x=x, w=w: functional.linear(x, w) for w in weights]
            if name.endswith("gate, up"):
                ours = [lambda x=x, w=w: ops.gated_linear(x, w, "silu", frozen=True) for w in weights]
                library = [lambda x=x, w=w: ops.silu_mul(functional.linear(x, w)) for w in weights]
            us, library_us = graph_us(ours), graph_us(library)
            line = {"bench": "linear", "name": name, "n": n, "k": k, "rows": rows, "us": round(us, 2)}
            share = round(2 * n * k / us / most, 3)
            print(json.dumps({**line, "library_us": round(library_us, 2), "of_bandwidth": share}), flush=True)


if __name__ == "__main__":
    main()
