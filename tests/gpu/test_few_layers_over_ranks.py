"""All layers in one kernel, of a model that two GPUs share: each has half of the heads and of the MLP."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from raylm import ops
from raylm.parallel.peer_reduce import PeerReducer, SizeLimits, connect_peers
from tests.ops.op_reference import decoder_layers
from tests.ops.test_op_few_layers import (
    FORMS,
    HOPPER,
    LAYERS,
    Sizes,
    Step,
    exact_products,
    make_step,
    make_weights,
    placed,
    placed_weights,
)
from tests.support.peer_sums import skip_without_operators, started
from tests.support.spawned import Ranks

RANKS = 2
SHAPES = {
    "group-of-two": Sizes(1024, 3072, 16, 8, 128),
    "group-of-eight": Sizes(2048, 5632, 16, 2, 128),
    "few-tiles": Sizes(64, 96, 4, 2, 64),
}
ROWS = ([1], [300], [3000], [17, 5], [7, 900, 256, 128])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    skip_without_operators()
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("the kernel is for compute capability 9.0")
    yield from started(RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_residual_stream_on_all_ranks(ranks: Ranks, form: str, shape: str) -> None:
    first, *others = ranks.run(_check_steps, form, SHAPES[shape])
    assert all(other == first for other in others)


def test_hundreds_of_steps_of_two_models_with_delays(ranks: Ranks) -> None:
    first, *others = ranks.run(_check_many_steps)
    assert all(other == first for other in others)


def test_graphs_replay_between_eager_steps(ranks: Ranks) -> None:
    first, *others = ranks.run(_check_graphs)
    assert all(other == first for other in others)


def _check_steps(rank: int, form: str, sizes: Sizes) -> str:
    reducer = _connect(rank, sizes.hidden)
    whole = _rounded(make_weights(sizes, head_norms=True, bias=True))
    shares = [_rounded(FORMS[form](_share(whole, sizes, of))) for of in range(RANKS)]
    model = _Model(shares[rank], sizes, reducer)
    found = []
    for seq_lens in ROWS:
        before = placed(make_step(sizes, seq_lens), torch.bfloat16, "cpu")
        ours = placed(_share_of_step(before, sizes, rank), torch.bfloat16, "cuda")
        model.run(ours)
        exact = placed(before, torch.float64, "cpu")
        wanted = decoder_layers(exact, _whole(shares, sizes), placed_weights(whole, torch.float64, "cpu"))
        error = ours.residual.cpu().double() - wanted
        assert error.norm() <= 2e-2 * wanted.norm(), f"{seq_lens}: off by {error.norm():.3g}"
        found.append(ours.residual)
    reducer.close()
    return _digest(found)


def _check_many_steps(rank: int) -> str:
    """Two models share the windows, and a rank may be late by more than a step."""
    drawn = random.Random(rank)
    all_sizes = [SHAPES["group-of-two"], SHAPES["few-tiles"]]
    reducer = _connect(rank, max(sizes.hidden for sizes in all_sizes))
    models = []
    for sizes in all_sizes:
        weights = _share(make_weights(sizes, head_norms=True, bias=False), sizes, rank)
        models.append((_Model(weights, sizes, reducer), placed(_step_of(sizes, rank), torch.bfloat16, "cuda")))
    first: dict[int, Tensor] = {}
    for number in range(400):
        which = number // 3 % 2
        model, step = models[which]
        own = step._replace(residual=step.residual.clone())
        if drawn.random() < 0.1:
            torch.cuda._sleep(drawn.randrange(1_000_000))
        model.run(own)
        assert torch.equal(own.residual, first.setdefault(which, own.residual)), number
    reducer.close()
    return _digest([first[which] for which in range(len(models))])


def _check_graphs(rank: int) -> str:
    sizes = SHAPES["group-of-two"]
    reducer = _connect(rank, sizes.hidden)
    model = _Model(_share(make_weights(sizes, head_norms=True, bias=False), sizes, rank), sizes, reducer)
    step = placed(_step_of(sizes, rank), torch.bfloat16, "cuda")
    given = step.residual.clone()
    model.run(step)
    expected = step.residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.run(step)
    for number in range(60):
        step.residual.copy_(given)
        model.run(step) if number % 7 == 3 else graph.replay()
        assert torch.equal(step.residual, expected), number
    del graph
    reducer.close()
    return _digest([expected])


def _digest(residuals: list[Tensor]) -> str:
    return sha256(b"".join(x.cpu().view(torch.uint8).numpy().tobytes() for x in residuals)).hexdigest()


class _Model:
    """One rank's share of the layers, and what the operator keeps for them."""

    def __init__(self, weights: ops.LayerWeights, sizes: Sizes, reducer: PeerReducer) -> None:
        self._weights = placed_weights(weights, torch.bfloat16, "cuda")
        kv_heads = sizes.num_kv_heads // RANKS
        assert ops.few_layers_rows(self._weights, num_kv_heads=kv_heads, head_dim=sizes.head_dim) == ops.FEW_ROWS
        self._memory = ops.few_layers_memory(self._weights, num_kv_heads=kv_heads)
        self._peers = reducer.cells

    def run(self, step: Step) -> None:
        ops.few_layers(step.residual, self._weights, *step[1:], *self._memory, self._peers)


