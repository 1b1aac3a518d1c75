"""The operators of raylm.ops.invariant: right, and equal to the bit whatever else they are given."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from raylm import ops
from raylm.ops import extension
from tests.ops.devices import ON_CUDA
from tests.ops.op_reference import close
from tests.ops.test_op_paged_attention import MIXED, Case, make_case

pytestmark = pytest.mark.operators("invariant_linear", "invariant_attention")

ROWS = 1100
SLICES = [(0, 1), (5, 6), (0, 7), (3, 35), (0, 64), (9, 74), (64, 193), (1, 257), (100, 612), (76, 1100)]
"""Rows of a step that are a step of their own: fewer than tiles have, as many, and more."""
SIZES = [(8, 128), (320, 136), (1000, 520), (136, 4096)]
"""Rows and columns of weights that the kernel takes; of some columns, stages are not full."""
FORMS = [{}, {"window": 24}, {"window": 150, "soft_cap": 20.0}, {"slopes": True}, {"sinks": True, "window": 9}]
CUTS = [(0, 1), (40, 41), (0, 60), (60, 77), (17, 160), (130, 331), (299, 300), (331, 400), (64, 320)]
"""Queries of a sequence that are a step of their own: a token, decode, chunks."""
LENGTH = 400
HEADS = {"num_heads": 4, "num_kv_heads": 2}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _dtypes(device: str) -> list[torch.dtype]:
    return [torch.float32] if device == "cpu" else [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 33, 65, 300])
@pytest.mark.parametrize(("out_size", "in_size"), SIZES)
def test_linear_matches_reference(op, device, rows, out_size, in_size, bias):
    for dtype in _dtypes(device):
        x, weight = _random(rows, in_size).to(device, dtype), _random(out_size, in_size).to(device, dtype)
        b = _random(out_size).to(device, dtype) if bias else None
        expected = x.double() @ weight.double().t() + (b.double() if b is not None else 0)
        out = op("invariant_linear")(x, weight, b)
        assert out.dtype == dtype and out.is_contiguous()
        close(out, expected, scale=in_size**0.5)


@pytest.mark.parametrize(("out_size", "in_size"), SIZES)
def test_a_row_has_the_same_bits_among_any_others(op, device, out_size, in_size):
    for dtype in _dtypes(device):
        x, weight = _random(ROWS, in_size).to(device, dtype), _random(out_size, in_size).to(device, dtype)
        bias = _random(out_size).to(device, dtype)
        whole = op("invariant_linear")(x, weight, bias)
        for first, end in SLICES:
            assert torch.equal(op("invariant_linear")(x[first:end], weight, bias), whole[first:end]), (first, end)


@ON_CUDA
@pytest.mark.parametrize(
    ("out_size", "in_size"), [(4096, 1024), (6144, 4096), (28672, 4096), (4096, 14336), (151936, 1024)]
)
def test_so_it_has_with_the_weights_of_real_models(op, device, out_size, in_size):
    x = _random(ROWS, in_size).to(device, torch.bfloat16)
    weight = torch.randn(out_size, in_size, device=device, dtype=torch.bfloat16)
    whole = op("invariant_linear")(x, weight, None)
    for first, end in SLICES:
        assert torch.equal(op("invariant_linear")(x[first:end], weight, None), whole[first:end]), (first, end)


@pytest.mark.parametrize(("out_size", "in_size"), [(1, 64), (30, 33), (5031, 72), (64, 120)])
def test_what_has_no_kernel_is_torchs(device, out_size, in_size):
    for dtype in (torch.float32, *_dtypes(device)):
        x, weight = _random(300, in_size).to(device, dtype), _random(out_size, in_size).to(device, dtype)
        whole = ops.invariant_linear(x, weight, None)
        close(whole, x.double() @ weight.double().t(), scale=in_size**0.5)
        for first, end in ((0, 1), (7, 40), (64, 128), (100, 229)):
            assert torch.equal(ops.invariant_linear(x[first:end], weight, None), whole[first:end]), (first, end)


@ON_CUDA
def test_what_the_kernel_does_not_take(op, device):
    if "invariant_linear" not in extension.load().ops.get("cuda", ()):
        pytest.skip("no compiled kernel")
    kernel = torch.ops.raylm.invariant_linear.default
    for out_size, in_size, dtype in ((30, 128, torch.bfloat16), (32, 120, torch.bfloat16), (32, 128, torch.float32)):
        x, weight = torch.zeros(3, in_size, dtype=dtype, device=device), torch.zeros(out_size, in_size, dtype=dtype)
        with pytest.raises(RuntimeError, match=f"no kernel for x of 3 rows and weight of {out_size} rows of {in_size}"):
            kernel(x, weight.to(device), None)


@dataclass
class Attending:
    """A case as invariant_attention takes it, and parts of its sequences as steps of their own."""

    case: Case
    form: dict[str, object]
    scales: tuple[float, float] = (1.0, 1.0)

    def options(self) -> dict[str, torch.Tensor | float | None]:
        given = {name: value for name, value in self.form.items() if name in ("window", "soft_cap")}
        given["alibi_slopes"] = self.case.slopes() if self.form.get("slopes") else None
        given["sinks"] = self.case.sinks() if self.form.get("sinks") else None
        return given

    def run(self, kernel, parts: list[tuple[int, int, int]] | None = None) -> torch.Tensor:
        """All of the case, or queries [first, end) of sequences that are prompts, one after the other."""
        case, options = self.case, self.options()
        starts = case.query_start.tolist()
        if parts is None:
            parts = [(s, 0, length) for s, length in enumerate(case.query_lens)]
            lens = case.seq_lens.tolist()
        else:
            lens = [end for _, _, end in parts]
        q = torch.cat([case.q[starts[s] + first : starts[s] + end] for s, first, end in parts])
        counts = [end - first for _, first, end in parts]
        device = case.q.device
        query_start = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        table = case.block_table[[s for s, _, _ in parts]]
        window, soft_cap = options.pop("window", 0), options.pop("soft_cap", 0.0)
        lengths = (table, query_start, seq_lens, max(counts), max(lens), case.scale, window, soft_cap)
        last = (options["alibi_slopes"], options["sinks"], *self.scales)
        return kernel(q, case.k_cache, case.v_cache, *lengths, *last)


@pytest.mark.parametrize("head_dim", [48, 64, 128, 256])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_attention_matches_reference(op, device, form, head_dim):
    for dtype in _dtypes(device):
        attending = Attending(make_case(MIXED, head_dim=head_dim, dtype=dtype, device=device), form)
        close(attending.run(op("invariant_attention")), attending.case.expected(**attending.options()))


@pytest.mark.parametrize("head_dim", [48, 64, 128, 192])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_query_has_the_same_bits_in_any_step(op, device, form, head_dim):
    if device == "cpu" and head_dim > 48:
        pytest.skip("sizes make no difference to torch's version")
    lengths = [(LENGTH, LENGTH), (29, 29), (190, 190)]
    for dtype in _dtypes(device)[:1]:
        attending = Attending(make_case(lengths, head_dim=head_dim, dtype=dtype, device=device, **HEADS), form)
        whole = attending.run(op("invariant_attention"))
        for first, end in CUTS:
            alone = attending.run(op("invariant_attention"), [(0, first, end)])
            assert torch.equal(alone, whole[first:end]), (first, end)
            among = attending.run(op("invariant_attention"), [(2, 187, 190), (1, 0, 29), (0, first, end), (1, 28, 29)])
            assert torch.equal(among[32 : 32 + end - first], whole[first:end]), (first, end)


@ON_CUDA
@pytest.mark.parametrize("head_dim", [48, 64, 128, 256])
def test_so_it_has_over_a_cache_of_codes(op, device, head_dim):
    case = make_case([(LENGTH, LENGTH)], head_dim=head_dim, dtype=torch.bfloat16, device=device)
    case.k_cache, case.v_cache = case.k_cache.to(ops.CODES), case.v_cache.to(ops.CODES)
    attending = Attending(case, {"window": 100}, (0.5, 0.25))
    whole = attending.run(op("invariant_attention"))
    assert torch.isfinite(whole.float()).all()
    for first, end in CUTS:
        assert torch.equal(attending.run(op("invariant_attention"), [(0, first, end)]), whole[first:end]), (first, end)


@pytest.mark.parametrize(("size", "heads"), [(64, 0), (64, 3), (4096, 0), (8192, 0)])
def test_norms_have_the_same_bits_among_any_others(device, size, heads):
    shape = (1300, heads, size) if heads else (1300, size)
    dtype = _dtypes(device)[0]
    x, weight = _random(*shape).to(device, dtype), _random(size).to(device, dtype)
    whole = ops.invariant_rms_norm(x, weight, 1e-6)
    expected = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    close(whole, expected)
    added = _random(1300, size).to(device, dtype)
    residual = added.clone()
    summed = None if heads else ops.invariant_rms_norm(x, weight, 1e-6, residual)
    for first, end in ((0, 1), (3, 700), (200, 1224), (0, 1024)):
        assert torch.equal(ops.invariant_rms_norm(x[first:end], weight, 1e-6), whole[first:end])
        if summed is not None:
            part = added[first:end].clone()
            assert torch.equal(ops.invariant_rms_norm(x[first:end], weight, 1e-6, part), summed[first:end])
            assert torch.equal(part, residual[first:end])
