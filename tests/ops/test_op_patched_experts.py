"""raylm::patched_experts: a mixture of experts whose weights are codes in patches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raylm import ops
from raylm.ops.patches import NUMBERS, rounds_rows
from tests.ops.devices import ON_CUDA
from tests.ops.in_patches import KINDS, ROUNDED, in_patches, rounded
from tests.ops.op_reference import gated

pytestmark = pytest.mark.operators("patched_experts")
PLAIN = {"sigmoid": False, "normalized": True, "scale": 1.0, "groups": 1, "groups_per_token": 1}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CASES = [(*kind, torch.bfloat16) for kind in KINDS if kind != ("int8", 64)]
CASES += [("int4", 64, torch.float16), ("int8", 64, torch.float16), ("int8_rows", 128, torch.float16)]
BIASES = [("silu", False), ("clamped_swiglu", True)]


@pytest.mark.parametrize(("activation", "biased"), BIASES)
@pytest.mark.parametrize(("numbers", "group", "dtype"), CASES)
@pytest.mark.parametrize(
    ("rows", "num_experts", "per_token", "hidden", "size"),
    [(1, 8, 2, 64, 32), (5, 4, 4, 272, 144), (0, 4, 2, 64, 32), (18, 4, 2, 144, 80), (66, 4, 2, 144, 80)],
)
def test_matches_reference(
    op, device, activation, biased, dtype, numbers, group, rows, num_experts, per_token, hidden, size
):
    _compare(op, device, activation, biased, dtype, numbers, group, rows, num_experts, per_token, hidden, size)


@ON_CUDA
@pytest.mark.parametrize(("activation", "biased"), BIASES)
@pytest.mark.parametrize(("numbers", "group", "dtype"), CASES)
@pytest.mark.parametrize(
    ("rows", "num_experts", "per_token", "hidden", "size"),
    [
        (1, 16, 4, 2048, 768),
        (8, 64, 8, 128, 768),
        (16, 16, 4, 512, 112),  # as many of gate's patches as are no whole tile
        (40, 60, 4, 128, 64),
        (70, 8, 3, 640, 144),
        (260, 4, 3, 80, 208),
        (700, 4, 2, 384, 256),
        (100, 64, 2, 384, 112),  # many experts, with few rows each
        (300, 4, 2, 64, 160),  # the last tile's second half is empty, of both products
    ],
)
def test_more_sizes(op, device, activation, biased, dtype, numbers, group, rows, num_experts, per_token, hidden, size):
    _compare(op, device, activation, biased, dtype, numbers, group, rows, num_experts, per_token, hidden, size)


@pytest.mark.parametrize("numbers", ROUNDED)
def test_rounded_rows_of_zeros_and_of_no_numbers(op, device, numbers):
    """They change no other token."""
    num_experts, hidden, size = 4, 256, 144
    gate_up, down = (
        torch.stack([in_patches(numbers, 128, rows, columns, seed=each)[0] for each in range(num_experts)]).to(device)
        for rows, columns in ((2 * size, hidden), (hidden, size))
    )
    x = (torch.randn(90, hidden, generator=_generator(7)) / 16).to(device, torch.bfloat16)
    logits = torch.randn(90, num_experts, generator=_generator(9))
    weights, chosen = ops.route(logits.to(device), None, **PLAIN, per_token=2)
    rest = gate_up, down, weights, chosen, None, None, 0, 0.0, NUMBERS.index(numbers), 128
    expected = op("patched_experts")(x, *rest)
    x[3], x[5, 7], x[6, 9] = 0, torch.nan, torch.inf
    found = op("patched_experts")(x, *rest)
    assert torch.equal(found[3], torch.zeros_like(found[3])) and found[5:7].isnan().all()
    others = [row for row in range(90) if row not in (3, 5, 6)]
    assert torch.equal(found[others], expected[others]) and expected.isfinite().all()


def _compare(op, device, activation, biased, dtype, numbers, group, rows, num_experts, per_token, hidden, size):
    made = [in_patches(numbers, group, 2 * size, hidden, seed=each) for each in range(num_experts)]
    made += [in_patches(numbers, group, hidden, size, seed=100 + each) for each in range(num_experts)]
    gate_up, down = (torch.stack([each for each, _ in part]) for part in (made[:num_experts], made[num_experts:]))
    numbers_of_gate_up, numbers_of_down = (
        torch.stack([each for _, each in part]) for part in (made[:num_experts], made[num_experts:])
    )
    x = (torch.randn(rows, hidden, generator=_generator(7)) / hidden**0.5).to(device, dtype)
    biases: list[Tensor | None] = [None, None]
    if biased:
        drawn = (torch.randn(num_experts, width, generator=_generator(8)) for width in (2 * size, hidden))
        biases = [each.to(device, dtype) for each in drawn]
    logits = torch.randn(rows, num_experts, generator=_generator(9))
    logits[: rows // 2, 1] += 3  # some experts have no token, one has many
    weights, chosen = ops.route(logits.to(device), None, **PLAIN, per_token=per_token)
    limit, code = 0.7, ops.ACTIVATIONS.index(activation)
    out = op("patched_experts")(
        x, gate_up.to(device), down.to(device), weights, chosen, *biases, code, limit, NUMBERS.index(numbers), group
    )
    rounds = rounds_rows(numbers, rows)
    taken = rounded(x, numbers) if rounds else x.double()
    expected = torch.zeros(rows, hidden, dtype=torch.float64, device=device)
    for expert in range(num_experts):
        of_gate_up, of_down = (0 if bias is None else bias[expert].double() for bias in biases)
        which, place = torch.nonzero(chosen == expert, as_tuple=True)
        inner = taken[which] @ numbers_of_gate_up[expert].to(device).double().t() + of_gate_up
        inner = gated(inner, activation, limit).to(dtype)
        inner = rounded(inner, numbers) if rounds and len(inner) else inner.double()
        outer = inner @ numbers_of_down[expert].to(device).double().t() + of_down
        expected[which] += weights[which, place, None].double() * outer
    assert out.shape == (rows, hidden) and out.dtype == dtype and out.is_contiguous()
    if rows:
        errors = out.double() - expected
        # What lies near the middle between two numbers of 8 bits may be rounded to the other one here.
        assert errors.norm() <= (0.015 if rounds else 0.01) * expected.norm()
        assert errors.abs().max() <= (0.08 if rounds else 0.03) * max(1.0, expected.abs().max().item())
