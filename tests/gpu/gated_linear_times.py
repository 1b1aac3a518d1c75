"""What gate and up with their activation cost in one kernel, and as a product and an activation.

python -m tests.gpu.gated_linear_times        on a Hopper GPU; prints one JSON line a case, in all in about a minute

Each way runs for two seconds a case, back to back, so that the chip is at its power limit, in slices that take turns,
so that all meet the same temperature. The product alone is measured beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from raylm import ops
from tests.gpu.timing import cold_copies

CASES = [
    (8192, 4096, 14336),
    (8192, 4096, 7168),
    (2048, 4096, 14336),
    (1024, 4096, 14336),
    (512, 4096, 14336),
    (8192, 1024, 3072),
]
"""Rows, input size, width of gate and of up."""
SLICES = 4
SLICE_MS = 500.0

Way = Callable[[Tensor, Tensor], Tensor]


def apart(x: Tensor, weight: Tensor) -> Tensor:
    return ops.silu_mul(ops.linear(x, weight))


def fused(x: Tensor, weight: Tensor) -> Tensor:
    return ops.gated_linear(x, weight, "silu")


WAYS: dict[str, Way] = {"product": ops.linear, "apart": apart, "fused": fused}


def slice_us(way: Way, x: Tensor, weights: list[Tensor], calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for call in range(calls):
        way(x, weights[call % len(weights)])
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / calls


def check(x: Tensor, weight: Tensor) -> float:
    """How far the two ways are from each other, relative to the result. Raises where it is more than rounding."""
    one, other = fused(x, weight).float(), apart(x, weight).float()
    difference = float((one - other).norm() / other.norm())
    if not difference < torch.finfo(x.dtype).eps:
        raise SystemExit(f"{tuple(x.shape)} by {tuple(weight.shape)}: the ways differ by {difference}")
    return difference


def measure(rows: int, in_size: int, width: int) -> dict[str, object]:
    copies = cold_copies(4 * width * in_size)
    x = torch.randn(rows, in_size, dtype=torch.bfloat16, device="cuda")
    weights = [
        torch.randn(2 * width, in_size, dtype=torch.bfloat16, device="cuda") / in_size**0.5 for _ in range(copies)
    ]
    difference = check(x, weights[0])
    calls = {name: max(1, int(SLICE_MS * 1000 / slice_us(way, x, weights, 20))) for name, way in WAYS.items()}
    slices: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(SLICES):
        for name, way in WAYS.items():
            slices[name].append(slice_us(way, x, weights, calls[name]))
    mean = {name: sum(times) / SLICES for name, times in slices.items()}
    flops = 2 * rows * in_size * 2 * width
    return {
        "bench": "gated_linear",
        "rows": rows,
        "in_size": in_size,
        "width": width,
        **{f"{name}_us": round(time, 1) for name, time in mean.items()},
        "fused_of_apart": round(mean["fused"] / mean["apart"], 4),
        "fused_of_product": round(mean["fused"] / mean["product"], 4),
        **{f"{name}_tflops": round(flops / time / 1e6, 1) for name, time in mean.items()},
        "slices_us": {name: [round(time, 1) for time in times] for name, times in slices.items()},
        "difference": round(difference, 6),
    }


def main() -> None:
    for case in CASES:
        print(json.dumps(measure(*case)), flush=True)


if __name__ == "__main__":
    main()
