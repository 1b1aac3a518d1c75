"""raylm::block_linear, block_gated_linear, decode_blocks and block_kernels."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm import ops
from tests.ops.block_cases import HALVES, KINDS, decoded, exact_rows, quantisation_bound, random_blocks, values_of
from tests.ops.op_reference import DTYPES, gated

pytestmark = pytest.mark.operators("block_linear", "block_gated_linear")

BY_NAME = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _close(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """As near to the float64 product as float32 arithmetic and the rounding to the result's dtype allow."""
    expected = x.double() @ weight.t()
    sizes = x.double().abs() @ weight.abs().t()
    if bias is not None:
        expected, sizes = expected + bias.double(), sizes + bias.double().abs()
    # A sum of offsets and codes is larger than the weights. Rows in 16-bit floats are not exact in 16-bit integers.
    bound = 2e-6 * sizes + torch.finfo(out.dtype).eps * expected.abs()
    if x.dtype != torch.float32:
        bound += quantisation_bound(x, weight)
    assert out.shape == expected.shape
    assert ((out.double() - expected).abs() <= bound).all()


@BY_NAME
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "out_size", "num_blocks", "bias"), [(1, 1, 1, False), (5, 23, 3, True)])
def test_every_kind_and_dtype(op, device, kind, dtype, rows, out_size, num_blocks, bias):
    blocks, x = random_blocks(kind, out_size, num_blocks), exact_rows(rows, num_blocks * values_of(kind)).to(dtype)
    b = _random(out_size).to(dtype) if bias else None
    out = op("block_linear")(x.to(device), [blocks.to(device)], [kind], b if b is None else b.to(device)).cpu()
    assert out.dtype == dtype
    _close(out, x, decoded(blocks, kind), b)


