"""What a step's tail takes: log probabilities, masks, biases, placing and accepting, beside torch's operators.

python -m tests.gpu.tail_times [ROWS ...]     on a CUDA host; prints one JSON line an operator and number of rows

Logits of 151,936 tokens in bf16, in a CUDA graph, that come from memory. `of_bandwidth` is one reading of the logits as
a share of what the memory gives to a large element-wise kernel, measured before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from raylm import ops
from raylm.ops import fallback
from tests.gpu.timing import Call, bandwidth, cold_copies, graph_us

ROWS = (1, 16, 64, 256)
VOCAB = 151_936
TOPS = (0, 1, 5, 20, 64)
BIASES = 300
MOST_COPIES = 256
"""Of one row they are more than the L2 cache holds."""


def cold(copies: list[Tensor], call: Callable[[Tensor], object]) -> list[Call]:
    """One call a copy of the logits."""

    def on(logits: Tensor) -> Call:
        def run() -> Tensor:
            call(logits)
            return logits

        return run

    return [on(logits) for logits in copies]


def over_logits(rows: int) -> dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], object]]]:
    """Name -> the operator and torch's version of it, each of the logits."""
    tokens = torch.randint(VOCAB, (rows,), device="cuda")
    some = torch.randint(VOCAB, (rows, 20), device="cuda")
    every = torch.arange(rows, device="cuda")
    # A grammar allows few tokens; half of them is the worst case.
    few, half = (torch.zeros(rows, VOCAB // 32, dtype=torch.int32, device="cuda") for _ in range(2))
    few[:, ::100], half[:] = 1, 0x55555555
    ids = torch.stack([torch.randperm(VOCAB, device="cuda")[:BIASES] for _ in range(rows)]).int()
    values, counts = torch.randn(rows, BIASES, device="cuda"), torch.full((rows,), BIASES, device="cuda").int()
    pairs = {
        f"token_logprobs {n}": (
            lambda x, n=n: ops.token_logprobs(x, tokens, n),
            lambda x, n=n: fallback.token_logprobs(x, tokens, n),
        )
        for n in TOPS
    }
    pairs["gather_logprobs 20"] = (lambda x: ops.gather_logprobs(x, some), lambda x: fallback.gather_logprobs(x, some))
    for name, mask in (("few", few), ("half", half)):
        pairs[f"mask_logits {name}"] = (
            lambda x, mask=mask: ops.mask_logits(x, mask, every),
            lambda x, mask=mask: fallback.mask_logits(x, mask, every),
        )
    pairs["bias_logits"] = (
        lambda x: ops.bias_logits(x, every, ids, values, counts),
        lambda x: fallback.bias_logits(x, every, ids, values, counts),
    )
    return pairs


def tables(rows: int) -> dict[str, tuple[Call, Call]]:
    """The same of what reads tables: a step in which each row has two drafts."""
    num_known = torch.full((rows + 1,), 1000, device="cuda")
    token_ids = torch.zeros(rows + 1, 8192, dtype=torch.int32, device="cuda")
    blocks = torch.zeros(1, rows + 1, 512, dtype=torch.int32, device="cuda")
    each = torch.arange(rows, device="cuda")
    starts = torch.arange(0, 3 * rows + 1, 3, device="cuda").int()
    offsets, sampled = torch.arange(3, device="cuda").repeat(rows), torch.ones(3 * rows, device="cuda").long()
    place = (num_known, token_ids, blocks, each.repeat_interleave(3), offsets, each, starts, 16)
    accept = (token_ids, num_known, num_known.clone(), each, starts, starts, sampled)
    return {
        "place": (lambda: ops.place(*place)[0], lambda: fallback.place(*place)[0]),
        "accept": (lambda: ops.accept(*accept), lambda: fallback.accept(*accept)),
    }


def main() -> None:
    most = bandwidth()
    print(json.dumps({"bench": "bandwidth", "tb_per_s": round(most / 1e6, 3)}), flush=True)
    for rows in [int(rows) for rows in sys.argv[1:]] or ROWS:
        size = 2 * rows * VOCAB
        logits = torch.randn(rows, VOCAB, dtype=torch.bfloat16, device="cuda") * 4
        copies = [logits.clone() for _ in range(min(cold_copies(size), MOST_COPIES))]
        for name, pair in over_logits(rows).items():
            us, torch_us = (graph_us(cold(copies, call)) for call in pair)
            line = {"bench": "tail", "name": name, "rows": rows, "us": round(us, 2), "torch_us": round(torch_us, 1)}
            print(json.dumps({**line, "of_bandwidth": round(size / us / most, 3)}), flush=True)
            for copy in copies:
                copy.copy_(logits)
        for name, calls in tables(rows).items():
            us, torch_us = (graph_us([call]) for call in calls)
            line = {"bench": "tail", "name": name, "rows": rows, "us": round(us, 2), "torch_us": round(torch_us, 1)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
