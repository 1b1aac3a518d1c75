"""Offline use with workers in Ray actors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import checkpoints
import pytest

from raylm import LLM, SamplingParams

pytestmark = pytest.mark.serve
SCRIPT = Path(__file__).parents[1] / "hung_worker.py"


def test_two_workers_give_the_same_and_one_that_hangs_does_not_hold_up_close(tmp_path):
    folder = checkpoints.llama(tmp_path)
    llm = LLM(str(folder), progress=False)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = llm.generate([[5, 7, 9]], params, progress=False)[0].outputs[0].token_ids
    llm.close()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == [f"tokens: {' '.join(map(str, expected))}", "interrupted", "left:"]
