"""raylm::block_experts: a mixture of experts whose weights are in a GGUF file's blocks."""

from __future__ import annotations

from itertools import cycle, islice

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from raylm import ops
from tests.ops.block_cases import KINDS, decoded, random_blocks, values_of
from tests.ops.op_reference import gated

pytestmark = pytest.mark.operators("block_experts")

TOLERANCES = {torch.float32: 3e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of a row, beside its size. In float32 it is what 16 bits cost activations."""
SHAPES = [(1, 8, 2, 512, 256), (3, 5, 5, 256, 512), (40, 4, 1, 768, 256), (300, 3, 2, 256, 256)]
"""Rows, experts, experts of a row, hidden size, columns between the products. 300 rows are more than one pass has."""
WAYS = [
    (torch.float32, "silu", False),
    (torch.bfloat16, "clamped_swiglu", True),
    (torch.float32, "clamped_swiglu", True),
    (torch.float16, "gelu_tanh", False),
    (torch.float32, "gelu_tanh", True),
]
"""Type, activation, biases."""
LIMIT = 0.7


def _cases() -> list[object]:
    """Every kind in every place, and every pair of a shape and a way."""
    numbers = range(max(len(KINDS), len(SHAPES) * len(WAYS)))
    kinds = [[KINDS[(number + 4 * place) % len(KINDS)] for place in range(3)] for number in numbers]
    cases = zip(kinds, islice(cycle(SHAPES), len(numbers)), islice(cycle(WAYS), len(numbers)), strict=True)
    return [
        pytest.param(*case, id="-".join(kind.name for kind in case[0]) + f"-{number}")
        for number, case in enumerate(cases)
    ]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator(sum(shape)))


def _experts(kinds: list[Kind], count: int, hidden: int, size: int) -> list[Tensor]:
    sizes = zip(kinds, (size, size, hidden), (hidden, hidden, size), strict=True)
    return [
        random_blocks(kind, count * rows, columns // values_of(kind), seed).unflatten(0, (count, rows))
        for seed, (kind, rows, columns) in enumerate(sizes)
    ]


def _routed(rows: int, count: int, per_token: int) -> tuple[Tensor, Tensor]:
    logits = torch.randn(rows, count, generator=_generator(9))
    logits[: rows // 2, 1] += 3  # some experts have no row, one has many
    weights, chosen = logits.softmax(-1).topk(per_token, dim=-1)
    return weights, chosen


def _rows(blocks: list[Tensor], kinds: list[Kind], rows: int, hidden: int) -> Tensor:
    """Whose products with gates are about 1, where activations bend."""
    x = _random(rows, hidden)
    return x / (x.double() @ decoded(blocks[0][0], kinds[0]).t()).std().float()


def _reference(
    x: Tensor,
    blocks: list[Tensor],
    kinds: list[Kind],
    weights: Tensor,
    chosen: Tensor,
    biases: list[Tensor | None],
    activation: str,
) -> Tensor:
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(len(blocks[0])):
        of_gate_up, of_down = (0 if bias is None else bias[expert].double() for bias in biases)
        gate, up, down = (decoded(part[expert], kind) for part, kind in zip(blocks, kinds, strict=True))
        which, place = torch.nonzero(chosen == expert, as_tuple=True)
        inner = gated(x[which].double() @ torch.cat([gate, up]).t() + of_gate_up, activation, LIMIT)
        expected[which] += weights[which, place, None].double() * (inner @ down.t() + of_down)
    return expected


def _assert_close(out: Tensor, expected: Tensor) -> None:
    assert out.shape == expected.shape and out.is_contiguous()
    off = (out.double() - expected).norm(dim=-1)
    assert bool((off <= TOLERANCES[out.dtype] * expected.norm(dim=-1)).all()), off / expected.norm(dim=-1)


@pytest.mark.parametrize(("kinds", "shape", "way"), _cases())
def test_matches_reference(op, device, kinds, shape, way):
    (rows, count, per_token, hidden, size), (dtype, activation, biased) = shape, way
    blocks = _experts(kinds, count, hidden, size)
    x = _rows(blocks, kinds, rows, hidden).to(dtype)
    weights, chosen = _routed(rows, count, per_token)
    biases = [_random(count, width).to(dtype) if biased else None for width in (2 * size, hidden)]
    out = op("block_experts")(
        x.to(device),
        [part.to(device) for part in blocks],
        kinds,
        weights.to(device),
        chosen.to(device),
        *(None if bias is None else bias.to(device) for bias in biases),
        ops.ACTIVATIONS.index(activation),
        LIMIT,
    ).cpu()
    assert out.dtype == dtype
    _assert_close(out, _reference(x, blocks, kinds, weights, chosen, biases, activation))


def test_small_blocks_strided_weights_and_rows(op, device):
    kinds = [Kind.Q4_0, Kind.Q4_0, Kind.MXFP4]
    both = random_blocks(Kind.Q4_0, 6 * 2 * 160, 3).unflatten(0, (6, 320)).to(device)
    blocks = [both[::2, :160], both[::2, 160:], random_blocks(Kind.MXFP4, 3 * 96, 5).unflatten(0, (3, 96)).to(device)]
    x = torch.cat([_random(7, 13), _rows([part.cpu() for part in blocks], kinds, 7, 96)], dim=1)[:, 13:]
    weights, chosen = _routed(7, 3, 2)
    out = op("block_experts")(x.to(device), blocks, kinds, weights.to(device), chosen.to(device), None, None, 0, 0.0)
    expected = _reference(x, [part.cpu() for part in blocks], kinds, weights, chosen, [None, None], "silu")
    _assert_close(out.cpu(), expected)


def test_no_rows(op, device):
    kinds = [Kind.Q8_0] * 3
    blocks = [part.to(device) for part in _experts(kinds, 4, 64, 32)]
    x, weights, chosen = (part.to(device) for part in (_random(0, 64), *_routed(0, 4, 2)))
    assert op("block_experts")(x, blocks, kinds, weights, chosen, None, None, 0, 0.0).shape == (0, 64)


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_a_bad_row_and_a_bad_expert_stay_where_they_are(op, device, activation):
    """Experts that no row goes to are not computed with."""
    kinds = [Kind.Q4_K, Kind.Q4_K, Kind.Q8_0]
    blocks = _experts(kinds, 4, 256, 256)
    for part in blocks:
        part[2] = 0xFF
    x = _rows(blocks, kinds, 6, 256)
    x[4, 100] = torch.nan
    chosen = torch.tensor([[0, 1], [1, 3], [3, 2], [0, 3], [1, 0], [3, 1]])
    out = op("block_experts")(
        x.to(device),
        [part.to(device) for part in blocks],
        kinds,
        torch.full((6, 2), 0.5).to(device),
        chosen.to(device),
        None,
        None,
        ops.ACTIVATIONS.index(activation),
        LIMIT,
    ).cpu()
    assert out.isfinite().all(dim=-1).tolist() == [True, True, False, True, False, True]


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q6_K], ids=lambda kind: kind.name)
def test_a_row_does_not_depend_on_the_rows_beside_it(needs_block_kernels, kind):
    kinds = [kind] * 3
    blocks, (weights, chosen) = _experts(kinds, 4, 512, 256), _routed(90, 4, 2)
    x = _rows(blocks, kinds, 90, 512)
    together = ops.block_experts(x, blocks, kinds, weights, chosen, "silu")
    for rows in (1, 2, 3, 7, 64, 90):
        alone = ops.block_experts(x[:rows], blocks, kinds, weights[:rows], chosen[:rows], "silu")
        assert torch.equal(alone, together[:rows])


def test_threads_change_nothing(needs_block_kernels):
    """Each phase begins when the one before it is done."""
    kinds = [Kind.Q4_0, Kind.Q8_0, Kind.Q5_1]
    blocks, x, (weights, chosen) = _experts(kinds, 8, 128, 96), _random(9, 128), _routed(9, 8, 2)
    num_threads, found = torch.get_num_threads(), []
    try:
        for threads in (1, *[4] * 200):
            torch.set_num_threads(threads)
            found.append(ops.block_experts(x, blocks, kinds, weights, chosen, "silu"))
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(each, found[0]) for each in found)


def test_kinds_without_kernels_are_decoded_first():
    kinds = [Kind.TQ2_0, Kind.Q4_0, Kind.Q4_0]
    blocks = _experts([Kind.Q4_0] * 3, 3, 256, 64)
    blocks[0] = torch.from_numpy(gguf.quantize(_random(3, 64, 256).numpy(), Kind.TQ2_0))
    x, (weights, chosen) = _rows(blocks, kinds, 5, 256), _routed(5, 3, 2)
    out = ops.block_experts(x, blocks, kinds, weights, chosen, "gelu_tanh")
    _assert_close(out, _reference(x, blocks, kinds, weights, chosen, [None, None], "gelu_tanh"))


def test_opcheck():
    kinds = [int(kind) for kind in (Kind.Q4_K, Kind.Q8_0, Kind.Q4_0)]
    blocks = _experts([Kind(kind) for kind in kinds], 3, 256, 64)
    biases = _random(3, 128), _random(3, 256)
    torch.library.opcheck(
        torch.ops.raylm.block_experts.default, (_random(4, 256), blocks, kinds, *_routed(4, 3, 2), *biases, 2, LIMIT)
    )


def test_bad_arguments_are_named(needs_block_kernels):
    kinds = [int(Kind.Q4_0)] * 3
    blocks, x, (weights, chosen) = _experts([Kind.Q4_0] * 3, 3, 64, 96), _random(4, 64), _routed(4, 3, 2)
    gate, up, down = blocks
    good = {
        "x": x,
        "blocks": blocks,
        "kinds": kinds,
        "weights": weights,
        "chosen": chosen,
        "gate_up_bias": None,
        "down_bias": None,
        "activation": 0,
        "limit": 0.0,
    }
    assert torch.ops.raylm.block_experts(*good.values()).shape == x.shape
    for match, wrong in (
        ("x is float64, must be float32", {"x": x.double()}),
        ("blocks has 2 tensors and kinds 3 numbers, must have 3: of gate, up and down", {"blocks": blocks[:2]}),
        ("kind 35 has no kernel", {"kinds": [kinds[0], 35, kinds[0]]}),
        (r"blocks\[1\] has size 2 in dimension 0, must have 3", {"blocks": [gate, up[:2], down]}),
        (r"blocks\[1\] has size 95 in dimension 1, must have 96", {"blocks": [gate, up[:, :95], down]}),
        (r"blocks\[0\] has 2 dimensions, must have 3", {"blocks": [gate[0], up, down]}),
        (r"blocks\[2\] has size 36 in dimension 2, must have 54", {"blocks": [gate, up, down[..., :36]]}),
        (r"blocks\[2\] is for 96 columns, must be for a multiple of the 256", {"kinds": [*kinds[:2], int(Kind.Q4_K)]}),
        (r"chosen\[7\] is 3, must be at least 0 and below 3", {"chosen": torch.tensor([[0, 1]] * 3 + [[0, 3]])}),
        ("chosen has size 3 in dimension 0, must have 4", {"chosen": chosen[:3]}),
        ("chosen is int32, must be int64", {"chosen": chosen.int()}),
        ("weights has size 1 in dimension 1, must have 2", {"weights": weights[:, :1].contiguous()}),
        ("weights is float16, must be float32", {"weights": weights.half()}),
        ("gate_up_bias has size 96 in dimension 1, must have 192", {"gate_up_bias": _random(3, 96)}),
        ("down_bias is float16, must be float32", {"down_bias": _random(3, 64).half()}),
        ("activation is 3, must be at least 0 and below 3", {"activation": 3}),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"block_experts: {match}"):
            torch.ops.raylm.block_experts(*(good | wrong).values())
