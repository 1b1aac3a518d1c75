"""Offline use with workers in Ray actors."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from raylm import LLM, SamplingParams
from tests.support import checkpoints

pytestmark = pytest.mark.serve


def test_two_workers_give_the_same_keep_to_grammars_and_one_that_hangs_does_not_hold_up_close(tmp_path):
    folder = checkpoints.llama(tmp_path)
    llm = LLM(str(folder), progress=False)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = llm.generate([[5, 7, 9]], params, progress=False)[0].outputs[0].token_ids
    llm.close()
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hung_worker", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
        check=True,
    )
    number, choice, *rest = done.stdout.splitlines()
    assert re.fullmatch("[0-9]{3}-x stop", number)
    assert choice in ("left stop", "right stop")
    assert rest == [f"tokens: {' '.join(map(str, expected))}", "interrupted", "left:"]
