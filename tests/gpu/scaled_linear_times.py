"""What products of 8-bit numbers take, beside torch's library, and what quantises their rows.

Gate and up are with their activation and what quantises that.

python -m tests.gpu.scaled_linear_times [ROWS ...]     on a CUDA host; prints one JSON line a shape and number of rows

In a CUDA graph, with weights that come from memory. `of_bandwidth` is the reading of the weight alone as a share of
what the memory gives to a large element-wise kernel, `tflops` what the product comes to.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import torch
from torch import Tensor

from raylm import ops
from tests.gpu.timing import Call, bandwidth, cold_copies, graph_us

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 8192)
SHAPES = {
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate, up": (28672, 4096),
    "8b down": (4096, 14336),
    "0.6b qkv": (4096, 1024),
    "0.6b o": (1024, 2048),
    "0.6b gate, up": (6144, 1024),
    "0.6b down": (1024, 3072),
}
"""Name: rows of the weight, columns."""


def main() -> None:
    most = bandwidth()
    print(json.dumps({"bench": "bandwidth", "tb_per_s": round(most / 1e6, 3)}), flush=True)
    for name, (n, k) in SHAPES.items():
        codes = torch.randn(n, k, device="cuda").mul_(100).clamp_(-448, 448).to(ops.CODES)
        weights = [codes.clone() for _ in range(cold_copies(n * k))]
        scales = torch.rand(n, device="cuda") / 1000
        first = ops.scale_rows(torch.ones(1, k, dtype=torch.bfloat16, device="cuda"))
        graph_us([partial(_product, first, weight, scales) for weight in weights])  # what is timed first reads high
        for rows in [int(rows) for rows in sys.argv[1:]] or ROWS:
            x = ops.scale_rows(torch.randn(rows, k, dtype=torch.bfloat16, device="cuda"))
            ours, library = (_gated, _library_gated) if name.endswith("gate, up") else (_product, _library)
            us = graph_us([partial(ours, x, weight, scales) for weight in weights])
            library_us = graph_us([partial(library, x, weight, scales) for weight in weights])
            line = {"bench": "scaled_linear", "name": name, "n": n, "k": k, "rows": rows, "us": round(us, 2)}
            shares = {"of_bandwidth": round(n * k / us / most, 3), "tflops": round(2e-6 * rows * n * k / us, 1)}
            print(json.dumps({**line, "library_us": round(library_us, 2), **shares}), flush=True)
    for rows in (1, 32, 256, 8192):
        wide = torch.randn(rows, 28672, dtype=torch.bfloat16, device="cuda")
        x, norm = wide[:, :4096].contiguous(), torch.ones(4096, dtype=torch.bfloat16, device="cuda")
        calls: dict[str, Call] = {
            "scaled_rms_norm": partial(ops.scaled_rms_norm, x, norm, 1e-5, x.clone()),
            "scaled_gated": partial(ops.scaled_gated, wide, "silu"),
            "scale_rows": partial(ops.scale_rows, x),
        }
        for op, call in calls.items():
            print(json.dumps({"bench": op, "rows": rows, "us": round(graph_us([call] * 20), 2)}), flush=True)


def _product(x: ops.ScaledRows, weight: Tensor, scales: Tensor) -> Tensor:
    return ops.scaled_linear(x, weight, scales, dtype=torch.bfloat16, frozen=True)


def _gated(x: ops.ScaledRows, weight: Tensor, scales: Tensor) -> ops.ScaledRows:
    return ops.scaled_gated_linear(x, weight, scales, "silu", dtype=torch.bfloat16, frozen=True)


def _library_gated(x: ops.ScaledRows, weight: Tensor, scales: Tensor) -> ops.ScaledRows:
    return ops.scaled_gated(_library(x, weight, scales), "silu")


def _library(x: ops.ScaledRows, weight: Tensor, scales: Tensor) -> Tensor:
    of_x, of_weight = x.scales[:, None], scales[None]
    return torch._scaled_mm(x.codes, weight.t(), of_x, of_weight, out_dtype=torch.bfloat16, use_fast_accum=True)


if __name__ == "__main__":
    main()
