"""Checkpoints with the fields and the tensors' names of released ones load, and give what transformers gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from tests.models.paged import PagedRun, generate, load
from tests.models.test_families import assert_same
from tests.support import checkpoints, released_mixtures, released_models, released_newer

RELEASED = {**released_models.RELEASED, **released_newer.RELEASED, **released_mixtures.RELEASED}
PROMPTS = {"a": [5, 9, 3, 7, 1, 2, 8], "b": [3, 4, 6]}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_checkpoint(name: str, tmp_path: Path) -> None:
    released = RELEASED[name]
    folder = released.write(tmp_path / "model")
    texts, logits = generate(PagedRun(load(folder)), PROMPTS, num_tokens=4)
    assert all(torch.isfinite(found).all() for found in logits.values())
    if released.in_transformers:
        assert_same(texts, logits, checkpoints.reference(folder))


def test_the_first_falcon_40b_is_the_later_one(tmp_path: Path) -> None:
    names = ("tiiuae/falcon-40b as it was first", "tiiuae/falcon-40b")
    first, later = (ArchConfig.from_source(locate(str(RELEASED[name].write(tmp_path / name)))) for name in names)
    assert first.architecture == "RWForCausalLM"
    assert replace(first, architecture=later.architecture) == later
