"""raylm::few_layers: whole layers against the plain operators in float64."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from raylm import ops
from raylm.ops import fallback
from tests.ops.op_reference import decoder_layers

BLOCK_SIZE = 16
MAX_POSITION = 3100
LAYERS = 3
HOPPER = (9, 0)


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


SMALL = Sizes(64, 96, 4, 2, 64)


def make_weights(sizes: Sizes, *, head_norms: bool, bias: bool, gelu_tanh: bool = False) -> ops.LayerWeights:
    generator = torch.Generator().manual_seed(5)

    def random(n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=generator) / k**0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    hidden, width, heads, kv_heads, head_dim = sizes
    qkv = (heads + 2 * kv_heads) * head_dim
    shapes = [(qkv, hidden), (hidden, heads * head_dim), (2 * width, hidden), (hidden, width)]
    return ops.LayerWeights(
        products=[random(*shape) for _ in range(LAYERS) for shape in shapes],
        scales=[],
        numbers=None,
        group=0,
        mixture=None,
        num_heads=heads,
        width=width,
        norms=[norm(hidden) for _ in range(2 * LAYERS)],
        head_norms=[norm(head_dim) for _ in range(2 * LAYERS)] if head_norms else [],
        biases=[torch.randn(qkv, generator=generator) for _ in range(LAYERS)] if bias else [],
        eps=1e-5,
        scale=head_dim**-0.5,
        gelu_tanh=gelu_tanh,
    )


def in_codes(weights: ops.LayerWeights) -> ops.LayerWeights:
    """With products in FP8."""
    rows = [ops.scale_rows(product) for product in weights.products]
    return replace(weights, products=[each.codes for each in rows], scales=[each.scales for each in rows])


def in_patches(weights: ops.LayerWeights, group: int = 128) -> ops.LayerWeights:
    """With products of random integers of 4 bits."""
    generator = torch.Generator().manual_seed(6)
    packed = []
    for at, product in enumerate(weights.products):
        if _is_router(weights, at):
            packed.append(product)
            continue
        n, k = product.flatten(0, -2).shape
        codes = torch.randint(0, 16, (n, k), generator=generator).to(torch.uint8)
        zeros = torch.randint(4, 12, (n, -(-k // group)), generator=generator)
        scales = (0.5 + torch.rand(zeros.shape, generator=generator)) / (5 * k**0.5)
        patches = ops.pack_integers("int4", codes, scales, zeros, group)
        packed.append(patches.unflatten(0, (len(product), -1)) if product.dim() == 3 else patches)
    return replace(weights, products=packed, numbers="int4", group=group)


def in_fp8_patches(weights: ops.LayerWeights) -> ops.LayerWeights:
    """With products in FP8 that have a scale for each 128 columns."""
    products = [product if _is_router(weights, at) else _fp8(product) for at, product in enumerate(weights.products)]
    return replace(weights, products=products, numbers="fp8", group=128)


def _is_router(weights: ops.LayerWeights, at: int) -> bool:
    return weights.mixture is not None and at % 5 == 2


def _fp8(product: Tensor) -> Tensor:
    packed = ops.quantise_fp8(product.flatten(0, -2))
    return packed.unflatten(0, (len(product), -1)) if product.dim() == 3 else packed


FORMS = {
    "plain": lambda weights: weights,
    "fp8": in_codes,
    "int4": in_patches,
    "int4-64": lambda weights: in_patches(weights, 64),
    "fp8-patches": in_fp8_patches,
}


def with_experts(weights: ops.LayerWeights, num_experts: int, mixture: ops.Mixture, *, seed: int) -> ops.LayerWeights:
    """The same with a mixture of experts of its width in place of each MLP."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width = len(weights.norms[0]), weights.width
    products = []
    for layer in range(LAYERS):
        shapes = ((num_experts, hidden), (num_experts, 2 * width, hidden), (num_experts, hidden, width))
        drawn = [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]
        products += [*weights.products[4 * layer : 4 * layer + 2], 2 * drawn[0], *drawn[1:]]
    return replace(weights, products=products, mixture=mixture)


def codes_and_experts(weights: ops.LayerWeights) -> ops.LayerWeights:
    """With attention's products in FP8 by rows, and experts' by 128 columns."""
    rows = {at: ops.scale_rows(product) for at, product in enumerate(weights.products) if at % 5 < 2}
    products = [rows[at].codes if at in rows else product for at, product in enumerate(weights.products)]
    products = [_fp8(product) if at % 5 > 2 else product for at, product in enumerate(products)]
    return replace(weights, products=products, scales=[each.scales for each in rows.values()], numbers="fp8", group=128)


