"""What a newcomer's first question gets, from the demo model itself."""

from __future__ import annotations

import builtins

import pytest

from raylm import LLM, SamplingParams
from raylm.cli import main

pytestmark = pytest.mark.usefixtures("demo")
PARIS = "What is the capital of France?"


@pytest.mark.parametrize("seed", ["1", "3"])
def test_the_demo_answers_a_question(seed, monkeypatch, capsys):
    lines = iter([PARIS, "/exit"])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    words = ["chat", "smollm2-135m", "--device", "cpu", "--max-model-len", "256", "--max-tokens", "24"]
    assert main([*words, "--seed", seed]) == 0
    assert "Paris" in capsys.readouterr().out


def test_an_llm_samples_as_its_model_advises_unless_it_is_told(monkeypatch):
    llm = LLM("smollm2-135m", device="cpu", max_model_len=256, progress=False)
    try:
        assert llm.params(max_tokens=24, seed=3) == SamplingParams(0.2, 0.9, max_tokens=24, seed=3)
        assert llm.params(temperature=0) == SamplingParams(0, 0.9)
        asked = []
        add = llm._engine.add_checked
        monkeypatch.setattr(
            llm._engine,
            "add_checked",
            lambda ids, prompt, params, options: (
                asked.append(params),
                add(ids, prompt, params, options),
            ),
        )
        llm.chat([{"role": "user", "content": PARIS}], progress=False)
        llm.generate("Once", SamplingParams(max_tokens=2), progress=False)
        assert asked == [SamplingParams(0.2, 0.9, max_tokens=128), SamplingParams(1.0, 1.0, max_tokens=2)]
    finally:
        llm.close()
