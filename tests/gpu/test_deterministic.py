"""runtime.deterministic: logits that are equal bit for bit, alone and among 256 rows, a prompt whole and in chunks, a
token decoded and as part of a prompt; by the model's steps, and by the whole engine with its CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raylm import SamplingParams
from raylm.layers.attention_backends import Setting, choose_backend
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.decoder import DecoderModel
from raylm.models.load import load_model
from raylm.parallel.context import ParallelContext
from tests.gpu.answering import Answers, places
from tests.gpu.test_llm_on_cuda import load
from tests.support import checkpoints
from tests.support.alone import Alone, prompt_of

LENGTH = 300
NUM_BLOCKS = 3000
LARGE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
"""Sizes that kernels on tensor cores take; the checkpoints' own go to torch's products and the plain kernel."""
FAMILIES = ("llama", "qwen3", "gemma3", "ministral", "bloom", "olmo2", "mixtral", "qwen2_moe", "deepseek", "gpt_oss")
SIZES: dict[str, dict[str, int]] = {"small": {}, "large": LARGE, "heads of 64": {**LARGE, "head_dim": 64}}
LLM_SETTINGS = {
    "graphs": {},
    "eager": {"runtime": {"cuda_graphs": False}},
    "steps of 280 tokens": {"scheduler": {"max_num_batched_tokens": 280}},
    "steps of 24 tokens": {"scheduler": {"max_num_seqs": 24, "max_num_batched_tokens": 24}},
    "cache of fp8": {"cache": {"dtype": "fp8"}},
    "drafts": {"speculation": {"method": "ngram", "num_drafts": 3}},
}


def model_of(folder: Path, dtype: torch.dtype) -> DecoderModel:
    device = torch.device("cuda")
    source = locate(str(folder))
    arch = ArchConfig.from_source(source)
    setting = Setting(
        device, dtype, arch.head_dim, block_size=16, alibi=arch.alibi, sinks=arch.sinks, deterministic=True
    )
    attention, _ = choose_backend("auto", setting)
    context = ParallelContext.single(device, deterministic=True)
    return load_model(source, arch, context, dtype, "auto", attention=attention, progress=False)


def assert_equal_in_every_step(model: DecoderModel, length: int = LENGTH) -> None:
    alone = Alone(model, length, num_blocks=NUM_BLOCKS)
    expected = alone.whole()
    assert torch.isfinite(expected).all()
    for size in (1, 7, 17, 64, 129, 255):
        assert torch.equal(alone.in_chunks(size), expected), f"in chunks of {size}"
    for size in (length, 33):
        assert torch.equal(alone.in_chunks(size, others=255), expected), f"in chunks of {size} among 256 rows"
    for others in (0, 1, 15, 63, 255):
        found = alone.decoded(length - 20, others=others)
        assert torch.equal(found, expected), f"20 tokens decoded beside {others} others"


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_depend_on_the_rest_of_a_step(family: str, sizes: str, tmp_path: Path) -> None:
    changes = dict(SIZES[sizes])
    if family == "bloom" and changes:  # It has 4 heads.
        changes = {"hidden_size": 4 * changes["head_dim"]}
    folder = checkpoints.FAMILIES[family](tmp_path, **changes)
    assert_equal_in_every_step(model_of(folder, torch.bfloat16))


def test_so_they_do_in_float16(tmp_path: Path) -> None:
    assert_equal_in_every_step(model_of(checkpoints.llama(tmp_path, **LARGE), torch.float16))


def test_so_they_do_where_norms_of_many_rows_are_long(tmp_path: Path) -> None:
    """From 1,024 rows on, the norms' kernel has threads add other parts of a row of 4,096 columns."""
    changes = {**LARGE, "hidden_size": 4096, "num_hidden_layers": 2}
    assert_equal_in_every_step(model_of(checkpoints.llama(tmp_path, **changes), torch.bfloat16))


def test_so_they_do_in_a_prompt_of_many_tiles(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path, max_position_embeddings=4096, num_hidden_layers=2, **LARGE)
    alone = Alone(model_of(folder, torch.bfloat16), 3001, num_blocks=NUM_BLOCKS)
    expected = alone.whole()
    for size in (500, 1024, 2111):
        assert torch.equal(alone.in_chunks(size), expected), f"in chunks of {size}"
    assert torch.equal(alone.decoded(2990, others=7), expected)


def answers_of(folder: Path, prompts: list[list[int]], wishes: SamplingParams, name: str) -> Answers:
    """Of the first prompt, where all run together, in an engine with these settings."""
    sections = {part: dict(values) for part, values in LLM_SETTINGS[name].items()}
    sections["model"] = {"max_model_len": 512}
    sections["runtime"] = {"deterministic": True, **sections.get("runtime", {})}
    sections["cache"] = {"block_size": 16, "num_blocks": 6000, "prefix_caching": False, **sections.get("cache", {})}
    sections["scheduler"] = {"max_num_seqs": 256, **sections.get("scheduler", {})}
    llm = load(folder, dtype="bfloat16", **sections)
    for _ in range(2):  # Graphs are there from the second time on.
        completions = llm.generate(prompts, wishes, progress=False)
    llm.close()
    return places(completions[:1])


@pytest.mark.parametrize("name", LLM_SETTINGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_gives_the_same_log_probabilities(name: str, temperature: float, tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path, **LARGE)
    # A text that repeats itself, so that drafts are found in it.
    prompts = [(prompt_of(n, 40, checkpoints.VOCAB_SIZE) * 4)[: 160 - n % 100] for n in range(256)]
    wishes = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True, logprobs=5)
    reference = name if name == "cache of fp8" else "graphs"
    expected = answers_of(folder, prompts[:1], wishes, reference)
    assert answers_of(folder, prompts[:1], wishes, name) == expected
    assert answers_of(folder, prompts, wishes, name) == expected


def test_a_prefix_from_the_cache_is_the_prompt_computed_anew(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path, **LARGE)
    prompt = prompt_of(0, 200, checkpoints.VOCAB_SIZE)
    wishes = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
    llm = load(folder, dtype="bfloat16", model={"max_model_len": 512}, runtime={"deterministic": True})
    first, again = (places(llm.generate([prompt], wishes, progress=False)) for _ in range(2))
    assert llm.generate([prompt], wishes, progress=False)[0].num_cached_tokens > 0
    llm.close()
    assert again == first
