"""What a step costs the host of a CUDA device: the time in which its work is queued, before the device has done it.

python -m tests.gpu.submit_times FOLDER [ROWS]      prints one JSON line a kind of step

FOLDER has a model's config.json; its weights are random. ROWS requests decode, and with every fourth step one of them
ends and another one of PROMPT tokens begins: a mixed step.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

from raylm.config.engine import EngineConfig, ModelConfig, SchedulerConfig
from raylm.core.sampling import SamplingParams
from raylm.core.step import StepPlan
from raylm.engine.factory import local_engine
from raylm.executor.local import LocalExecutor

PROMPT = 512
STEPS = 4
CYCLES = 60
MAX_LEN = 8192


def main(folder: Path, rows: int) -> None:
    limits = SchedulerConfig(max_num_seqs=512, max_num_batched_tokens=8192)
    model = ModelConfig(path=str(folder), load_format="dummy", max_model_len=MAX_LEN)
    engine = local_engine(EngineConfig(model=model, scheduler=limits), progress=False)
    times: defaultdict[str, list[float]] = defaultdict(list)
    submit = LocalExecutor.submit

    def timed(executor: LocalExecutor, plan: StepPlan) -> None:
        begin = time.perf_counter()
        submit(executor, plan)
        times["mixed" if plan.new_rows else "decode"].append(time.perf_counter() - begin)

    LocalExecutor.submit = timed  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, ignore_eos=True)
    draw = random.Random(0)
    names = iter(range(10**6))
    live: list[str] = []

    def add() -> None:
        live.append(str(next(names)))
        engine.add([live[-1]], [draw.randrange(engine.info.vocab_size) for _ in range(PROMPT)], params)

    for _ in range(rows):
        add()
    seconds = 0.0
    for cycle in range(2 * CYCLES):
        if cycle == CYCLES:  # Every shape has come by now.
            times.clear()
            seconds = time.perf_counter()
        add()
        engine.abort(live.pop(0))
        for _ in range(STEPS):
            engine.step()
    seconds = time.perf_counter() - seconds
    for kind, found in times.items():
        us = round(1e6 * statistics.median(found))
        print(json.dumps({"model": folder.name, "step": kind, "rows": rows, "submit_us": us}))
    print(json.dumps({"model": folder.name, "rows": rows, "ms_per_four_steps": round(1e3 * seconds / CYCLES, 2)}))
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40)
