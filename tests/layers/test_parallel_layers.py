"""Layers under tensor parallelism: what the ranks compute and hold recombines to what one rank does."""

from __future__ import annotations

import pytest
import torch

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.embedding import VocabParallelEmbedding
from raylm.layers.halves import MAX_ROWS, MIN_ROWS, Halves, in_halves, in_halves_of_rows, room_for_tiles
from raylm.layers.heads import kv_heads_of_rank
from raylm.layers.linear import (
    MIN_ROWS_TO_ADD,
    ColumnParallelLinear,
    GatedParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from raylm.layers.norm import RMSNorm
from raylm.layers.residual import ResidualStream
from raylm.layers.slots import Loadable
from raylm.layers.weight import Columns, Part, PlainWeight
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext

CPU = torch.device("cpu")
F32 = torch.float32
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def contexts(size: int) -> list[ParallelContext]:
    return [ParallelContext(rank, rank, size, 0, 1, CPU) for rank in range(size)]


def fill(layer: Loadable, seed: int = 0) -> None:
    """Give every slot this rank's part of a tensor that depends on the slot's name alone."""
    for (name, shard), slot in layer.slots().items():
        generator = torch.Generator().manual_seed(seed + sum(map(ord, f"{name}{shard}")))
        whole = torch.randn(slot.shape, generator=generator)
        slot.destination.copy_(whole.narrow(slot.dim, slot.start, slot.length))


def covered(layer: Loadable) -> bool:
    """Whether the slots cover the parameters, each element once."""
    for parameter in layer.parameters():
        parameter.zero_()
    for slot in layer.slots().values():
        slot.destination.add_(1)
    return all(bool((parameter == 1).all()) for parameter in layer.parameters())


@pytest.mark.parametrize("bias", [False, True])
def test_column_shards_join_to_the_whole(bias: bool) -> None:
    layers = [ColumnParallelLinear(6, 8, bias=bias, context=c, dtype=F32) for c in [*contexts(1), *contexts(2)]]
    x = torch.randn(3, 6)
    for layer in layers:
        assert covered(layer)
        fill(layer)
    whole, *parts = [layer(x) for layer in layers]
    torch.testing.assert_close(torch.cat(parts, -1), whole)


def test_gate_and_up_shards_join_to_the_whole() -> None:
    layers = [GatedParallelLinear(6, 8, "silu", bias=True, context=c, dtype=F32) for c in [*contexts(1), *contexts(2)]]
    x = torch.randn(3, 6)
    for layer in layers:
        assert covered(layer)
        fill(layer)
    whole, *parts = [layer(x) for layer in layers]
    torch.testing.assert_close(torch.cat(parts, -1), whole)


@pytest.mark.parametrize(("num_kv_heads", "ranks"), [(4, 2), (2, 2), (2, 4), (1, 2)])
def test_qkv_splits_by_heads_and_copies_scarce_ones(num_kv_heads: int, ranks: int) -> None:
    def build(context: ParallelContext) -> QKVParallelLinear:
        layer = QKVParallelLinear(
            6, num_heads=4, num_kv_heads=num_kv_heads, head_dim=2, bias=True, context=context, dtype=F32
        )
        assert covered(layer)
        fill(layer)
        return layer

    x = torch.randn(3, 6)
    whole = build(contexts(1)[0])(x).view(3, -1, 2)
    q, k, v = whole.split([4, num_kv_heads, num_kv_heads], dim=1)
    for rank, context in enumerate(contexts(ranks)):
        layer = build(context)
        heads, kv_heads = layer.num_heads, layer.num_kv_heads
        assert (heads, kv_heads) == (4 // ranks, max(1, num_kv_heads // ranks))
        found = layer(x).view(3, -1, 2).split([heads, kv_heads, kv_heads], dim=1)
        torch.testing.assert_close(found[0], q[:, rank * heads : (rank + 1) * heads])
        first = rank * num_kv_heads // ranks
        torch.testing.assert_close(found[1], k[:, first : first + kv_heads])
        torch.testing.assert_close(found[2], v[:, first : first + kv_heads])


def test_row_shards_sum_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "all_reduce", lambda x, context: x)
    layers = [RowParallelLinear(8, 6, bias=True, context=c, dtype=F32) for c in [*contexts(1), *contexts(2)]]
    x = torch.randn(3, 8)
    for layer in layers:
        assert covered(layer)
        fill(layer)
    whole, low, high = layers
    torch.testing.assert_close(low(x[:, :4]) + high(x[:, 4:]), whole(x))


@NEEDS_CUDA
def test_many_rows_are_added_to_the_residual_in_the_product() -> None:
    one = ParallelContext.single(torch.device("cuda"))
    layer = RowParallelLinear(64, 32, bias=False, context=one, dtype=torch.bfloat16, norm_follows=True)
    weight = layer.weight.plain
    assert weight is not None
    weight.normal_()
    x, residual = (torch.randn(MIN_ROWS_TO_ADD, size, dtype=torch.bfloat16, device="cuda") for size in (64, 32))
    few = residual[:-1].clone()
    assert not layer.add_product(few, x[:-1], 1.0)
    assert torch.equal(few, residual[:-1])
    exact = x.double() @ weight.double().t()
    expected = residual.double() + exact
    assert layer.add_product(residual, x, 1.0)
    # The library may round the product before it adds.
    assert ((residual.double() - expected).abs() <= 2**-8 * (exact.abs() + expected.abs())).all()


@NEEDS_CUDA
@pytest.mark.parametrize("rows", [MIN_ROWS, 200, MAX_ROWS])
def test_some_rows_are_multiplied_in_halves_that_the_norm_adds(rows: int) -> None:
    one, size, dtype = ParallelContext.single(torch.device("cuda")), 4096, torch.bfloat16
    if room_for_tiles(one.device) < 128:
        pytest.skip("needs a Hopper GPU with at least 128 multiprocessors")
    layer = RowParallelLinear(size, size, bias=False, context=one, dtype=dtype, norm_follows=True)
    norm = RMSNorm(size, 1e-5, context=one, dtype=dtype)
    weight = layer.weight.plain
    assert weight is not None
    weight.normal_(std=size**-0.5)
    norm.weight.normal_()
    x, before = (torch.randn(rows, size, dtype=dtype, device="cuda") for _ in range(2))
    halves = layer.product_in_halves(x)
    assert halves is not None
    exact = before.double() + x.double() @ weight.double().t()
    residual, total = before.clone(), before + halves.total()
    normed = norm(residual, halves)
    assert isinstance(normed, torch.Tensor)
    for found in (residual, total):
        assert ((found.double() - exact).abs() <= 2**-8 * (exact.abs() + 2 * halves.parts.double().abs().sum(0))).all()
    torch.testing.assert_close(normed, ops.rms_norm(residual, norm.weight, 1e-5))
    stream = ResidualStream(before.clone(), one, norms_sum=True)
    stream.add_product(layer, x)
    assert torch.equal(stream.normed(norm), normed)
    assert layer.product_in_halves(x[: MIN_ROWS - 1]) is None
    assert layer.product_in_halves(x.repeat(4, 1)[: MAX_ROWS + 1]) is None


def test_a_cpu_has_no_products_in_halves() -> None:
    assert in_halves(torch.ones(MIN_ROWS, 4096).half(), torch.ones(1, 1).half().expand(4096, 4096)) is None


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=NEEDS_CUDA)], ids=str)
@pytest.mark.parametrize("rows", [320, 448, 576, 384, 192, 640, 704])
def test_some_rows_are_multiplied_in_halves_of_them(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that leave half a tile of 128 rows, on any device that has room for tiles; x and weight may be cut."""
    x = torch.randn(rows, 80, device=device).bfloat16()[:, :64]
    weight = torch.randn(49, 80, device=device).bfloat16()[1:, 8:72]
    assert in_halves_of_rows(x, weight) is None
    monkeypatch.setattr("raylm.layers.halves.room_for_tiles", lambda device: 132)
    assert in_halves_of_rows(x, weight) is None, "it is smaller than any that was measured"
    monkeypatch.setattr("raylm.layers.halves._LEAST_ELEMENTS", weight.numel())
    found = in_halves_of_rows(x, weight)
    assert (found is not None) == (rows in (320, 448, 576))
    if found is not None:
        torch.testing.assert_close(found, torch.nn.functional.linear(x, weight), rtol=2**-7, atol=1e-3)
    assert in_halves_of_rows(x, weight[:1].expand(128256, 64)) is None
    assert in_halves_of_rows(x.float(), weight.float()) is None


def test_a_weight_takes_halves_of_rows_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = PlainWeight([Part(None, 8, 8, 0)], Columns.whole(64), dtype=F32, device=CPU)
    torch.nn.init.normal_(layer.values)
    x, bias = torch.randn(3, 64), torch.ones(8)
    whole, in_parts = layer.matmul(x), torch.randn(3, 8)
    monkeypatch.setattr("raylm.layers.weight.in_halves_of_rows", lambda x, weight: in_parts)
    assert layer.matmul(x) is in_parts
    torch.testing.assert_close(layer.matmul(x, bias), whole + bias)


def test_halves_that_wait_are_part_of_the_stream() -> None:
    one = ParallelContext.single(CPU)
    halves, before = torch.randn(2, 3, 8), torch.randn(3, 8)
    stream = ResidualStream(before.clone(), one)
    stream.add(Halves(halves))
    torch.testing.assert_close(stream.total(), before + halves.sum(0))
    for scales in (False, True):
        norm = RMSNorm(8, 1e-5, context=one, dtype=F32, scales=scales)
        norm.weight.fill_(1)
        residual = before.clone()
        norm(residual, Halves(halves))
        torch.testing.assert_close(residual, before + halves.sum(0))


@pytest.mark.parametrize("vocab_size", [8, 7, 5])
def test_vocabulary_shards(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "all_reduce", lambda x, context: x)
    layers = [VocabParallelEmbedding(vocab_size, 6, context=c, dtype=F32) for c in [*contexts(1), *contexts(4)]]
    tokens, hidden = torch.arange(vocab_size), torch.randn(3, 6)
    for layer in layers:
        fill(layer)
    whole, *parts = layers
    assert covered(VocabParallelEmbedding(vocab_size, 6, context=contexts(1)[0], dtype=F32))
    torch.testing.assert_close(sum(part(tokens) for part in parts), whole(tokens))
    rows = torch.cat([part.weight.plain for part in parts])
    torch.testing.assert_close(rows[:vocab_size], whole.weight.plain)
    monkeypatch.setattr(collectives, "all_gather", lambda x, context, split: hidden @ rows.T)
    torch.testing.assert_close(parts[0].logits(hidden), whole.logits(hidden))


def test_sizes_that_ranks_cannot_share() -> None:
    context = contexts(3)[0]
    with pytest.raises(ConfigError, match="num_attention_heads is 4, which parallel.tensor 3 cannot divide"):
        QKVParallelLinear(6, num_heads=4, num_kv_heads=4, head_dim=2, bias=False, context=context, dtype=F32)
    with pytest.raises(ConfigError, match="num_key_value_heads is 2, .* over 3 ranks can neither divide nor copy"):
        kv_heads_of_rank(2, context)


def test_one_rank_needs_no_group() -> None:
    context = ParallelContext.single(CPU)
    x = torch.ones(2, 3)
    assert collectives.all_reduce(x, context) is x
    assert collectives.all_gather(x, context) is x


def test_ranks_share_whole_units() -> None:
    (context, *_) = contexts(2)
    sizes = {(96, 1): [48, 48], (96, 32): [64, 32], (100, 32): [64, 36], (96, 96): [48, 48], (96, 128): [48, 48]}
    for (size, unit), expected in sizes.items():
        shares = context.shares(size, "a size", unit)
        assert [len(share) for share in shares] == expected
        assert [number for share in shares for number in share] == list(range(size))
    for unit in (1, 32):
        with pytest.raises(ConfigError, match="a size is 97, which parallel.tensor 2 cannot divide"):
            context.shares(97, "a size", unit)
