"""What a step costs the host of a CUDA device: the time in which its work is queued, before the device has done it.

python -m tests.gpu.submit_times FOLDER [ROWS]      prints one JSON line a kind of step

FOLDER has a model's config.json; its weights are random. ROWS requests decode, and with every fourth step one of them
ends and another one of PROMPT tokens begins: a mixed step.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

from raylm.config.engine import EngineConfig, ModelConfig, SchedulerConfig
from raylm.config.resolve import ResolvedEngine, resolve
from raylm.core.sampling import SamplingParams
from raylm.core.step import StepPlan
from raylm.engine.engine import Engine
from raylm.executor.local import LocalExecutor, local_device

PROMPT = 512
STEPS = 4
CYCLES = 60
MAX_LEN = 8192


class TimedExecutor(LocalExecutor):
    """Notes how long each plan takes to submit, in seconds by kind of step."""

    def __init__(self, config: ResolvedEngine) -> None:
        super().__init__(config, progress=False)
        self.times: defaultdict[str, list[float]] = defaultdict(list)

    def submit(self, plan: StepPlan) -> None:
        begin = time.perf_counter()
        super().submit(plan)
        self.times["mixed" if plan.new_rows else "decode"].append(time.perf_counter() - begin)


def main(folder: Path, rows: int) -> None:
    limits = SchedulerConfig(max_num_seqs=512, max_num_batched_tokens=8192)
    model = ModelConfig(path=str(folder), load_format="dummy", max_model_len=MAX_LEN)
    config = EngineConfig(model=model, scheduler=limits)
    resolved = resolve(config, local_device(config))
    executor = TimedExecutor(resolved)
    engine = Engine(resolved, executor, plans_in_flight=2)
    params = SamplingParams(temperature=0, ignore_eos=True)
    draw = random.Random(0)
    names = itertools.count()
    live: list[str] = []

    def add() -> None:
        live.append(str(next(names)))
        engine.add([live[-1]], [draw.randrange(engine.info.vocab_size) for _ in range(PROMPT)], params)

    for _ in range(rows):
        add()
    seconds = 0.0
    for cycle in range(2 * CYCLES):
        if cycle == CYCLES:  # Every shape has come by now.
            executor.times.clear()
            seconds = time.perf_counter()
        add()
        engine.abort(live.pop(0))
        for _ in range(STEPS):
            engine.step()
    seconds = time.perf_counter() - seconds
    for kind, found in executor.times.items():
        us = round(1e6 * statistics.median(found))
        print(json.dumps({"model": folder.name, "step": kind, "rows": rows, "submit_us": us}))
    print(json.dumps({"model": folder.name, "rows": rows, "ms_per_four_steps": round(1e3 * seconds / CYCLES, 2)}))
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40)
