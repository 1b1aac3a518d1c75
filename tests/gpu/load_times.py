"""How fast a checkpoint's weights come to the device, and how fast the disk gives the same bytes to as many threads.

python -m tests.gpu.load_times FOLDER [SHAPE] [DEVICE]      prints one JSON line a case

FOLDER is on a local disk. The checkpoint of SHAPE (llama-3.1-8b, 16 GB) is written into it unless it is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.filling import MAX_THREADS
from raylm.models.load import load_model
from raylm.parallel.context import ParallelContext
from tests.gpu.from_peer_times import forget, write_checkpoint

RUNS = 3
PIECE = 8 << 20
STRETCH = 64 << 20
"""What a thread reads before it takes another part of the files."""


def read(folder: Path, device: torch.device) -> None:
    """Read the files, and nothing else."""

    def stretch(path: Path, start: int) -> None:
        buffer = bytearray(PIECE)
        with path.open("rb", buffering=0) as file:
            for offset in range(start, start + STRETCH, PIECE):
                os.preadv(file.fileno(), [buffer], offset)

    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        parts = [
            pool.submit(stretch, path, start)
            for path in sorted(folder.glob("*.safetensors"))
            for start in range(0, path.stat().st_size, STRETCH)
        ]
        for part in parts:
            part.result()


def load(folder: Path, device: torch.device) -> None:
    source = locate(str(folder))
    arch = ArchConfig.from_source(source)
    load_model(source, arch, ParallelContext.single(device), torch.bfloat16, "safetensors", progress=False)
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(folder: Path, shape: str, device: torch.device) -> None:
    size = write_checkpoint(folder, shape)
    for case in ("not cached", "cached"):
        for run in range(RUNS):
            for what, does in (("files read", read), ("model loaded", load)):
                if case == "not cached":
                    forget(folder)
                began = time.perf_counter()
                does(folder, device)
                seconds = time.perf_counter() - began
                result = {"bench": "load", "model": shape, "case": f"{what}, {case}", "run": run}
                print(json.dumps(result | {"seconds": round(seconds, 3), "gb_s": round(size / 1e9 / seconds, 2)}))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0]), given[1] if given[1:] else "llama-3.1-8b", torch.device(given[2] if given[2:] else "cuda"))
