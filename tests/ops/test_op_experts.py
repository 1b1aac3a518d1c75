"""raylm::route and raylm::experts: which experts a token goes to, and what they make of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from raylm import ops
from tests.ops.op_reference import DTYPES, close, gated

pytestmark = pytest.mark.operators("route", "experts", "experts_kernels")


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def _routed(logits: Tensor, bias: Tensor | None, options: dict) -> tuple[list[list[float]], list[list[int]]]:
    """Row by row, in plain Python."""
    weights, chosen = [], []
    for row in logits.double():
        scores = torch.sigmoid(row) if options["sigmoid"] else torch.softmax(row, -1)
        preferred = (scores if bias is None else scores + bias.double()).tolist()
        width = len(preferred) // options["groups"]
        groups = [preferred[first : first + width] for first in range(0, len(preferred), width)]
        ranked = sorted(range(len(groups)), key=lambda group: -sum(sorted(groups[group])[-2:]))
        allowed = {group * width + i for group in ranked[: options["groups_per_token"]] for i in range(width)}
        best = sorted(allowed, key=lambda expert: -preferred[expert])[: options["per_token"]]
        found = [float(scores[expert]) for expert in best]
        total = sum(found) if options["normalized"] else 1.0
        weights.append([options["scale"] * each / total for each in found])
        chosen.append(best)
    return weights, chosen


PLAIN = {"per_token": 2, "sigmoid": False, "normalized": True, "scale": 1.0, "groups": 1, "groups_per_token": 1}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_experts", "biased", "changes"),
    [
        (8, False, {}),
        (128, False, {"per_token": 8, "normalized": False}),
        (6, False, {"per_token": 6}),
        (60, True, {"per_token": 4, "sigmoid": True, "scale": 2.5}),
        (32, True, {"per_token": 4, "sigmoid": True, "groups": 8, "groups_per_token": 3, "normalized": False}),
        (256, True, {"per_token": 8, "sigmoid": True, "groups": 8, "groups_per_token": 4}),
        (512, False, {"per_token": 10}),
    ],
)
def test_route_matches_reference(op, device, dtype, num_experts, biased, changes):
    options = {**PLAIN, **changes}
    # Apart enough that rounding does not change who is first.
    ranks = torch.stack([_random(num_experts, seed=row).argsort() for row in range(17)])
    logits = (ranks / num_experts - 0.5).to(dtype)
    bias = _random(num_experts, seed=5) / 10 if biased else None
    weights, chosen = op("route")(logits.to(device), None if bias is None else bias.to(device), *options.values())
    expected, experts = _routed(logits, bias, options)
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int64
    assert chosen.tolist() == experts
    torch.testing.assert_close(weights.cpu(), torch.tensor(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("jitter", [0.01, 0.3])
def test_sparse_mixer_matches_reference(device, jitter):
    logits = _random(40, 16)
    # Rows of one sign: the larger of both is relative to whichever is.
    logits[0], logits[1] = logits[0].abs(), -logits[1].abs()
    weights, chosen = ops.sparse_mixer(logits.to(device), jitter=jitter)
    for row, found, experts in zip(logits.double().tolist(), weights.tolist(), chosen.tolist(), strict=True):
        left = dict(enumerate(row))
        for weight, expert in zip(found, experts, strict=True):
            best = max(left.values())
            assert left[expert] == best
            near = [x for x in left.values() if (best - x) / max(abs(x), best) <= 2 * jitter]
            assert weight == pytest.approx(math.exp(best) / sum(map(math.exp, near)), abs=1e-5)
            del left[expert]
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int64 and (jitter < 0.1 or weights.min() < 0.9)


@pytest.mark.parametrize(
    ("activation", "biased"), [("silu", False), ("gelu_tanh", False), ("clamped_swiglu", True), ("silu", True)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "num_experts", "per_token", "hidden", "size"),
    [
        (0, 4, 2, 64, 32),
        (1, 8, 2, 64, 32),
        (5, 4, 4, 64, 32),
        (8, 128, 8, 136, 40),  # columns of no whole tile
        (13, 16, 3, 200, 72),
        (40, 60, 4, 128, 64),
        (70, 8, 3, 64, 136),
        (150, 8, 2, 72, 64),
        (300, 8, 2, 64, 96),
        (2, 8, 4, 72, 24),
        (260, 4, 3, 72, 200),
        (700, 4, 2, 64, 32),
    ],
)
def test_experts_match_reference(op, device, activation, biased, dtype, rows, num_experts, per_token, hidden, size):
    x, down = _random(rows, hidden), _random(num_experts, hidden, size) / size**0.5
    gate_up = _random(num_experts, 2 * size, hidden, seed=1) / hidden**0.5
    x, gate_up, down = (tensor.to(device, dtype) for tensor in (x, gate_up, down))
    # Some experts have no token, one has many.
    logits = _random(rows, num_experts, seed=2)
    logits[: rows // 2, 1] += 3
    weights, chosen = ops.route(logits.to(device), None, **{**PLAIN, "per_token": per_token})
    _skip_if_torchs(op, x, down)
    biases: list[Tensor | None] = [None, None]
    if biased:
        biases = [_random(num_experts, width, seed=3).to(device, dtype) for width in (2 * size, hidden)]
    # The limit cuts off many numbers.
    limit = 0.7
    code = ops.ACTIVATIONS.index(activation)
    out = op("experts")(x, gate_up, down, weights, chosen, *biases, code, limit)
    assert out.shape == (rows, hidden) and out.dtype == dtype and out.is_contiguous()
    close(out, _reference(x, gate_up, down, weights, chosen, biases, activation, limit), scale=2)


def _skip_if_torchs(op, x: Tensor, down: Tensor) -> None:
    if op("experts_kernels") is torch.ops.raylm.experts_kernels.default and not op("experts_kernels")(x, down):
        pytest.skip("torch's version runs for these here")


def _reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    biases: list[Tensor | None],
    activation: str,
    limit: float,
) -> Tensor:
    expected = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(len(down)):
        of_gate_up, of_down = (0 if bias is None else bias[expert].double() for bias in biases)
        which, place = torch.nonzero(chosen == expert, as_tuple=True)
        inner = gated(x[which].double() @ gate_up[expert].double().t() + of_gate_up, activation, limit)
        expected[which] += weights[which, place, None].double() * (inner @ down[expert].double().t() + of_down)
    return expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_experts", [1, 3])
def test_experts_of_any_number_of_rows(op, device, dtype, num_experts):
    """Kernels multiply so many rows at a time as the experts need. Rows lie apart, with others between them."""
    hidden, size = 72, 40
    down = (_random(num_experts, hidden, size) / size**0.5).to(device, dtype)
    gate_up = (_random(num_experts, 2 * size, hidden) / hidden**0.5).to(device, dtype)
    for rows in range(2, 290, 13):
        x = _random(rows, 2 * hidden).to(device, dtype)[:, :hidden]
        _skip_if_torchs(op, x, down)
        weights, chosen = ops.route(_random(rows, num_experts).to(device), None, **{**PLAIN, "per_token": 1})
        out = op("experts")(x, gate_up, down, weights, chosen, None, None, 0, 0.0)
        close(out, _reference(x, gate_up, down, weights, chosen, [None, None], "silu", 0.0), scale=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_a_nan_stays_in_its_row(op, device, rows, activation, dtype):
    x, down, gate_up = (_random(*shape).to(device, dtype) for shape in ((rows, 64), (4, 64, 32), (4, 64, 64)))
    _skip_if_torchs(op, x, down)
    x[rows // 2, 3] = math.nan
    weights, chosen = ops.route(_random(rows, 4).to(device), None, **PLAIN)
    out = op("experts")(x, gate_up, down, weights, chosen, None, None, ops.ACTIVATIONS.index(activation), 0.7)
    assert out[rows // 2].isnan().all() and out.isnan().any(-1).sum() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_holds_them(dtype):
    """Who goes where is decided anew in every replay."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    gate_up, down = _random(8, 64, 64).to("cuda", dtype) / 8, _random(8, 64, 32).to("cuda", dtype) / 6
    router, x = _random(8, 64).to("cuda", dtype), _random(5, 64).to("cuda", dtype)

    def run() -> Tensor:
        weights, chosen = ops.route(x @ router.t(), None, **PLAIN)
        return ops.experts(x, gate_up, down, weights, chosen, "silu")

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(3):
        x.copy_(_random(5, 64, seed=seed))
        graph.replay()
        torch.testing.assert_close(out, run())
