"""Structured output on a GPU: texts meet their grammars beside plain rows, with what grammars force drafted or not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from raylm import LLM, EngineConfig, SamplingParams, StructuredOutput
from tests.support import checkpoints

PROMPTS = [[5, 6, 7], list(range(10, 31)), [9], [5, 6, 7, 8]]
PATTERN = "[a-c]{3}, which is always said here: [0-9]{2,4}"


@pytest.mark.parametrize("method", ["none", "grammar", "ngram"])
def test_texts_meet_their_grammars(method: str, tmp_path: Path) -> None:
    config = {
        "model": {"path": str(checkpoints.llama(tmp_path)), "max_model_len": 128, "dtype": "float32"},
        "cache": {"block_size": 16, "num_blocks": 200},
        "scheduler": {"max_num_seqs": 8},
        "speculation": {"method": method},
        "runtime": {"device": "cuda"},
    }
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    bound = SamplingParams(temperature=1.0, seed=4, max_tokens=80, structure=StructuredOutput("regex", PATTERN))
    llm = LLM(EngineConfig.model_validate(config), progress=False)
    try:
        alone = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, free, progress=False)]
        for _ in range(3):  # Graphs are there from the second time on.
            found = llm.generate(PROMPTS * 2, [free] * 4 + [bound] * 4, progress=False)
            assert [completion.outputs[0].token_ids for completion in found[:4]] == alone
            for completion in found[4:]:
                (output,) = completion.outputs
                assert output.finish_reason == "stop" and re.fullmatch(PATTERN, output.text), output
        assert (llm._engine.stats().drafts.num_accepted_tokens > 0) == (method != "none")
    finally:
        llm.close()