@BY_NAME
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 4096), (2, 256), (3, 768), (4, 512), (16, 1280), (70, 2304), (130, 256)]
)
def test_more_rows_and_longer_rows(op, device, kind, rows, size):
    blocks, x = random_blocks(kind, 40, size // values_of(kind)), exact_rows(rows, size)
    _close(op("block_linear")(x.to(device), [blocks.to(device)], [kind], None).cpu(), x, decoded(blocks, kind))


@BY_NAME
@pytest.mark.parametrize("code", [32767, -32767])
def test_the_largest_codes_do_not_overflow(op, device, kind, code):
    """All bits of all codes set, or none, and every x at its largest."""
    size = max(256, values_of(kind))
    blocks = random_blocks(kind, 2, size // values_of(kind)).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    plain = random_blocks(kind, 1, 1)[0]
    blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :] = 0xFF, 0x80
    for offset in HALVES[kind] or (0,):
        end = offset + (2 if HALVES[kind] else 1)
        blocks[:, offset:end] = plain[offset:end]
    blocks = blocks.reshape(2, -1)
    x = torch.full((3, size), float(code))
    _close(op("block_linear")(x.to(device), [blocks.to(device)], [kind], None).cpu(), x, decoded(blocks, kind))


@BY_NAME
@pytest.mark.parametrize("rows", [1, 6])
def test_any_x_within_what_16_bits_cost(op, device, kind, rows):
    blocks, x = random_blocks(kind, 33, 1536 // values_of(kind)), _random(rows, 1536)
    weight = decoded(blocks, kind)
    out = op("block_linear")(x.to(device), [blocks.to(device)], [kind], None).cpu()
    expected = x.double() @ weight.t()
    sizes = x.double().abs() @ weight.abs().t()
    assert ((out.double() - expected).abs() <= 1.001 * quantisation_bound(x, weight) + 2e-6 * sizes).all()
    assert (out.double() - expected).norm() / expected.norm() < 1e-4


def test_several_weights_of_different_kinds_and_strided_rows(op, device):
    kinds, sizes = [Kind.Q4_K, Kind.Q6_K, Kind.Q8_0, Kind.Q4_0], [30, 17, 8, 16]
    wide = [random_blocks(kind, n, 3 * 256 // values_of(kind)) for kind, n in zip(kinds, sizes, strict=True)]
    first = [gguf.GGML_QUANT_SIZES[kind][1] * 256 // values_of(kind) for kind in kinds]
    blocks = [part[:, start : 3 * start].to(device) for part, start in zip(wide, first, strict=True)]
    bias = _random(sum(sizes))
    x = torch.cat([_random(5, 96), exact_rows(5, 512), _random(5, 9)], dim=1)[:, 96:608]
    out = op("block_linear")(x.to(device), blocks, kinds, bias.to(device)).cpu()
    weight = torch.cat([decoded(part.cpu(), kind) for part, kind in zip(blocks, kinds, strict=True)])
    _close(out, x, weight, bias)


def test_leading_dimensions_and_no_rows(op, device):
    blocks = random_blocks(Kind.Q4_0, 20, 4).to(device)
    x = exact_rows(6, 128)
    out = op("block_linear")(x.reshape(2, 3, 128).to(device), [blocks], [Kind.Q4_0], None).cpu()
    assert out.shape == (2, 3, 20)
    _close(out.flatten(0, 1), x, decoded(blocks.cpu(), Kind.Q4_0))
    assert op("block_linear")(x[:0].to(device), [blocks], [Kind.Q4_0], None).shape == (0, 20)
    assert op("block_linear")(x.to(device), [blocks[:0]], [Kind.Q4_0], None).shape == (6, 0)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "kinds", "bias"),
    [(1, 24, (Kind.Q4_K, Kind.Q4_K), False), (7, 19, (Kind.Q4_1, Kind.Q8_0), True), (66, 40, (Kind.Q6_K,) * 2, True)],
)
def test_gated(op, device, activation, dtype, rows, width, kinds, bias):
    blocks = [random_blocks(kind, width, 512 // values_of(kind), seed) for seed, kind in enumerate(kinds)]
    # Products of about 1: where activations bend.
    x = (exact_rows(rows, 512) / 2**5).to(dtype)
    b = _random(2 * width).to(dtype) if bias else None
    out = op("block_gated_linear")(
        x.to(device),
        [part.to(device) for part in blocks],
        kinds,
        b if b is None else b.to(device),
        activation == "gelu_tanh",
    ).cpu()
    product = x.double() @ torch.cat([decoded(part, kind) for part, kind in zip(blocks, kinds, strict=True)]).t()
    expected = gated(product if b is None else product + b.double(), activation)
    assert out.shape == (rows, width) and out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=2 * torch.finfo(dtype).eps + 1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.Q6_K], ids=lambda kind: kind.name)
def test_a_bad_row_stays_where_it_is(op, device, kind, bad):
    blocks, x = random_blocks(kind, 20, 512 // values_of(kind)), exact_rows(5, 512)
    x[2, 300] = bad
    blocks[7].view(-1, gguf.GGML_QUANT_SIZES[kind][1])[:] = torch.tensor([0xFF], dtype=torch.uint8)
    out = op("block_linear")(x.to(device), [blocks.to(device)], [kind], None).cpu()
    fine = torch.ones(5, 20, dtype=torch.bool)
    fine[2], fine[:, 7] = False, False
    assert torch.isfinite(out[fine]).all() and not torch.isfinite(out[~fine]).any()


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-40, 1e30])
def test_x_at_the_ends_of_float32(op, device, value):
    blocks = random_blocks(Kind.Q4_0, 20, 4)
    x = exact_rows(3, 128)
    x[1] = value
    out = op("block_linear")(x.to(device), [blocks.to(device)], [Kind.Q4_0], None).cpu()
    _close(out[::2], x[::2], decoded(blocks, Kind.Q4_0))
    if value < 1:
        assert (out[1].abs() < 1e-25).all()
    else:
        assert torch.isfinite(out[1]).all()


@BY_NAME
def test_a_row_does_not_depend_on_the_rows_beside_it(needs_block_kernels, kind):
    blocks, x = random_blocks(kind, 50, 2304 // values_of(kind)), _random(140, 2304)
    together = ops.block_linear(x, [blocks], [kind])
    for rows in (1, 2, 3, 5, 64):
        assert torch.equal(ops.block_linear(x[:rows], [blocks], [kind]), together[:rows])


@BY_NAME
@pytest.mark.operators("decode_blocks")
@pytest.mark.parametrize(("rows", "num_blocks"), [(1, 1), (3, 5), (40, 2), (0, 2)])
def test_decoded_as_the_gguf_package_does(op, device, kind, rows, num_blocks):
    blocks = random_blocks(kind, rows + 1, num_blocks)[:rows]
    out = op("decode_blocks")(blocks.to(device), kind).cpu()
    assert out.shape == (rows, num_blocks * values_of(kind))
    assert torch.equal(out, decoded(blocks, kind).float()) if rows else out.dtype == torch.float32


@pytest.mark.operators("decode_blocks")
def test_decoded_from_strided_rows(op, device):
    wide = random_blocks(Kind.Q5_K, 6, 3)
    blocks = wide[::2, 176:352]
    assert torch.equal(op("decode_blocks")(blocks.to(device), Kind.Q5_K).cpu(), decoded(blocks, Kind.Q5_K).float())


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_any_bytes_are_decoded_as_the_gguf_package_does(kind, data):
    num_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.frombuffer(data.draw(st.binary(min_size=num_bytes, max_size=num_bytes)), dtype=np.uint8).copy()
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw.reshape(1, -1), kind)
    out = ops.decode_blocks(torch.from_numpy(raw).reshape(1, -1), kind).numpy()
    assert np.array_equal(out, expected, equal_nan=True)


def test_kinds_without_kernels_are_decoded_first():
    kind = Kind.TQ2_0
    weight = _random(12, 256).numpy()
    blocks = torch.from_numpy(gguf.quantize(weight, kind))
    assert not ops.block_kernels(blocks, kind)
    x = _random(3, 256)
    mixed = ops.block_linear(x, [blocks, random_blocks(Kind.Q4_0, 8, 8)], [kind, Kind.Q4_0])
    expected = x.double() @ decoded(blocks, kind).t()
    torch.testing.assert_close(mixed[:, :12].double(), expected, atol=1e-3, rtol=1e-4)
    assert torch.equal(ops.decode_blocks(blocks, kind), decoded(blocks, kind).float())
    out = ops.block_gated_linear(x, [blocks, blocks], [kind, kind], "silu")
    torch.testing.assert_close(out.double(), gated(expected.repeat(1, 2), "silu"), atol=1e-3, rtol=1e-4)


def test_opcheck():
    x, blocks = exact_rows(3, 256), [random_blocks(Kind.Q4_K, 8, 1), random_blocks(Kind.Q8_0, 8, 8)]
    kinds = [int(Kind.Q4_K), int(Kind.Q8_0)]
    torch.library.opcheck(torch.ops.raylm.block_linear.default, (x, blocks, kinds, _random(16)))
    torch.library.opcheck(torch.ops.raylm.block_gated_linear.default, (x, blocks, kinds, None, True))
    torch.library.opcheck(torch.ops.raylm.decode_blocks.default, (blocks[1], kinds[1]))


def test_a_number_that_is_no_type_is_refused():
    with pytest.raises(ValueError, match="99 is not a valid GGMLQuantizationType"):
        ops.decode_blocks(torch.zeros(1, 18, dtype=torch.uint8), 99)
    with pytest.raises((ValueError, RuntimeError), match="blocks has rows of 19 bytes, must be a multiple of the 18"):
        ops.decode_blocks(torch.zeros(1, 19, dtype=torch.uint8), Kind.Q4_0)


def test_bad_arguments_are_named(needs_block_kernels):
    x, blocks, kind = exact_rows(3, 512), random_blocks(Kind.Q4_K, 8, 2), int(Kind.Q4_K)
    other = random_blocks(Kind.Q4_K, 8, 4)[:, ::2]
    linear, both = torch.ops.raylm.block_linear.default, torch.ops.raylm.block_gated_linear.default
    for match, arguments in (
        (r"blocks\[0\] has size 288 in dimension 1, must have 432", (_random(3, 768), [blocks], [kind], None)),
        ("dimension of x is 500, must be a multiple of the 256 values of a Q4_K", (x[:, :500], [blocks], [kind], None)),
        ("block_linear: kind 35 has no kernel", (x, [blocks], [35], None)),
        ("block_linear: kinds has 2 numbers for 1 tensors", (x, [blocks], [kind, kind], None)),
        ("block_linear: blocks has no tensors", (x, [], [], None)),
        (r"blocks\[1\] is another dtype, must be uint8", (x, [blocks, blocks.char()], [kind, kind], None)),
        (r"block_linear: blocks\[0\] has stride 2 in its last dimension", (x, [other], [kind], None)),
        ("block_linear: bias has size 7 in dimension 0, must have 8", (x, [blocks], [kind], _random(7))),
        ("block_linear: bias is float16, must be float32", (x, [blocks], [kind], _random(8).half())),
        ("block_linear: x is float64, must be float32", (x.double(), [blocks], [kind], None)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=match):
            linear(*arguments)
    with pytest.raises(RuntimeError, match="block_gated_linear: blocks has 1 tensors, must have 2: gate and up"):
        both(x, [blocks], [kind], None, False)
    with pytest.raises(RuntimeError, match=r"block_gated_linear: blocks\[1\] has size 7 in dimension 0, must have 8"):
        both(x, [blocks, blocks[:7]], [kind, kind], None, False)
    with pytest.raises(RuntimeError, match="decode_blocks: kind 35 has no kernel; block_kernels says which have one"):
        torch.ops.raylm.decode_blocks(blocks, 35)


def test_which_kinds_have_kernels(needs_block_kernels):
    like = torch.empty(0)
    assert [kind for kind in Kind if ops.block_kernels(like, kind)] == sorted(KINDS)
