"""A KV cache of 8-bit floats, which are called codes: store_kv, rope_store and paged_attention, whose unused slots hold
NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raylm import ops
from tests.ops.op_reference import DTYPES, TOLERANCES, close, rms_norm, rotary
from tests.ops.test_op_paged_attention import HALVES, MIXED, ON_CUDA, Case, make_case

EVERYWHERE = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(("fallback", "cpu"), id="fallback-cpu"),
        pytest.param(("fallback", "cuda"), id="fallback-cuda", marks=pytest.mark.gpu),
        pytest.param(("extension", "cuda"), id="extension-cuda", marks=pytest.mark.gpu),
    ],
    indirect=True,
)
"""The extension has no kernels for CPUs."""

K_SCALE, V_SCALE = 0.05, 0.37
SLOTS = [5, 0, 13, 22, 7]
BLOCK_SIZE, NUM_BLOCKS = 4, 6
NUMBERS = torch.arange(256, dtype=torch.uint8).view(ops.CODES).double()
"""Of every code; two are NaN."""


def in_codes(x: torch.Tensor, scale: float) -> torch.Tensor:
    """As codes, a NaN as one."""
    return (x.float() / scale).clamp(-448, 448).to(ops.CODES)


def assert_nearest(codes: torch.Tensor, x: torch.Tensor, scale: float) -> None:
    """Each code is as near to x / scale as any other, but for a rounding of the quotient."""
    numbers = NUMBERS[NUMBERS.isfinite()]
    wanted = (x.double().cpu() / scale).flatten()
    best = (wanted.unsqueeze(1) - numbers).abs().amin(1)
    assert ((codes.double().cpu().flatten() - wanted).abs() <= best + 1e-6 * wanted.abs()).all()


def coded(case: Case, k_scale: float = K_SCALE, v_scale: float = V_SCALE) -> Case:
    """The same sequences with caches of codes; keys and values of the reference are what these say."""
    return replace(
        case,
        k_cache=in_codes(case.k_cache, k_scale),
        v_cache=in_codes(case.v_cache, v_scale),
        keys=[in_codes(keys, k_scale).double() * k_scale for keys in case.keys],
        values=[in_codes(values, v_scale).double() * v_scale for values in case.values],
    )


def attend(op, case: Case, **options) -> torch.Tensor:
    return op("paged_attention")(*case.arguments(**options), k_scale=K_SCALE, v_scale=V_SCALE)


def empty_caches(num_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    shape = (NUM_BLOCKS, BLOCK_SIZE, num_heads, head_dim)
    return [torch.full(shape, -1.0, device=device).to(dtype) for _ in range(2)]


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 64), (1, 80), (8, 128), (2, 5)])
def test_keys_and_values_become_the_nearest_codes(op, device, dtype, num_heads, head_dim):
    fused = torch.randn(5, 4 * num_heads * head_dim).to(device, dtype)
    fused[0] *= 1e-3  # among the smallest codes, which have less than 3 bits
    k, v = (x.unflatten(-1, (num_heads, head_dim)) for x in fused.chunk(4, dim=-1)[1:3])
    caches = empty_caches(num_heads, head_dim, ops.CODES, device)
    slots = torch.tensor(SLOTS, device=device)
    op("store_kv")(k, v, *caches, slots, k_scale=K_SCALE, v_scale=V_SCALE)
    for cache, x, scale in zip(caches, (k, v), (K_SCALE, V_SCALE), strict=True):
        rows = cache.cpu().view(torch.uint8).flatten(0, 1)
        assert_nearest(rows[SLOTS].view(ops.CODES), x, scale)
        others = [slot for slot in range(len(rows)) if slot not in SLOTS]
        assert (rows[others].view(ops.CODES).float() == -1).all()


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_too_large_becomes_the_largest_code(op, device, dtype):
    k = torch.tensor([448 * 2.0, 60000.0, -60000.0, float("inf"), float("-inf"), float("nan"), 470.0, 1e-7])
    k = k.view(1, 1, 8).to(device, dtype)
    caches = empty_caches(1, 8, ops.CODES, device)
    op("store_kv")(k, k, *caches, torch.tensor([6], device=device), k_scale=1.0, v_scale=2.0)
    keys, values = (cache.cpu().float().flatten(0, 1)[6, 0] for cache in caches)
    assert keys[:5].tolist() == [448, 448, -448, 448, -448] and values[:5].tolist() == [448, 448, -448, 448, -448]
    assert keys[5].isnan() and values[5].isnan()
    assert keys[6:].tolist() == [448, 0] and values[6:].tolist() == [240, 0]


@EVERYWHERE
def test_caches_of_codes_may_be_interleaved(op, device):
    both = torch.zeros(4, 2, 4, 1, 16, device=device).to(ops.CODES)
    k, v = torch.randn(5, 1, 16, device=device), torch.randn(5, 1, 16, device=device)
    slots = torch.tensor([1, 4, 6, 9, 15], device=device)
    op("store_kv")(k, v, both[:, 0], both[:, 1], slots, k_scale=0.5, v_scale=0.25)
    numbers = both.float()
    assert torch.equal(numbers[:, 0].flatten(0, 1)[slots], in_codes(k, 0.5).float())
    assert torch.equal(numbers[:, 1].flatten(0, 1)[slots], in_codes(v, 0.25).float())


@EVERYWHERE
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 128, 128), (9, 3, 64, 64), (4, 1, 256, 256), (2, 2, 80, 80), (4, 2, 16, 8), (3, 1, 128, 32)],
)
def test_rotated_keys_as_codes(op, device, num_heads, num_kv_heads, head_dim, rotary_dim, dtype, norm):
    """The codes are those of what the same call puts into a cache of numbers; queries do not know."""
    generator = torch.Generator().manual_seed(4)
    fused = torch.randn(5, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(device, dtype)
    weights = [(torch.randn(head_dim, generator=generator) + 1).to(device, dtype) if norm else None for _ in range(2)]
    angles = torch.arange(32)[:, None] / 100 ** (torch.arange(rotary_dim // 2) / rotary_dim)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
    positions, slots = (torch.tensor(x, device=device) for x in ([0, 1, 31, 7, 7], SLOTS))
    found = {}
    for kind in (dtype, ops.CODES):
        q, k, v = fused.clone().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        caches = empty_caches(num_kv_heads, head_dim, kind, device)
        scales = {"k_scale": K_SCALE, "v_scale": V_SCALE} if kind == ops.CODES else {}
        op("rope_store")(q, k, v, *weights, 1e-5, positions, table, *caches, slots, **scales)
        found[kind] = q, *(cache.float().flatten(0, 1)[slots] for cache in caches)
    q, keys, values = found[dtype]
    assert torch.equal(found[ops.CODES][0], q)
    assert torch.equal(found[ops.CODES][1], in_codes_of_inverse(keys, K_SCALE).float())
    assert torch.equal(found[ops.CODES][2], in_codes_of_inverse(values, V_SCALE).float())
    k = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)[1]
    exact = rotary(k.double() if weights[1] is None else rms_norm(k, weights[1], 1e-5), positions, table)
    allowed = (1 / 16 + TOLERANCES[dtype]) * exact.abs() + TOLERANCES[dtype] + K_SCALE / 512
    assert ((found[ops.CODES][1].double() * K_SCALE - exact).abs() <= allowed).all()


def in_codes_of_inverse(x: torch.Tensor, scale: float) -> torch.Tensor:
    """As the kernels round: the quotient is a product of 32 bits."""
    return (x * torch.tensor(1 / scale, dtype=torch.float32, device=x.device)).clamp(-448, 448).to(ops.CODES)


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 128, 192, 256])
def test_mixed_batch(op, device, dtype, head_dim):
    case = coded(make_case(MIXED, head_dim=head_dim, dtype=dtype, device=device))
    out = attend(op, case)
    assert out.dtype == dtype and out.shape == case.q.shape and out.is_contiguous()
    close(out, case.expected())


@EVERYWHERE
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("block_size", [1, 12, 32])
def test_groups_and_block_sizes(op, device, heads, block_size, dtype):
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "block_size": block_size}
    case = coded(make_case(MIXED, **shape, dtype=dtype, device=device))
    close(attend(op, case), case.expected())


@EVERYWHERE
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (1, 0.0), (16, 2.0), (70, 2.0)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "lengths", [MIXED, [(1, 600), (1, 1300), (1, 2)], [(150, 150), (90, 213), (16, 140), (3, 700)]], ids=str
)
def test_window_and_soft_cap(op, device, lengths, head_dim, window, soft_cap, dtype):
    case = coded(make_case(lengths, num_heads=3, num_kv_heads=1, head_dim=head_dim, dtype=dtype, device=device))
    options = {"window": window, "soft_cap": soft_cap}
    close(attend(op, case, **options), case.expected(**options))


@EVERYWHERE
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(
    "lengths",
    [MIXED, [(1, 1300), (1, 2)], [(150, 150), (90, 213), (16, 140), (3, 700)]],
    ids=["mixed", "split", "long"],
)
def test_sinks(op, device, lengths, window, dtype):
    case = coded(make_case(lengths, num_heads=8, num_kv_heads=2, dtype=dtype, device=device))
    options = {"window": window, "sinks": case.sinks()}
    close(attend(op, case, **options), case.expected(**options))


@EVERYWHERE
def test_linear_biases(op, device):
    case = coded(make_case([(1, 600), (40, 90), (7, 29)], num_heads=9, num_kv_heads=3, dtype=HALVES[0], device=device))
    close(attend(op, case, alibi_slopes=case.slopes()), case.expected(alibi_slopes=case.slopes()))


@ON_CUDA
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (4, 1), (8, 1), (40, 2), (71, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("block_size", [16, 48])
def test_one_to_sixteen_queries(op, device, block_size, head_dim, heads, dtype):
    lengths = [(n, 15 * n + 40) for n in range(1, 17)] + [(1, 3000), (0, 5)]
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "block_size": block_size}
    case = coded(make_case(lengths, **shape, dtype=dtype, device=device))
    close(attend(op, case), case.expected())


@ON_CUDA
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(16, 4), (4, 4)], ids=str)
@pytest.mark.parametrize(("num_seqs", "longest"), [(1, 9000), (64, 1500), (400, 300)])
def test_decode_of_few_and_many_sequences(op, device, num_seqs, longest, heads, head_dim):
    lengths = [(1, longest - s * 37 % (longest // 2)) for s in range(num_seqs)]
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    case = coded(make_case(lengths, **shape, dtype=torch.bfloat16, device=device))
    close(attend(op, case), case.expected())


@ON_CUDA
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [16, 20, 48, 256])
@pytest.mark.parametrize("window", [0, 50, 1000])
def test_prefill_of_long_prompts(op, device, window, block_size, head_dim, dtype):
    lengths = [(257, 511), (128, 1000), (64, 64), (1000, 1000), (17, 3000), (1, 40), (0, 3)]
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": head_dim, "block_size": block_size}
    case = coded(make_case(lengths, **shape, dtype=dtype, device=device))
    close(attend(op, case, window=window), case.expected(window=window))


@ON_CUDA
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_of_many_prompts(op, device, head_dim):
    """More tiles than multiprocessors, several of a few steps each and rows past the last sequence."""
    lengths = [(20 + 7 * s % 300, 20 + 7 * s % 300 + 31 * s % 500) for s in range(150)]
    shape = {"num_heads": 8, "num_kv_heads": 4, "head_dim": head_dim}
    case = coded(make_case(lengths, **shape, dtype=torch.bfloat16, device=device))
    padded = replace(case, q=torch.cat([case.q, case.q[:100]]))
    out = attend(op, padded)
    close(out[: len(case.q)], case.expected())
    assert (out[len(case.q) :] == 0).all()


@ON_CUDA
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_seqs", [14, 30])
def test_decode_of_about_as_many_sequences_as_blocks(op, device, num_seqs, head_dim):
    lengths = [(1 + s % 2, 1200 - 53 * s % 600) for s in range(num_seqs)]
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": head_dim}
    case = coded(make_case(lengths, **shape, dtype=torch.bfloat16, device=device))
    close(attend(op, case), case.expected())


@ON_CUDA
def test_queries_past_halfs_range(op, device):
    """The kernel takes queries as half: what bfloat16 has beyond that is bounded, and does not become infinite."""
    case = coded(make_case([(1, 70), (3, 40)], dtype=torch.bfloat16, device=device))
    q = torch.zeros_like(case.q)
    q[..., 0] = 1e6
    case = replace(case, q=q)
    close(attend(op, case), case.expected())


@ON_CUDA
def test_a_graph_of_long_sequences_replays_short_ones(op, device):
    case = coded(make_case([(1, 70), (2, 9), (0, 5), (1, 600)], dtype=torch.bfloat16, device=device))
    arguments = list(case.arguments())
    arguments[6:8] = 16, 100_000
    starts, lens = case.query_start.clone(), case.seq_lens.clone()
    case.query_start.copy_(torch.tensor([0, 1, 2, 3, 4]))
    case.seq_lens.copy_(torch.tensor([70, 9, 5, 30]))
    scales = {"k_scale": K_SCALE, "v_scale": V_SCALE}
    op("paged_attention")(*arguments, **scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op("paged_attention")(*arguments, **scales)
    case.query_start.copy_(starts)
    case.seq_lens.copy_(lens)
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        close(out, case.expected())


@ON_CUDA
def test_which_kernels_there_are(op, device):
    q = torch.empty(0, 32, 128, dtype=torch.bfloat16, device=device)
    assert ops.attention_kernels(q, 8, 16, biased=False, codes=True) == (True, True)
    assert ops.attention_kernels(q, 8, 16, biased=True, codes=True) == (False, False)
    assert ops.attention_kernels(q[..., :80], 8, 16, biased=False, codes=True) == (True, False)
    assert ops.attention_kernels(q[..., :72], 8, 16, biased=False, codes=True) == (False, False)
    assert ops.attention_kernels(q.float(), 8, 16, biased=False, codes=True) == (False, False)


@ON_CUDA
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_positive_numbers(op, device, scale):
    case = coded(make_case([(1, 5)], dtype=torch.bfloat16, device=device))
    with pytest.raises(RuntimeError, match="paged_attention: v_scale is .*, must be positive and finite"):
        op("paged_attention")(*case.arguments(), v_scale=scale)
    with pytest.raises(RuntimeError, match="store_kv: k_scale is .*, must be positive and finite"):
        k = torch.zeros(1, 2, 64, dtype=torch.bfloat16, device=device)
        op("store_kv")(k, k, case.k_cache, case.v_cache, torch.tensor([0], device=device), k_scale=scale)


@EVERYWHERE
def test_functions_of_ops_take_codes(implementation, device):
    """On CPUs torch's version computes, beside an extension too."""
    case = coded(make_case(MIXED, device=device))
    out = ops.paged_attention(*case.arguments(), k_scale=K_SCALE, v_scale=V_SCALE)
    close(out, case.expected())
    k, slots = torch.randn(2, 2, 64, device=device), torch.tensor([3, 4], device=device)
    ops.store_kv(k, k, case.k_cache, case.v_cache, slots, k_scale=0.5, v_scale=0.25)
    assert torch.equal(case.k_cache.float().flatten(0, 1)[slots], in_codes(k, 0.5).float())
    table = torch.cat([torch.ones(8, 32), torch.zeros(8, 32)], dim=-1).to(device)
    positions = torch.tensor([1, 7], device=device)
    ops.rope_store(
        *(k.clone(), k.clone(), k, None, None, 1e-5, positions, table, case.k_cache, case.v_cache, slots + 4),
        k_scale=0.5,
        v_scale=0.25,
    )
    assert torch.equal(case.v_cache.float().flatten(0, 1)[slots + 4], in_codes(k, 0.25).float())