MIXTURES = {
    "plain": lambda weights: weights,
    "fp8": codes_and_experts,
    "fp8-patches": in_fp8_patches,
    "int4": in_patches,
}
ROUTES = [ops.Mixture(2, sigmoid=False, normalized=True, scale=1.0), ops.Mixture(3, True, False, 0.7)]


def make_step(sizes: Sizes, seq_lens: list[int]) -> Step:
    generator = torch.Generator().manual_seed(len(seq_lens))
    rows, per_row = len(seq_lens), -(-max(seq_lens) // BLOCK_SIZE)
    table = torch.randperm(rows * per_row, generator=generator).view(rows, per_row)
    positions = torch.tensor(seq_lens) - 1
    blocks = table[torch.arange(rows), positions // BLOCK_SIZE]
    shape = (rows * per_row, BLOCK_SIZE, sizes.num_kv_heads, sizes.head_dim)
    caches = [torch.randn(shape, generator=generator) for _ in range(2 * LAYERS)]
    for cache in caches:  # What lies behind a sequence's end may be anything.
        for row, length in enumerate(seq_lens):
            cache[table[row, -1], (length - 1) % BLOCK_SIZE + 1 :] = float("nan")
    angles = torch.arange(MAX_POSITION)[:, None] / 10000 ** (torch.arange(sizes.head_dim // 2) / sizes.head_dim * 2)
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


def cast(x: Tensor | list[Tensor], dtype: torch.dtype, device: str) -> Tensor | list[Tensor]:
    if isinstance(x, list):
        return [cast(one, dtype, device) for one in x]
    return x.to(device, dtype if x.is_floating_point() else None, copy=True)


def placed(step: Step, dtype: torch.dtype, device: str) -> Step:
    """A copy of the step; angles stay as they are."""
    return Step(*(cast(x, dtype, device) for x in step[:-1]), step.cos_sin.to(device))


def placed_weights(weights: ops.LayerWeights, dtype: torch.dtype, device: str) -> ops.LayerWeights:
    lists = {name: cast(getattr(weights, name), dtype, device) for name in ("norms", "head_norms", "biases")}
    if weights.scales or weights.group:
        lists |= {
            "products": [
                x.to(device, dtype if _is_router(weights, at) else None) for at, x in enumerate(weights.products)
            ],
            "scales": [x.to(device) for x in weights.scales],
        }
    else:
        lists |= {"products": cast(weights.products, dtype, device)}
    return replace(weights, **lists)


def exact_products(weights: ops.LayerWeights, head_dim: int) -> list[Tensor]:
    """The numbers of all products, float64."""
    hidden, of_heads = len(weights.norms[0]), weights.num_heads * head_dim
    columns = [hidden, of_heads, *([hidden] if weights.mixture else []), hidden, weights.width] * LAYERS
    scales = iter(weights.scales)
    found = []
    for product, k in zip(weights.products, columns, strict=True):
        if product.dtype == torch.uint8:
            numbers = ops.unpack(product.flatten(0, -2), weights.numbers, weights.group, k).double()
            found.append(numbers.unflatten(0, (len(product), -1)) if product.dim() == 3 else numbers)
        elif product.dtype == ops.CODES:
            found.append(product.double() * next(scales).double()[:, None])
        else:
            found.append(product.double())
    return found


def run(step: Step, weights: ops.LayerWeights, memory: tuple[Tensor, Tensor]) -> None:
    ops.few_layers(step.residual, weights, *step[1:], *memory)


def check(step: Step, before: Step, weights: ops.LayerWeights, *, tolerance: float) -> None:
    """Compares a step that has run with the reference, and finds its caches changed where the tokens are."""
    wanted = placed(before, torch.float64, "cpu")
    exact = placed_weights(weights, torch.float64, "cpu")
    wanted = wanted._replace(residual=decoder_layers(wanted, exact_products(exact, wanted.cos_sin.shape[1]), exact))
    for name in ("residual", "k_caches", "v_caches"):
        ours, theirs = (torch.cat([x.flatten() for x in _list(getattr(s, name))]) for s in (step, wanted))
        error = (ours.cpu().double() - theirs).nan_to_num(0)
        assert torch.equal(ours.cpu().isnan(), theirs.isnan()), name
        assert error.norm() <= tolerance * theirs.nan_to_num(0).norm(), f"{name}: off by {error.norm():.3g}"


def _list(x: Tensor | list[Tensor]) -> list[Tensor]:
    return x if isinstance(x, list) else [x]


@pytest.mark.parametrize("gelu_tanh", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "norms-biases"])
@pytest.mark.parametrize("form", FORMS)
def test_plain_operators(form, extras, gelu_tanh):
    weights = FORMS[form](make_weights(SMALL, head_norms=extras, bias=extras, gelu_tanh=gelu_tanh))
    before = make_step(SMALL, [1, 17, 40])
    step = placed(before, torch.float32, "cpu")
    _run_fallback(step, weights)
    check(step, before, weights, tolerance=1e-5)


def _run_fallback(step: Step, weights: ops.LayerWeights) -> None:
    static = (weights.products, weights.scales, weights.norms, weights.head_norms, weights.biases, *weights.settings)
    settings = (weights.eps, weights.scale, weights.gelu_tanh)
    memory = ops.few_layers_memory(weights, num_kv_heads=2)
    fallback.few_layers(step.residual, *static, *step[1:], *settings, *memory, None, 0, 0, 0.0)


@pytest.mark.parametrize("mixture", ROUTES, ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("form", MIXTURES)
def test_plain_operators_of_a_mixture(form, mixture):
    weights = make_weights(SMALL, head_norms=True, bias=False)
    weights = MIXTURES[form](with_experts(weights, 8, mixture, seed=0))
    before = make_step(SMALL, [17])
    step = placed(before, torch.float32, "cpu")
    _run_fallback(step, weights)
    check(step, before, weights, tolerance=1e-5)


def test_no_kernel_takes_rows_on_a_cpu():
    weights = make_weights(SMALL, head_norms=False, bias=False)
    assert ops.few_layers_rows(weights, num_kv_heads=2, head_dim=64) == 0


@pytest.fixture
def hopper(needs_cuda_extension) -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("the kernel is for compute capability 9.0")


ROWS = ([1], [16], [17, 5], [300], [640, 1, 33], [3000], [7, 900, 256, 128])
SHAPES = {
    "group-of-two": Sizes(1024, 3072, 16, 8, 128),
    "group-of-seven": Sizes(896, 4864, 14, 2, 64),
    "odd-widths": Sizes(576, 1544, 9, 3, 64),
    "group-of-eight": Sizes(2048, 5632, 16, 2, 128),
    "no-groups": Sizes(512, 1032, 4, 4, 128),
    "few-tiles": Sizes(64, 96, 4, 2, 64),
}


def with_dtypes(forms: Iterable[str], *, bfloat16_alone: Container[str]) -> list[tuple[str, torch.dtype]]:
    dtypes = (torch.bfloat16, torch.float16)
    return [(form, dtype) for form in forms for dtype in dtypes if dtype == dtypes[0] or form not in bfloat16_alone]


@pytest.mark.gpu
@pytest.mark.parametrize("seq_lens", ROWS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("form", "dtype"), with_dtypes(FORMS, bfloat16_alone=["fp8-patches"]), ids=str)
def test_kernel(hopper, form, dtype, shape, seq_lens):
    sizes = SHAPES[shape]
    if form != "plain":
        sizes = sizes._replace(width=sizes.width // 16 * 16)
    extras = sizes.num_heads % 2 == 0
    weights = make_weights(sizes, head_norms=extras, bias=extras, gelu_tanh=not extras)
    weights = placed_weights(FORMS[form](weights), dtype, "cuda")
    assert ops.few_layers_rows(weights, num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim) == ops.FEW_ROWS
    before = placed(make_step(sizes, seq_lens), dtype, "cuda")
    step = placed(before, dtype, "cuda")
    run(step, weights, ops.few_layers_memory(weights, num_kv_heads=sizes.num_kv_heads))
    check(step, before, weights, tolerance=2e-2 if dtype == torch.bfloat16 else 3e-3)


LARGE = {"70b": Sizes(8192, 28672, 64, 8, 128), "32b": Sizes(5120, 27648, 40, 8, 128)}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("form", FORMS)
def test_large_models_have_room(hopper, form, shape, rows):
    sizes = LARGE[shape]
    weights = FORMS[form](make_weights(sizes._replace(hidden=64, width=96), head_norms=False, bias=False))
    norms = [torch.ones(sizes.hidden, dtype=torch.bfloat16, device="cuda")] * 160
    weights = replace(weights, norms=norms, width=sizes.width)
    assert ops.few_layers_rows(weights, num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim) >= rows


EXPERTS = {
    "qwen3": (Sizes(512, 256, 32, 4, 128), 16, ops.Mixture(8, sigmoid=False, normalized=True, scale=1.0)),
    "many": (Sizes(128, 256, 8, 1, 128), 128, ops.Mixture(8, sigmoid=False, normalized=True, scale=1.0)),
    "mixtral": (Sizes(768, 768, 16, 8, 128), 8, ops.Mixture(2, sigmoid=False, normalized=True, scale=1.0)),
    "sigmoid": (Sizes(256, 512, 8, 2, 128), 24, ops.Mixture(5, sigmoid=True, normalized=False, scale=0.4)),
    "few-tiles": (Sizes(128, 256, 4, 2, 128), 8, ops.Mixture(1, sigmoid=False, normalized=False, scale=1.0)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 700])
@pytest.mark.parametrize("shape", EXPERTS)
@pytest.mark.parametrize(("form", "dtype"), with_dtypes(MIXTURES, bfloat16_alone=["fp8", "fp8-patches"]), ids=str)
def test_kernel_of_a_mixture(hopper, form, dtype, shape, length):
    sizes, num_experts, mixture = EXPERTS[shape]
    plain = make_weights(sizes, head_norms=shape != "mixtral", bias=shape == "sigmoid")
    before = placed(make_step(sizes, [length]), dtype, "cuda")
    for seed in range(20):
        weights = placed_weights(MIXTURES[form](with_experts(plain, num_experts, mixture, seed=seed)), dtype, "cuda")
        assert ops.few_layers_rows(weights, num_kv_heads=sizes.num_kv_heads, head_dim=128) == 1
        memory = ops.few_layers_memory(weights, num_kv_heads=sizes.num_kv_heads)
        step, again = placed(before, dtype, "cuda"), placed(before, dtype, "cuda")
        run(step, weights, memory)
        run(again, weights, memory)
        assert torch.equal(step.residual, again.residual)
        try:
            check(step, before, weights, tolerance=2e-2 if dtype == torch.bfloat16 else 3e-3)
        except AssertionError as error:
            if "too close" not in str(error):
                raise
            continue
        return
    pytest.fail("no seed gives a choice of experts that does not hang on rounding")


@pytest.mark.gpu
def test_patches_of_fp8_have_no_kernel_in_float16(hopper):
    sizes, num_experts, mixture = EXPERTS["qwen3"]
    dense = make_weights(sizes, head_norms=True, bias=False)
    experts = with_experts(dense, num_experts, mixture, seed=0)
    for weights in (in_fp8_patches(dense), in_fp8_patches(experts), codes_and_experts(experts)):
        for dtype, fits in ((torch.bfloat16, True), (torch.float16, False)):
            cast_weights = placed_weights(weights, dtype, "cuda")
            assert (ops.few_layers_rows(cast_weights, num_kv_heads=sizes.num_kv_heads, head_dim=128) > 0) == fits


@pytest.mark.gpu
def test_experts_of_other_sizes_have_no_kernel(hopper):
    sizes, num_experts, mixture = EXPERTS["qwen3"]
    for other in (sizes._replace(width=704), sizes._replace(head_dim=64)):
        weights = with_experts(make_weights(other, head_norms=True, bias=False), 8, mixture, seed=0)
        weights = placed_weights(weights, torch.bfloat16, "cuda")
        assert ops.few_layers_rows(weights, num_kv_heads=4, head_dim=other.head_dim) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_every_time_and_for_any_rows_beside(hopper, form):
    sizes = SHAPES["group-of-two"]
    weights = FORMS[form](make_weights(sizes, head_norms=True, bias=False))
    weights = placed_weights(weights, torch.bfloat16, "cuda")
    memory = ops.few_layers_memory(weights, num_kv_heads=sizes.num_kv_heads)
    before = placed(make_step(sizes, [90, 700, 20, 300]), torch.bfloat16, "cuda")
    first = placed(before, torch.bfloat16, "cuda")
    run(first, weights, memory)
    for rows in (1, 2, 4, 3, 4, 1):  # The memory is the same for all.
        step = placed(before, torch.bfloat16, "cuda")
        few = [x[:rows] for x in (step.residual, step.positions, step.slot_mapping, step.seq_lens, step.block_table)]
        ops.few_layers(few[0], weights, step.k_caches, step.v_caches, *few[1:], step.cos_sin, *memory)
        assert torch.equal(step.residual[:1], first.residual[:1])
        if rows == 4:
            assert torch.equal(step.residual, first.residual)


@pytest.mark.gpu
@pytest.mark.parametrize("seq_lens", [[32, 40], [640, 700, 641], [16, 17, 33, 300]], ids=str)
def test_a_row_sees_what_another_stores_in_the_same_step(hopper, seq_lens):
    sizes = SHAPES["group-of-two"]
    weights = placed_weights(make_weights(sizes, head_norms=True, bias=True), torch.bfloat16, "cuda")
    before = make_step(sizes, seq_lens)
    shared = seq_lens[0] // BLOCK_SIZE  # The first row's token fills a block, which the others have.
    before.block_table[1:, :shared] = before.block_table[0, :shared]
    before = placed(before, torch.bfloat16, "cuda")
    step = placed(before, torch.bfloat16, "cuda")
    run(step, weights, ops.few_layers_memory(weights, num_kv_heads=sizes.num_kv_heads))
    check(step, before, weights, tolerance=2e-2)


@pytest.mark.gpu
def test_a_graph_runs_it_again_and_again(hopper):
    sizes = SHAPES["group-of-eight"]
    weights = placed_weights(make_weights(sizes, head_norms=True, bias=True), torch.bfloat16, "cuda")
    memory = ops.few_layers_memory(weights, num_kv_heads=sizes.num_kv_heads)
    before = placed(make_step(sizes, [41, 500]), torch.bfloat16, "cuda")
    eager, step = placed(before, torch.bfloat16, "cuda"), placed(before, torch.bfloat16, "cuda")
    run(eager, weights, memory)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(step, weights, memory)
    for _ in range(300):
        step.residual.copy_(before.residual)
        graph.replay()
    assert torch.equal(step.residual, eager.residual)


@pytest.mark.gpu
def test_a_token_outside_of_the_cache_is_not_stored(hopper):
    weights = placed_weights(make_weights(SMALL, head_norms=False, bias=False), torch.bfloat16, "cuda")
    memory = ops.few_layers_memory(weights, num_kv_heads=SMALL.num_kv_heads)
    before = placed(make_step(SMALL, [10, 20]), torch.bfloat16, "cuda")
    step = placed(before, torch.bfloat16, "cuda")
    run(step._replace(slot_mapping=torch.full_like(step.slot_mapping, -1)), weights, memory)
    for ours, theirs in zip(step.k_caches + step.v_caches, before.k_caches + before.v_caches, strict=True):
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.gpu
def test_codes_need_rows_of_sixteen_numbers(hopper):
    sizes = SHAPES["odd-widths"]
    weights = placed_weights(in_codes(make_weights(sizes, head_norms=False, bias=False)), torch.bfloat16, "cuda")
    assert ops.few_layers_rows(weights, num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim) == 0


@pytest.mark.gpu
def test_large_numbers_stay_finite_in_codes(hopper):
    """Rows of bfloat16 may be larger than float16 holds."""
    sizes = SHAPES["group-of-eight"]
    weights = placed_weights(in_codes(make_weights(sizes, head_norms=True, bias=False)), torch.bfloat16, "cuda")
    norms = [norm * 3e2 if number % 2 else norm for number, norm in enumerate(weights.norms)]
    weights = replace(weights, norms=norms)  # before MLPs, whose activations are their square then
    before = placed(make_step(sizes, [40]), torch.bfloat16, "cuda")
    step = placed(before, torch.bfloat16, "cuda")
    run(step, weights, ops.few_layers_memory(weights, num_kv_heads=sizes.num_kv_heads))
    check(step, before, weights, tolerance=2e-2)


@pytest.mark.gpu
def test_what_it_does_not_take_is_refused(hopper):
    weights = placed_weights(make_weights(SMALL, head_norms=False, bias=False), torch.bfloat16, "cuda")
    memory = ops.few_layers_memory(weights, num_kv_heads=SMALL.num_kv_heads)
    step = placed(make_step(SMALL, [3] * 5), torch.bfloat16, "cuda")
    with pytest.raises(RuntimeError, match="does not take 5 rows"):
        run(step, weights, memory)
    step = placed(make_step(SMALL, [3]), torch.bfloat16, "cuda")
    with pytest.raises(RuntimeError, match="norms has 5 tensors"):
        run(step, replace(weights, norms=weights.norms[1:]), memory)
