"""A model gives the same tokens whatever its attention runs on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raylm import LLM, EngineConfig, SamplingParams
from raylm.errors import ConfigError
from raylm.ops import extension, fallback
from tests.support import checkpoints
from tests.support.greedy import assert_greedy, random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.gemma3(tmp_path_factory.mktemp("gemma3"))


def load(folder: Path, attention: str) -> LLM:
    return LLM(
        EngineConfig.model_validate(
            {
                "model": {"path": str(folder), "max_model_len": 64},
                "cache": {"block_size": 4, "num_blocks": 100},
                "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
                "runtime": {"device": "cpu", "attention": attention},
            }
        ),
        progress=False,
    )


def counted(function: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    def call(*given: object, **named: object) -> Any:
        calls[name] += 1
        return function(*given, **named)

    return call


@pytest.mark.parametrize("attention", ["raylm", "torch"])
def test_each_backend_gives_transformers_tokens(attention: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if attention == "raylm" and "paged_attention" not in extension.load().ops.get("cpu", ()):
        pytest.skip(str(extension.load()))
    calls: Counter[str] = Counter()
    for name in ("attention_lengths", "attend_paged"):
        monkeypatch.setattr(fallback, name, counted(getattr(fallback, name), name, calls))
    llm = load(folder, attention)
    prompts = random_prompts(6, llm.info.vocab_size)
    reference = checkpoints.reference(folder)
    for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY, progress=False), strict=True):
        assert len(completion.outputs[0].token_ids) == 16
        assert_greedy(reference, prompt, completion.outputs[0].token_ids)
    num_groups = len(llm.info.layout.windows)
    llm.close()
    assert bool(calls) == (attention == "torch")
    # Once a step and group, not once a layer.
    num_layers = reference.config.num_hidden_layers
    assert calls["attention_lengths"] * num_layers == calls["attend_paged"] * num_groups and num_groups < num_layers


def test_a_backend_of_another_device_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="runtime.attention 'flash_attn' was asked for, but it runs on CUDA only"):
        load(folder, "flash_attn")
