"""What weights of 8 bits cost in perplexity, beside the same model's numbers: the figures of docs/performance.md."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from raylm import ops
from raylm.layers.slots import INT8_ROWS
from raylm.layers.weight import PatchedWeight, ScaledWeight
from raylm.model_files.source import locate
from raylm.models.convert import convert
from raylm.text.tokenizer import Tokenizer
from tests.check_layers import ROOT
from tests.models.paged import PagedRun, load
from tests.support import checkpoints
from tests.support.asked import DEMO

PIECE, NUM_PIECES, BLOCK = 256, 4, 16
TEXTS = ("docs/reliability.md", "docs/scheduling.md", "docs/deploy.md", "docs/models.md")
MOST_INT8, MOST_ROUNDED = 0.01, 0.05
"""Of perplexity, relative: of weights alone, and of activations too, which cost a model so small more than 1 %."""
MOST_APART = 0.01
"""Of the perplexity as raylm computes it and as torch does: sums in another order round to other codes."""

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("demo"), pytest.mark.timeout(900)]
Logits = Callable[[list[int]], Tensor]
"""Of all tokens of a piece: [num_tokens, vocab_size]."""


class RoundedLinear(nn.Module):
    """A linear layer in 8 bits, said in torch: weights with a scale a row, inputs with a scale a token."""

    def __init__(self, linear: nn.Linear, rounded: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.rounded = rounded(linear.weight), rounded

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.rounded(x), self.weight)


def to_fp8(x: Tensor) -> Tensor:
    """Each row's numbers to the nearest of e4m3, of which the largest is 448."""
    scale = _scale(x, 448)
    return (x.detach() / scale).to(torch.float8_e4m3fn).float() * scale


def to_int8(x: Tensor) -> Tensor:
    """The same of integers up to 127."""
    scale = _scale(x, 127)
    return (x.detach() / scale).round() * scale


def _scale(x: Tensor, largest: int) -> Tensor:
    return x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, demo: None) -> Path:
    """SmolLM2-135M's decoded weights as safetensors."""
    path = tmp_path_factory.mktemp("smollm2") / "plain"
    checkpoints.smollm2_reference().save_pretrained(path)
    return path


def of_raylm(path: Path, *, quantise: bool = False, as_stored: bool = False) -> Logits:
    model = load(path, quantise=quantise, as_stored=as_stored)
    assert any(isinstance(part, ScaledWeight) for part in model.modules()) == quantise
    assert any(isinstance(part, PatchedWeight) and part.form == INT8_ROWS for part in model.modules()) == as_stored
    return lambda piece: PagedRun(model, block_size=BLOCK, num_blocks=PIECE // BLOCK).step({"piece": piece})["piece"]


def of_torch(rounded: Callable[[Tensor], Tensor]) -> Logits:
    """Every linear layer within the layers in 8 bits, in transformers' model."""
    model = copy.deepcopy(checkpoints.smollm2_reference())
    linears = [name for name, part in model.model.named_modules() if isinstance(part, nn.Linear)]
    assert len(linears) == 7 * model.config.num_hidden_layers
    for name in linears:
        model.model.set_submodule(name, RoundedLinear(model.model.get_submodule(name), rounded))

    def logits(piece: list[int]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([piece])).logits[0]

    return logits


def losses(logits: Logits) -> dict[str, float]:
    """Of each text's first pieces, the mean of a token's negative log probability."""
    tokenizer, found = Tokenizer.load(locate(DEMO)), {}
    for text in TEXTS:
        tokens, total = tokenizer.encode((ROOT / text).read_text(encoding="utf-8")), 0.0
        for start in range(0, NUM_PIECES * PIECE, PIECE):
            piece = tokens[start : start + PIECE]
            total += float(nn.functional.cross_entropy(logits(piece)[:-1], torch.tensor(piece[1:]), reduction="sum"))
        found[text] = total / (NUM_PIECES * (PIECE - 1))
    return found


def change(name: str, found: dict[str, float], plain: dict[str, float]) -> float:
    """How much larger the perplexity of all texts is, as a share."""
    for text in TEXTS:
        relative = math.expm1(found[text] - plain[text])
        print(f"{name}, {text}: {math.exp(plain[text]):.2f} becomes {math.exp(found[text]):.2f}, {relative:+.2%}")
    together = math.expm1(sum(found[text] - plain[text] for text in TEXTS) / len(TEXTS))
    print(f"{name}, all of them: {together:+.2%}")
    return together


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, float]:
    return losses(of_raylm(folder))


def test_fp8_quantised_while_it_is_loaded(folder: Path, plain: dict[str, float]) -> None:
    found, expected = losses(of_raylm(folder, quantise=True)), losses(of_torch(to_fp8))
    lost, lost_by_torch = change("fp8", found, plain), change("fp8 in torch", expected, plain)
    assert 0 < lost < MOST_ROUNDED
    assert abs(lost - lost_by_torch) < MOST_APART


def test_int8_by_rows(folder: Path, plain: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers of compressed-tensors, decoded while they are loaded, and as GPUs compute them, activations too."""
    assert convert(locate(str(folder)), tmp_path / "int8", "int8", progress=False).num_quantised == 7 * 30
    lost = change("int8", losses(of_raylm(tmp_path / "int8")), plain)
    assert 0 < abs(lost) < MOST_INT8
    monkeypatch.setattr(ops, "takes_patched", lambda numbers, rows, columns, dtype, device: numbers == "int8_rows")
    lost = change("int8 by int8", losses(of_raylm(tmp_path / "int8", as_stored=True)), plain)
    lost_by_torch = change("int8 by int8 in torch", losses(of_torch(to_int8)), plain)
    assert 0 < lost < MOST_ROUNDED
    assert abs(lost - lost_by_torch) < MOST_APART
