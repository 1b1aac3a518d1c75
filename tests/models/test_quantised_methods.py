"""Every quantisation of checkpoints, against twins that are decoded number by number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, load
from tests.support import checkpoints, torchao
from tests.support.quantised import KINDS, write_both

ALL = KINDS | torchao.KINDS


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llama(tmp_path_factory.mktemp("plain"), num_hidden_layers=1)


@pytest.mark.parametrize("kind", ALL)
def test_weights_are_those_of_the_decoded_twin(plain: Path, tmp_path: Path, kind: str) -> None:
    """Whole, and each rank's share: of 96 columns 48, in the middle of a group of 32. To the last bit or two of
    float32: programs multiply in other orders."""
    packed, twin = write_both(plain, tmp_path, ALL[kind])
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        context = ParallelContext(rank, rank, size, 0, 1, CPU)
        found, expected = (dict(load(folder, context=context).named_parameters()) for folder in (packed, twin))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=3e-7, atol=0, msg=lambda text, n=name: f"{n}: {text}")