def _connect(rank: int, hidden: int) -> PeerReducer:
    group = dist.group.WORLD
    assert group is not None
    limits = SizeLimits(64 << 10, 0)
    reducer, reason = connect_peers(
        group, torch.device("cuda", rank), limit_s=30.0, limits=limits, cells_hidden_size=hidden
    )
    assert reducer is not None and reducer.cells is not None, reason
    return reducer


def _step_of(sizes: Sizes, rank: int) -> Step:
    return _share_of_step(make_step(sizes, [40, 170]), sizes, rank)


def _rounded(weights: ops.LayerWeights) -> ops.LayerWeights:
    return placed_weights(weights, torch.bfloat16, "cpu")


def _heads(x: Tensor, sizes: Sizes, rank: int) -> Tensor:
    """This rank's of the rows of queries, keys and values."""
    heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    parts = x.split([count * sizes.head_dim for count in heads])
    return torch.cat([part.chunk(RANKS)[rank] for part in parts])


def _share(weights: ops.LayerWeights, sizes: Sizes, rank: int) -> ops.LayerWeights:
    products = []
    for layer in range(LAYERS):
        qkv, o, gate_up, down = weights.products[4 * layer : 4 * layer + 4]
        halves = [half.chunk(RANKS)[rank] for half in gate_up.chunk(2)]
        columns = [product.chunk(RANKS, dim=1)[rank].contiguous() for product in (o, down)]
        products += [_heads(qkv, sizes, rank), columns[0], torch.cat(halves), columns[1]]
    return replace(
        weights,
        products=products,
        biases=[_heads(bias, sizes, rank) for bias in weights.biases],
        num_heads=weights.num_heads // RANKS,
        width=weights.width // RANKS,
    )


def _whole(shares: list[ops.LayerWeights], sizes: Sizes) -> list[Tensor]:
    """The numbers of all ranks' products as one model's, float64."""
    exact = [exact_products(placed_weights(share, torch.float64, "cpu"), sizes.head_dim) for share in shares]
    found = []
    for number, parts in enumerate(zip(*exact, strict=True)):
        if number % 2:
            found.append(torch.cat(parts, dim=1))
        elif number % 4:
            found.append(torch.cat([part.chunk(2)[half] for half in range(2) for part in parts]))
        else:
            heads = [count // RANKS * sizes.head_dim for count in (sizes.num_heads, *[sizes.num_kv_heads] * 2)]
            split = [part.split(heads) for part in parts]
            found.append(torch.cat([of_rank[kind] for kind in range(3) for of_rank in split]))
    return found


def _share_of_step(step: Step, sizes: Sizes, rank: int) -> Step:
    count = sizes.num_kv_heads // RANKS
    caches = [[cache[:, :, rank * count : (rank + 1) * count].contiguous() for cache in of] for of in step[1:3]]
    return step._replace(k_caches=caches[0], v_caches=caches[1])
