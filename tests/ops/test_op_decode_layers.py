"""raylm::decode_layers: to the bit what the single operators compute, whatever a layer is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from raylm import ops
from raylm.ops import extension, fallback
from tests.ops.block_cases import random_blocks, values_of
from tests.ops.op_reference import decoder_layers

BLOCK_SIZE = 8
MAX_POSITION = 1500
LAYERS = 3


class Sizes(NamedTuple):
    hidden: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Step(NamedTuple):
    """What a step is given besides the weights."""

    residual: Tensor
    k_caches: list[Tensor]
    v_caches: list[Tensor]
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    block_table: Tensor
    cos_sin: Tensor

    def copy(self) -> Step:
        changed = [[cache.clone() for cache in caches] for caches in (self.k_caches, self.v_caches)]
        return Step(self.residual.clone(), *changed, *self[3:])

    def rows(self, count: int) -> Step:
        """The first rows, with the same caches."""
        few = [x[:count] for x in self[3:7]]
        return Step(self.residual[:count], self.k_caches, self.v_caches, *few, self.cos_sin)


SIZES = {
    "groups-of-three": Sizes(64, 96, 3, 1, 32),
    "no-groups": Sizes(96, 160, 4, 4, 16),
    "one-group-of-columns": Sizes(32, 32, 2, 1, 16),
    "super-blocks": Sizes(256, 512, 4, 2, 64),
}
ODD = Sizes(50, 37, 6, 2, 10)
"""Plain weights alone take them."""
Kinds = Sequence[Kind | torch.dtype]
"""Of q, k, v, o, gate, up and down; a dtype for q or for gate holds for all of their product."""
PLAIN: Kinds = (torch.float32,) * 7
MIXED: Kinds = (Kind.Q4_1, Kind.Q8_0, Kind.Q5_0, Kind.Q4_0, Kind.IQ4_NL, Kind.Q5_1, Kind.Q8_0)
LARGE: Kinds = (Kind.Q4_K, Kind.Q4_K, Kind.Q6_K, Kind.Q5_K, Kind.Q2_K, Kind.IQ4_XS, Kind.Q3_K)
HALF_PLAIN: Kinds = (torch.bfloat16,) * 3 + (Kind.Q8_0,) + (Kind.Q4_1, Kind.Q4_1) + (torch.float16,)
OTHER_HALF: Kinds = (Kind.Q8_0,) * 3 + (torch.float32,) + (torch.float16,) * 2 + (Kind.Q4_0,)


def make_layers(
    sizes: Sizes, kinds: Sequence[Kinds], *, head_norms: bool = False, bias: bool = False, gelu_tanh: bool = False
) -> ops.StoredLayers:
    """Of every layer the next of `kinds`."""
    generator = torch.Generator().manual_seed(5)
    hidden, width, heads, kv_heads, head_dim = sizes
    kv = kv_heads * head_dim
    shapes = ((heads * head_dim, hidden), (kv, hidden), (kv, hidden), (hidden, heads * head_dim))
    shapes += ((width, hidden), (width, hidden), (hidden, width))
    weights: list[Tensor] = []
    numbers: list[int] = []
    for layer in range(LAYERS):
        of_layer = kinds[layer % len(kinds)]
        for product in (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7)):
            parts = list(zip(shapes[product], of_layer[product], strict=True))
            if isinstance(parts[0][1], torch.dtype):
                rows, columns = sum(shape[0] for shape, _ in parts), parts[0][0][1]
                weights.append((torch.randn(rows, columns, generator=generator) / columns**0.5).to(parts[0][1]))
                numbers.append(ops.PLAIN)
                continue
            for (rows, columns), kind in parts:
                weights.append(random_blocks(kind, rows, columns // values_of(kind), seed=len(weights)))
                numbers.append(int(kind))

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    qkv = (heads + 2 * kv_heads) * head_dim
    return ops.StoredLayers(
        weights=weights,
        kinds=numbers,
        norms=[norm(hidden) for _ in range(2 * LAYERS)],
        head_norms=[norm(head_dim) for _ in range(2 * LAYERS)] if head_norms else [],
        biases=[torch.randn(qkv, generator=generator) for _ in range(LAYERS)] if bias else [],
        eps=1e-5,
        scale=head_dim**-0.5,
        gelu_tanh=gelu_tanh,
    )


def make_step(sizes: Sizes, seq_lens: list[int], *, rotary_dim: int | None = None) -> Step:
    generator = torch.Generator().manual_seed(len(seq_lens))
    rows, per_row = len(seq_lens), -(-max(seq_lens) // BLOCK_SIZE)
    table = torch.randperm(rows * per_row, generator=generator).view(rows, per_row)
    positions = torch.tensor(seq_lens) - 1
    blocks = table[torch.arange(rows), positions // BLOCK_SIZE]
    shape = (rows * per_row, BLOCK_SIZE, sizes.num_kv_heads, sizes.head_dim)
    caches = [torch.randn(shape, generator=generator) for _ in range(2 * LAYERS)]
    for cache in caches:  # What lies behind a sequence's end may be anything.
        for row, length in enumerate(seq_lens):
            cache[table[row, (length - 1) // BLOCK_SIZE], (length - 1) % BLOCK_SIZE :] = float("nan")
    half = (rotary_dim or sizes.head_dim) // 2
    angles = torch.arange(MAX_POSITION)[:, None] / 10000 ** (torch.arange(half) / half)
    return Step(
        residual=torch.randn(rows, sizes.hidden, generator=generator),
        k_caches=caches[:LAYERS],
        v_caches=caches[LAYERS:],
        positions=positions,
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table.int(),
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=-1),
    )


def run(step: Step, layers: ops.StoredLayers) -> None:
    ops.decode_layers(step.residual, layers, *step[1:])


def run_apart(step: Step, layers: ops.StoredLayers) -> None:
    """By the single operators, which have compiled kernels."""
    lists = (layers.weights, layers.kinds, layers.norms, layers.head_norms, layers.biases)
    fallback.decode_layers(step.residual, *lists, *step[1:], layers.eps, layers.scale, layers.gelu_tanh)


def assert_same(ours: Step, theirs: Step) -> None:
    assert torch.equal(ours.residual, theirs.residual)
    for caches in (1, 2):
        for own, other in zip(ours[caches], theirs[caches], strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)
    assert ours.residual.isfinite().all()


@pytest.fixture(params=["amx", "avx512vnni", "avx512", "avx2", "generic"])
def kernels(request: pytest.FixtureRequest) -> None:
    """Once for each instruction set."""
    request.getfixturevalue("use_isa")(request.param)
    if "decode_layers" not in extension.load().ops.get("cpu", ()):
        pytest.skip("the extension has no decode_layers for cpu")


ROWS = ([1], [700], [9, 8], [40, 1, 33], [1100, 5, 600, 16, 17], list(range(3, 19)), [2] * 21)


@pytest.mark.parametrize("seq_lens", ROWS, ids=lambda lens: f"{len(lens)}-rows-to-{max(lens)}")
@pytest.mark.parametrize("kinds", [PLAIN, MIXED, HALF_PLAIN, OTHER_HALF], ids=["plain", "mixed", "half", "other"])
@pytest.mark.parametrize("sizes", [SIZES["groups-of-three"], SIZES["no-groups"]], ids=["grouped", "no-groups"])
def test_equal_to_the_bit(kernels, sizes, kinds, seq_lens):
    extras = len(seq_lens) % 2 == 0
    layers = make_layers(sizes, [kinds], head_norms=extras, bias=extras, gelu_tanh=not extras)
    ours = make_step(sizes, seq_lens)
    theirs = ours.copy()
    run(ours, layers)
    run_apart(theirs, layers)
    assert_same(ours, theirs)


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "norms-biases"])
@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("name", SIZES)
def test_layers_of_different_kinds(kernels, name, rotary_dim, extras):
    of_layers = [MIXED, PLAIN, HALF_PLAIN] if name != "super-blocks" else [LARGE, OTHER_HALF, LARGE]
    layers = make_layers(SIZES[name], of_layers, head_norms=extras, bias=not extras, gelu_tanh=extras)
    ours = make_step(SIZES[name], [12, 530, 3], rotary_dim=rotary_dim)
    theirs = ours.copy()
    run(ours, layers)
    run_apart(theirs, layers)
    assert_same(ours, theirs)


@pytest.mark.parametrize("seq_lens", [[14], [14, 1, 515]], ids=str)
def test_odd_sizes(kernels, seq_lens):
    layers = make_layers(ODD, [PLAIN, (torch.bfloat16,) * 7], head_norms=True, bias=True)
    ours = make_step(ODD, seq_lens)
    theirs = ours.copy()
    run(ours, layers)
    run_apart(theirs, layers)
    assert_same(ours, theirs)


@pytest.mark.parametrize("kinds", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_a_row_does_not_depend_on_those_beside_it(kernels, kinds):
    sizes = SIZES["groups-of-three"]
    layers = make_layers(sizes, [kinds], bias=True)
    before = make_step(sizes, [600, 3, 20, 9, 31, 2, 77, 1, 5])
    whole = before.copy()
    run(whole, layers)
    for rows in (1, 2, 3, 5):
        few = before.copy().rows(rows)
        run(few, layers)
        assert torch.equal(few.residual, whole.residual[:rows])


def test_a_row_sees_what_another_stores_in_the_same_step(kernels):
    sizes = SIZES["groups-of-three"]
    layers = make_layers(sizes, [MIXED])
    ours = make_step(sizes, [16, 30])
    ours.block_table[1, :2] = ours.block_table[0, :2]
    theirs = ours.copy()
    run(ours, layers)
    run_apart(theirs, layers)
    assert_same(ours, theirs)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(kernels, threads):
    sizes = SIZES["super-blocks"]
    layers = make_layers(sizes, [LARGE, PLAIN])
    before = make_step(sizes, [520, 40, 7])
    ours, theirs = before.copy(), before.copy()
    run_apart(theirs, layers)
    own = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            ours = before.copy()
            run(ours, layers)
            assert_same(ours, theirs)
    finally:
        torch.set_num_threads(own)


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "norms-biases"])
def test_plain_operators(extras):
    """The version in terms of the others, against float64."""
    sizes = SIZES["groups-of-three"]
    layers = make_layers(sizes, [PLAIN], head_norms=extras, bias=extras, gelu_tanh=extras)
    step = make_step(sizes, [1, 17, 40])
    wanted = step.copy()
    run_apart(step, layers)
    torch.testing.assert_close(
        step.residual.double(), decoder_layers(wanted, layers.weights, layers), rtol=1e-4, atol=1e-4
    )


REFUSED = {
    "norms has 5 tensors": lambda step, layers: (step, replace(layers, norms=layers.norms[1:])),
    "too few for its layers": lambda step, layers: (
        step,
        replace(layers, weights=layers.weights[:-1], kinds=layers.kinds[:-1]),
    ),
    "too many for its layers": lambda step, layers: (
        step,
        replace(layers, weights=[*layers.weights, layers.weights[-1]], kinds=[*layers.kinds, layers.kinds[-1]]),
    ),
    "not as many": lambda step, layers: (step, replace(layers, kinds=layers.kinds[:-1])),
    "in blocks beside plain ones": lambda step, layers: (
        step,
        replace(layers, kinds=[layers.kinds[0], ops.PLAIN, *layers.kinds[2:]]),
    ),
    "must be uint8": lambda step, layers: (
        step,
        replace(layers, weights=[*layers.weights[:-1], layers.weights[-1].view(torch.int8)]),
    ),
    r"seq_lens\[0\] is 0": lambda step, layers: (step._replace(seq_lens=step.seq_lens * 0), layers),
    r"seq_lens\[0\] is 999": lambda step, layers: (step._replace(seq_lens=step.seq_lens * 0 + 999), layers),
    r"block_table\[0\]\[0\] is 99": lambda step, layers: (step._replace(block_table=step.block_table * 0 + 99), layers),
    r"slot_mapping\[0\] is -1": lambda step, layers: (step._replace(slot_mapping=step.slot_mapping * 0 - 1), layers),
    r"positions\[0\] is 1500": lambda step, layers: (step._replace(positions=step.positions * 0 + 1500), layers),
    "must be an even number": lambda step, layers: (step._replace(cos_sin=step.cos_sin.repeat(1, 2)), layers),
    "positions has size 1": lambda step, layers: (step._replace(positions=step.positions[:1]), layers),
    "one of the caches is float16": lambda step, layers: (
        step._replace(v_caches=[cache.half() for cache in step.v_caches]),
        layers,
    ),
    "residual is float64": lambda step, layers: (step._replace(residual=step.residual.double()), layers),
    "one of norms has size 63": lambda step, layers: (
        step,
        replace(layers, norms=[norm[:-1] for norm in layers.norms]),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_it_does_not_take_is_refused(kernels, message):
    sizes = SIZES["groups-of-three"]
    step, layers = REFUSED[message](make_step(sizes, [9, 3]), make_layers(sizes, [MIXED]))
    with pytest.raises(RuntimeError, match=message):
        run(step, layers)


def test_no_rows(kernels):
    layers = make_layers(SIZES["no-groups"], [MIXED])
    step = make_step(SIZES["no-groups"], [3])
    before = step.copy()
    run(step.rows(0), layers)
    assert_same(step, before)
