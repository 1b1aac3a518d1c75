"""An offline model whose worker hangs:

python -m tests.support.hung_worker FOLDER     interrupts the step, which would wait for ten minutes, closes the model
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

import psutil

from raylm import LLM, EngineConfig, SamplingParams


class Interrupted(Exception):
    """As by Ctrl-C."""


def main(folder: str) -> None:
    sections = {
        "model": {"path": folder},
        "parallel": {"tensor": 2},
        "cache": {"num_blocks": 64},
        "runtime": {"device": "cpu", "num_threads": 1, "step_timeout_s": 600},
    }
    llm = LLM(EngineConfig.model_validate(sections), progress=False)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    answer = llm.generate([[5, 7, 9]], params, progress=False)[0].outputs[0]
    print("tokens:", *answer.token_ids, flush=True)
    family = psutil.Process().children(recursive=True)
    workers = [process for process in family if "::WorkerActor" in process.cmdline()[0]]
    workers[0].send_signal(signal.SIGSTOP)
    signal.signal(signal.SIGALRM, _interrupt)
    signal.alarm(1)
    try:
        llm.generate([[5, 7, 9]], params, progress=False)
    except Interrupted:
        print("interrupted", flush=True)
    llm.close()
    _, alive = psutil.wait_procs(family, timeout=20)
    print("left:", *(process.cmdline()[0] for process in alive), flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


if __name__ == "__main__":
    main(sys.argv[1])
