"""Offline use with workers in Ray actors."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from raylm import LLM, SamplingParams
from tests.support import checkpoints

pytestmark = pytest.mark.serve


STRUCTURED = """
import sys
from raylm import LLM, SamplingParams, StructuredOutput

if __name__ == "__main__":
    llm = LLM(sys.argv[1], tensor=2, num_threads=1, max_model_len=64, progress=False)
    forms = [StructuredOutput("regex", "[0-9]{3}-x"), StructuredOutput("choice", '["left", "right"]')]
    params = [SamplingParams(temperature=1.5, seed=3, max_tokens=20, structure=form) for form in forms]
    free = SamplingParams(temperature=1.5, seed=3, max_tokens=20, ignore_eos=True)
    for completion in llm.generate([[5, 7, 9]] * 3, [*params, free], progress=False)[:2]:
        print(completion.outputs[0].text, completion.outputs[0].finish_reason)
    llm.close()
"""


def test_two_workers_keep_to_grammars(tmp_path):
    folder = checkpoints.llama(tmp_path)
    script = tmp_path / "structured.py"
    script.write_text(STRUCTURED)
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    number, choice = done.stdout.splitlines()
    assert re.fullmatch("[0-9]{3}-x stop", number)
    assert choice in ("left stop", "right stop")


def test_two_workers_give_the_same_and_one_that_hangs_does_not_hold_up_close(tmp_path):
    folder = checkpoints.llama(tmp_path)
    llm = LLM(str(folder), progress=False)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = llm.generate([[5, 7, 9]], params, progress=False)[0].outputs[0].token_ids
    llm.close()
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hung_worker", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines() == [f"tokens: {' '.join(map(str, expected))}", "interrupted", "left:"]
