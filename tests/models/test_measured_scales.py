"""Scales of an FP8 KV cache that are measured at the start."""

from __future__ import annotations

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.attention import CacheScales
from raylm.models.decoder import DecoderModel
from raylm.models.measured_scales import calibration_text
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, PagedRun, generate, load
from tests.models.test_cache_scales import LAYER, checkpoint
from tests.support import checkpoints
from tests.support.huge_keys import changed, with_huge_keys
from tests.support.quantised import FILE
from tests.support.threaded_ranks import ThreadedRanks

PROMPTS = {"a": [3, 5, 7, 9, 4, 120, 77], "b": [8, 1]}
FAMILIES = ["llama", "qwen2", "gemma3", "mistral", "bloom", "gpt2", "gpt_oss", "cohere", "olmo2"]
"""Rotary and other positions, biases, windows, norms of heads, sinks; all places of norms."""


def largest(model: DecoderModel) -> list[tuple[float, float]]:
    """Each layer's largest key and value of the text that is measured, in a cache of numbers."""
    run = PagedRun(model, block_size=16, num_blocks=64)
    run.step({str(number): sequence for number, sequence in enumerate(calibration_text(model.arch))})
    return [tuple(float(part.nan_to_num().abs().max()) for part in cache) for cache in run.caches]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def measured(path: Path, **how: object) -> DecoderModel:
    return load(path, cache_codes=True, measure_cache=True, **how)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scale_is_a_power_of_two_with_room_above_the_largest(family: str, tmp_path: Path) -> None:
    path = checkpoints.FAMILIES[family](tmp_path)
    model, plain = measured(path), load(path)
    assert sorted(model.cache_scales) == list(range(model.arch.num_layers))
    for scales, magnitudes in zip(model.cache_scales.values(), largest(plain), strict=True):
        for scale, magnitude in zip(scales, magnitudes, strict=True):
            assert math.frexp(scale)[0] == 0.5
            assert 448 / 8 < magnitude / scale <= 448 / 4
    texts, logits = generate(PagedRun(model, dtype=ops.CODES), PROMPTS, num_tokens=4)
    _, expected = generate(PagedRun(plain), {name: text[:-1] for name, text in texts.items()}, num_tokens=1)
    for name, row in expected.items():
        # A mixture chooses other experts where two are near each other.
        assert distance(logits[name], row) < (0.1 if family != "gpt_oss" else 1.0)


def test_layers_of_transformers_are_measured_too(tmp_path: Path) -> None:
    path = checkpoints.gemma3(tmp_path)
    models = [measured(path, implementation=name) for name in ("raylm", "transformers")]
    assert models[0].cache_scales == models[1].cache_scales
    runs = [generate(PagedRun(model, dtype=ops.CODES), PROMPTS, num_tokens=4)[0] for model in models]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("bias", [False, True], ids=["weights", "biases"])
def test_huge_keys_and_values(bias: bool, tmp_path: Path) -> None:
    path = checkpoints.qwen2(tmp_path / "plain") if bias else checkpoints.llama(tmp_path / "plain")
    if bias:  # of 3,072 in the huge one
        tensors = load_file(path / FILE)
        for key in tensors:
            if key.endswith("k_proj.bias"):
                tensors[key] = torch.full_like(tensors[key], 0.75)
        save_file(tensors, path / FILE, metadata={"format": "pt"})
    huge = with_huge_keys(path, tmp_path / "huge")
    assert min(min(magnitudes) for magnitudes in largest(load(huge))) > 1000
    expected_texts, expected = generate(PagedRun(load(huge)), PROMPTS, num_tokens=4)

    scaled = generate(PagedRun(measured(huge), dtype=ops.CODES), PROMPTS, num_tokens=4)
    clamped_texts, clamped = generate(PagedRun(load(huge, cache_codes=True), dtype=ops.CODES), PROMPTS, num_tokens=4)
    small = generate(PagedRun(measured(path), dtype=ops.CODES), PROMPTS, num_tokens=4)
    assert scaled[0] == small[0]
    for name, row in expected.items():
        assert torch.equal(scaled[1][name], small[1][name]), "the same codes"
        first = len(PROMPTS[name])  # texts may part behind the prompt
        wrong, right = (distance(found[name][:first], row[:first]) for found in (clamped, scaled[1]))
        assert right < 0.1 and wrong > 4 * right
    assert scaled[0] == expected_texts
    assert clamped_texts != expected_texts


def test_scales_of_the_checkpoint_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint(tmp_path, {LAYER + "self_attn.k_scale": torch.tensor(0.5)})
    with caplog.at_level(logging.INFO, logger="raylm"):
        found = measured(path).cache_scales
    assert found[1] == CacheScales(0.5, 1.0)
    expected = measured(tmp_path / "plain").cache_scales[0]
    assert found[0] == expected
    assert "KV cache: fp8, with the checkpoint's scales in 1 of 2 layers; these are not measured" in caplog.messages
    ends = f"from {min(expected):g} to {max(expected):g}"
    assert f"KV cache: fp8, with measured scales in 1 of 2 layers, {ends}" in caplog.messages


