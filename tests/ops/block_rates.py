"""How long products with quantised GGUF weights take beside those with float32 weights. A program, no test.

python -m tests.ops.block_rates --shape 3072x576 --shape 6144x4096 --kinds Q4_1,Q8_0 --rows 1,16,512 --threads 1

Weights come from memory: each call takes the next of several copies, 96 MB in all. The sides take turns. A figure is
the best of all turns.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from raylm import ops
from tests.ops.block_cases import random_blocks, values_of

COPIES_BYTES = 96 << 20
SECONDS = 3.0
"""For all sides of one line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", required=True, help="rows and columns of a weight, NxK")
    parser.add_argument("--kinds", default="Q4_1,Q8_0,Q4_K,Q6_K")
    parser.add_argument("--rows", default="1,16,512", help="of x")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for shape in arguments.shape:
        out_size, in_size = map(int, shape.split("x"))
        kinds = [kind for kind in map(Kind.__getitem__, arguments.kinds.split(",")) if in_size % values_of(kind) == 0]
        for rows in map(int, arguments.rows.split(",")):
            _print_line(rows, out_size, in_size, kinds)


def _print_line(rows: int, out_size: int, in_size: int, kinds: list[Kind]) -> None:
    x = torch.randn(rows, in_size)
    plain = _turns([torch.randn(out_size, in_size) for _ in range(_copies(4 * out_size * in_size))])
    sides: list[Callable[[], Tensor]] = [lambda: ops.linear(x, next(plain))]
    sizes = [4 * out_size * in_size]
    for kind in kinds:
        values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        sizes.append(out_size * in_size // values * num_bytes)
        first = random_blocks(kind, out_size, in_size // values)
        copies = _turns([first.clone() for _ in range(_copies(sizes[-1]))])
        sides.append(lambda copies=copies, kind=kind: ops.block_linear(x, [next(copies)], [int(kind)]))
    best = _best(sides)
    print(f"{out_size}x{in_size}, {rows} rows: ", end="")
    names = ["float32", *(kind.name for kind in kinds)]
    for name, seconds, size in zip(names, best, sizes, strict=True):
        print(f"{name} {seconds * 1e6:.0f} us {size / seconds / 1e9:.1f} GB/s {best[0] / seconds:.2f}x; ", end="")
    print(flush=True)


def _copies(num_bytes: int) -> int:
    return max(1, min(200, COPIES_BYTES // num_bytes))


def _turns(copies: list[Tensor]) -> itertools.cycle[Tensor]:
    return itertools.cycle(copies)


def _best(sides: list[Callable[[], Tensor]]) -> list[float]:
    best = [float("inf")] * len(sides)
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or best[-1] == float("inf"):
        for i, side in enumerate(sides):
            start = time.perf_counter()
            side()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
