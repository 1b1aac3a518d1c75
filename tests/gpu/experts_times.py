"""What a mixture of experts takes by number of tokens, whole and beside torch's version, and of weights as codes.

python -m tests.gpu.experts_times [--kinds fp8:128,int4:128] [--shapes qwen3] [TOKENS ...]     on a CUDA host

Prints one JSON line a shape and number of tokens.

Activations in bfloat16, which some kinds round, in a CUDA graph, with weights that come from memory and tokens that go
to random experts.
`of_bandwidth` is the reading of the weights of the experts touched alone as a share of what the memory gives to a large
element-wise kernel, measured before; `tflops` counts the products.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor

from raylm import ops
from raylm.layers.slots import PatchForm
from raylm.ops import fallback
from tests.gpu.timing import Call, add_kinds, bandwidth, graph_us

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
SHAPES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "mixtral-8x7b": (8, 2, 4096, 14336)}
"""Name: experts, experts a token, hidden size, columns between an expert's products."""
KINDS = "fp8_rows:128,int4:128,mxfp4:32"
COPIES = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    add_kinds(parser, KINDS)
    parser.add_argument("tokens", nargs="*", type=int, default=TOKENS)
    args = parser.parse_args()
    most = bandwidth()
    print(json.dumps({"bench": "bandwidth", "tb_per_s": round(most / 1e6, 3)}), flush=True)
    shapes = {name: shape for name, shape in SHAPES.items() if name.startswith(args.shapes)}
    for name, (num_experts, per_token, hidden, size) in shapes.items():
        gate_ups = [_random(num_experts, 2 * size, hidden) for _ in range(COPIES)]
        downs = [_random(num_experts, hidden, size) for _ in range(COPIES)]
        patches = {kind: _patches(kind, num_experts, hidden, size) for kind in args.kinds}
        for tokens in args.tokens:
            logits = _random(tokens, num_experts) * hidden**0.5
            x = _random(tokens, hidden)
            measured = _times(x, gate_ups, downs, logits, per_token)
            measured |= _times_of_codes(x, patches, logits, per_token)
            moved = 6 * hidden * size * measured["touched"]
            flops = 6 * hidden * size * tokens * per_token
            measured |= {"of_bandwidth": round(moved / measured["us"] / most, 3)}
            measured |= {"tflops": round(flops / measured["us"] / 1e6, 1)}
            print(json.dumps({"bench": "experts", "name": name, "tokens": tokens, **measured}), flush=True)


def _times(x: Tensor, gate_ups: list[Tensor], downs: list[Tensor], logits: Tensor, per_token: int) -> dict[str, float]:
    """Microseconds of a call, of torch's version, and of the routing before."""
    weights, chosen = route(logits, per_token)
    pairs = list(zip(gate_ups, downs, strict=True))
    calls: list[Call] = [lambda g=g, d=d: ops.experts(x, g, d, weights, chosen, "silu") for g, d in pairs]
    torchs: list[Call] = [
        lambda g=g, d=d: fallback.experts(x, g, d, weights, chosen, None, None, 0, 0.0) for g, d in pairs
    ]
    return {
        "touched": len(chosen.unique()),
        "us": round(graph_us(calls), 2),
        "torch_us": round(graph_us(torchs), 2),
        "route_us": round(graph_us([lambda: route(logits, per_token)[0]]), 2),
    }


def _patches(kind: PatchForm, num_experts: int, hidden: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Gate and up, and down, of random codes: what numbers they are changes nothing."""

    def random(rows: int, columns: int) -> Tensor:
        shape = num_experts, rows // 16, -(-columns // 128) * kind.patch_bytes
        return torch.randint(0, 64, shape, dtype=torch.uint8, device="cuda")

    return [(random(2 * size, hidden), random(hidden, size)) for _ in range(2 * COPIES)]


def _times_of_codes(
    x: Tensor, patches: dict[PatchForm, list[tuple[Tensor, Tensor]]], logits: Tensor, per_token: int
) -> dict[str, float]:
    """Microseconds of a call for each kind of codes."""
    weights, chosen = route(logits, per_token)
    found: dict[str, float] = {}
    for kind, copies in patches.items():
        calls: list[Call] = [
            lambda g=g, d=d, kind=kind: ops.patched_experts(
                x, g, d, weights, chosen, "silu", numbers=kind.numbers, group=kind.group
            )
            for g, d in copies
        ]
        found[f"{kind.numbers}_us"] = round(graph_us(calls), 2)
    return found


def route(logits: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
    return ops.route(
        logits, None, per_token=per_token, sigmoid=False, normalized=True, scale=1.0, groups=1, groups_per_token=1
    )


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") / shape[-1] ** 0.5


if __name__ == "__main__":
    main()
