"""CPU time of a decode step's layers, one operator after another and all in one, in turns.

taskset -c 0 python -m tests.models.decode_times --rows 1,4,16,64,200
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from raylm.layers.attention import AttentionMetadata, LayerInput
from raylm.model_files.source import locate
from raylm.models.decoder import DecoderModel
from tests.models.paged import load

_BLOCK_SIZE = 16
_CONTEXT = 96
_TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--steps", type=int, default=20, help="of each way and turn")
    parser.add_argument("--decoded", action="store_true", help="weights in float32, not as stored")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load(locate(args.model).path, as_stored=not args.decoded)
    for rows in map(int, args.rows.split(",")):
        apart, together = times(model, rows, args.steps)
        print(f"{rows:4} rows: apart {said(apart)}, in one operator {said(together)}")


@torch.inference_mode()
def times(model: DecoderModel, rows: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step."""
    tokens, step = torch.arange(100, 100 + rows), inputs(model, rows)
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(_TURNS):
        for together in (False, True):
            model.runs_layers_together = together
            for _ in range(steps):
                begin = time.process_time()
                model(tokens, step)
                found[together].append(time.process_time() - begin)
    return found


def inputs(model: DecoderModel, rows: int) -> list[LayerInput]:
    """A token of each of so many sequences, with random keys and values before it."""
    arch, columns = model.arch, _CONTEXT // _BLOCK_SIZE
    shape = (rows * columns, _BLOCK_SIZE, arch.num_kv_heads, arch.head_dim)
    table = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    lens = torch.full((rows,), _CONTEXT, dtype=torch.int32)
    slots = table[:, -1].long() * _BLOCK_SIZE + _BLOCK_SIZE - 1
    meta = AttentionMetadata(torch.arange(rows + 1, dtype=torch.int32), lens, table, slots, 1, _CONTEXT)
    caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(arch.num_layers)]
    return [LayerInput(lens.long() - 1, cache, meta) for cache in caches]


def said(seconds: list[float]) -> str:
    return f"{min(seconds) * 1e3:.1f} ms at least, {statistics.median(seconds) * 1e3:.1f} in the median"


if __name__ == "__main__":
    main()
