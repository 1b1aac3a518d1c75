"""An offline model with two workers in Ray actors, one of which hangs in the end:

python -m tests.support.hung_worker FOLDER     answers with and without grammars, interrupts the step, which would wait
                                               for ten minutes, closes the model
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

import psutil

from raylm import LLM, EngineConfig, SamplingParams, StructuredOutput


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
    forms = [StructuredOutput("regex", "[0-9]{3}-x"), StructuredOutput("choice", '["left", "right"]')]
    shaped = [SamplingParams(temperature=1.5, seed=3, max_tokens=20, structure=form) for form in forms]
    free = SamplingParams(temperature=1.5, seed=3, max_tokens=20, ignore_eos=True)
    for completion in llm.generate([[5, 7, 9]] * 3, [*shaped, free], progress=False)[:2]:
        print(completion.outputs[0].text, completion.outputs[0].finish_reason)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    answer = llm.generate([[5, 7, 9]], params, progress=False)[0].outputs[0]
    print("tokens:", *answer.token_ids, flush=True)
    family = psutil.Process().children(recursive=True)
    workers = [process for process in family if "::WorkerActor" in process.cmdline()[0]]
    workers[0].send_signal(signal.SIGSTOP)
    signal.signal(signal.SIGALRM, _interrupt)
    try:
        signal.alarm(1)
        llm.generate([[5, 7, 9]], params, progress=False)
    except Interrupted:
        print("interrupted", flush=True)
    llm.close()
    _, alive = psutil.wait_procs(family, timeout=120)
    print("left:", *(process.cmdline()[0] for process in alive), flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


if __name__ == "__main__":
    main(sys.argv[1])