def test_nothing_is_measured_where_the_checkpoint_has_all_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"model.layers.{layer}.self_attn.kv_scale" for layer in range(2)]
    path = checkpoint(tmp_path, {name: torch.tensor(0.5) for name in names})
    runs: list[DecoderModel] = []
    forward = DecoderModel.forward
    monkeypatch.setattr(DecoderModel, "forward", lambda self, *given: runs.append(self) or forward(self, *given))
    assert measured(path).cache_scales == dict.fromkeys(range(2), CacheScales(0.5, 0.5)) and not runs
    measured(tmp_path / "plain")
    assert len(runs) == 1


def test_dummy_weights_are_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoints.llama(tmp_path)
    with caplog.at_level(logging.INFO, logger="raylm"):
        found = measured(path, load_format="dummy").cache_scales
    assert len(found) == 3 and found != measured(path).cache_scales
    assert not any("with scales of 1" in message for message in caplog.messages)


def test_what_is_all_zero_has_a_scale_of_one(tmp_path: Path) -> None:
    path = changed(checkpoints.llama(tmp_path / "plain"), tmp_path / "zero", v_proj=0.0)
    scales = measured(path).cache_scales
    assert all(of_layer.values == 1.0 and of_layer.keys < 1.0 for of_layer in scales.values())


def test_tiny_keys_have_a_scale_that_can_be_divided_by(tmp_path: Path) -> None:
    path = changed(checkpoints.llama(tmp_path / "plain"), tmp_path / "tiny", k_proj=2.0**-100)
    assert {of_layer.keys for of_layer in measured(path).cache_scales.values()} == {2.0**-64}


@pytest.mark.parametrize(("factor", "value"), [(math.inf, "(inf|nan)"), (math.nan, "nan")], ids=str)
def test_keys_that_are_no_numbers_end_the_start(factor: float, value: str, tmp_path: Path) -> None:
    path = changed(checkpoints.llama(tmp_path / "plain"), tmp_path / "broken", k_proj=factor)
    with pytest.raises(ConfigError, match=rf"layer 0 has keys that are no finite numbers \({value}\).*allowed"):
        measured(path)


@pytest.mark.parametrize("changes", [{}, {"max_position_embeddings": 40}, {"bos_token_id": None}], ids=str)
def test_the_text(changes: dict[str, int | None], tmp_path: Path) -> None:
    model = load(checkpoints.llama(tmp_path, **changes))
    text = calibration_text(model.arch)
    length = changes.get("max_position_embeddings") or 128
    assert [len(sequence) for sequence in text] == [length] * 8
    tokens = [token for sequence in text for token in sequence]
    assert min(tokens) >= 0 and max(tokens) < checkpoints.VOCAB_SIZE
    seen = len(set(tokens)) / checkpoints.VOCAB_SIZE
    assert seen > (0.95 if length == 128 else 0.6)
    begins = model.arch.bos_token_id is not None
    assert all((sequence[0] == checkpoints.BOS) == begins for sequence in text[1:])
    measured(tmp_path)


def two_ranks(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[DecoderModel]:
    ranks = ThreadedRanks(2)
    monkeypatch.setattr(collectives, "all_reduce", ranks.all_reduce)
    monkeypatch.setattr(collectives, "_parts", lambda x, context: torch.stack(ranks.exchange(x, context)))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: measured(path, context=ParallelContext(rank, rank, 2, 0, 1, CPU)), range(2)))


def test_tensor_ranks_have_equal_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the keys of one rank's head are much larger than those of the other's."""
    path = checkpoints.llama(tmp_path)
    tensors = load_file(path / FILE)
    for key in tensors:
        if key.endswith("k_proj.weight"):
            tensors[key][:16] *= 256
        if key.endswith("v_proj.weight"):
            tensors[key][16:] *= 256
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    alone = measured(path).cache_scales
    assert [model.cache_scales for model in two_ranks(path, monkeypatch)] == [alone, alone]


class Links:
    """Hands the first stage's hidden states to the second, in one process."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None

    def send_hidden(self, hidden: Tensor) -> None:
        self.hidden = hidden

    def receive_hidden(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        assert self.hidden is not None and (self.hidden.shape, self.hidden.dtype) == ((num_tokens, hidden_size), dtype)
        return self.hidden


def test_stages_measure_their_own_layers(tmp_path: Path) -> None:
    path = checkpoints.llama(tmp_path)
    whole = ParallelContext.single(CPU)
    links = Links()
    stages = [replace(whole, rank=rank, pipeline_rank=rank, pipeline_size=2, links=links) for rank in range(2)]
    found = [measured(path, context=stage).cache_scales for stage in stages]
    assert found[0].keys() | found[1].keys() == {0, 1, 2} and not found[0].keys() & found[1].keys()
    assert {**found[0], **found[1]} == measured(path).cache_scales


def test_every_start_measures_the_same(tmp_path: Path) -> None:
    path = checkpoints.llama(tmp_path)
    first, second = (measured(path, quantise=True) for _ in range(2))
    assert first.cache_scales == second.cache_scales
