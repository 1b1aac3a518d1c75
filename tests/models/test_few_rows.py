"""Steps of few rows through one operator for all layers: the same tokens, and only where it may be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from raylm import ops
from raylm.models.decoder import DecoderModel
from raylm.models.few_rows import why_not
from raylm.models.taps import HiddenTaps
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, PagedRun, generate, load
from tests.support import checkpoints

PROMPTS = {"a": list(range(19)), "b": [3, 4, 5]}


@pytest.fixture
def few_layers(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """As if the operator had a kernel here: torch's version of it, with its calls counted."""
    calls = Mock(wraps=ops.few_layers)
    monkeypatch.setattr(ops, "few_layers_rows", lambda *_, **__: ops.FEW_ROWS)
    monkeypatch.setattr(ops, "few_layers", calls)
    return calls


def tokens_of(model: DecoderModel) -> dict[str, list[int]]:
    return generate(PagedRun(model, block_size=16), PROMPTS, num_tokens=4)[0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_same_tokens(family: str, few_layers: Mock, tmp_path: Path) -> None:
    folder = checkpoints.FAMILIES[family](tmp_path)
    apart, together = load(folder), load(folder)
    apart.runs_layers_together = False
    expected = tokens_of(apart)
    assert not few_layers.called
    assert tokens_of(together) == expected
    assert few_layers.called


@pytest.mark.parametrize("family", ["gemma3", "bloom", "mistral"])
def test_families_that_it_does_not_take(family: str, few_layers: Mock, tmp_path: Path) -> None:
    model = load(checkpoints.FAMILIES[family](tmp_path))
    tokens_of(model)
    assert not few_layers.called


def test_taps_between_layers_keep_them_apart(few_layers: Mock, tmp_path: Path) -> None:
    model = load(checkpoints.llama(tmp_path))
    HiddenTaps(model, [model.arch.num_layers], max_tokens=20)
    assert model.runs_layers_together
    HiddenTaps(model, [1], max_tokens=20)
    tokens_of(model)
    assert not few_layers.called


def test_why_not(tmp_path: Path) -> None:
    model = load(checkpoints.llama(tmp_path))
    arch, single = model.arch, ParallelContext.single(CPU)
    assert why_not(arch, single, 32) is None
    assert why_not(arch, single, 24) == "cache.block_size is 24; allowed: powers of two from 16 on"
    for split in (ParallelContext(0, 0, 2, 0, 1, CPU), ParallelContext(0, 0, 1, 0, 2, CPU)):
        assert why_not(arch, split, 16) == "the model is split over GPUs"
    assert why_not(replace(arch, sinks=True), single, 16) == "its attention has no sinks"
    first, *others = arch.layers
    nope = replace(first, rope=None)
    assert why_not(replace(arch, layers=(nope, *others)), single, 16) == "layers differ"
    assert "rotates all" in str(why_not(replace(arch, layers=(nope,)), single, 16))
