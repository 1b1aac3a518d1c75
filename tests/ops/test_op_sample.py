"""raylm::sample: what may be drawn, and that it is drawn where the cumulative distribution says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raylm import ops
from raylm.ops.sampling import uniform_numbers
from tests.ops.op_reference import DTYPES, kept_tokens

pytestmark = pytest.mark.operators("sample")

SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 300},
    {"top_k": 2_000_000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 1e-4},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 4000, "top_p": 0.8},
]
VOCABS = [1, 3, 129, 1000, 5003, 49_152]


def settings(rows: int, *, device: str = "cpu", **options: float) -> dict[str, torch.Tensor]:
    """The operator's settings by name, in its order; the seeds differ."""
    chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    return {
        name: torch.full((rows,), value, dtype=torch.int64 if name == "top_k" else torch.float32, device=device)
        for name, value in chosen.items()
    } | {
        "seed": torch.arange(rows, device=device) * 7919 - 5,
        "position": torch.arange(rows, device=device) % 11,
    }


def logits_of(rows: int, vocab: int, *, dtype=torch.float32, device: str = "cpu", spread: float = 2.0) -> torch.Tensor:
    drawn = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows + vocab)) * spread
    return drawn.to(device, dtype)


def check_draws(tokens: torch.Tensor, logits: torch.Tensor, chosen: dict[str, torch.Tensor]) -> None:
    """Every token is kept, and its part of the cumulative distribution holds its row's uniform number."""
    chosen = {name: value.cpu() for name, value in chosen.items()}
    uniform = torch.from_numpy(uniform_numbers(chosen["seed"].numpy(), chosen["position"].numpy()))
    for row, token in enumerate(tokens.tolist()):
        one = {name: chosen[name][row].item() for name in ("temperature", "top_k", "top_p", "min_p")}
        probs = torch.softmax(logits[row].double().cpu() / one["temperature"], -1)
        kept = kept_tokens(probs, one["top_k"], one["top_p"], one["min_p"], slack=1e-5)
        assert kept[token], (row, token, one)
        exact = probs * kept_tokens(probs, one["top_k"], one["top_p"], one["min_p"])
        upper = exact.cumsum(0) / exact.sum()
        lower = upper[token] - exact[token] / exact.sum()
        # Wider where rounding, or which of equal tokens are kept, moves the total.
        edge = 2e-5 + 2 * (probs * kept).sum().sub(exact.sum()).abs() / exact.sum()
        assert lower - edge <= uniform[row] <= upper[token] + edge, (row, token, one)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_follow_the_distribution(op, device, vocab, options):
    rows = 24 if vocab < 10_000 else 4
    logits = logits_of(rows, vocab, device=device)
    chosen = settings(rows, device=device, **options)
    tokens = op("sample")(logits, *chosen.values())
    assert tokens.dtype == torch.int64 and tokens.shape == (rows,)
    check_draws(tokens, logits, chosen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_flat_and_peaked_rows_of_every_dtype(op, device, dtype, spread):
    logits = logits_of(16, 5000, dtype=dtype, device=device, spread=spread)
    for options in ({}, {"top_p": 0.9}, {"min_p": 0.3}, {"top_p": 0.5, "temperature": 0.6}):
        chosen = settings(16, device=device, **options)
        check_draws(op("sample")(logits, *chosen.values()), logits, chosen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 77, 4096, 50_001])
def test_greedy_takes_the_first_of_the_likeliest(op, device, dtype, vocab):
    """In bfloat16 the largest of 50,001 logits comes more than once."""
    logits = logits_of(9, vocab, dtype=dtype, device=device).clamp(max=3)
    logits[0] = 0
    logits[1] = torch.tensor([-0.0, 0.0], device=device).repeat(vocab)[:vocab]
    logits[2] = float("-inf")
    first = [int(torch.nonzero(row == row.max())[0]) for row in logits]
    tokens = op("sample")(logits, *settings(9, device=device, temperature=0.0).values())
    assert tokens.tolist() == first


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_the_smallest_temperatures_and_largest_logits_are_greedy(op, device, options):
    """Neither a quotient over the largest number nor two equal ones of this size may lead out of the vocabulary."""
    logits = logits_of(16, 100, device=device)
    for temperature in (1e-30, 1e-39, 1e-44):
        chosen = settings(16, device=device, temperature=temperature, **options)
        assert torch.equal(op("sample")(logits, *chosen.values()), logits.argmax(-1))
    logits[:, 60] = logits[:, 61] = torch.finfo(torch.float32).max
    tokens = op("sample")(logits, *settings(16, device=device, temperature=0.5, **options).values())
    assert set(tokens.tolist()) <= {60, 61}


def test_exactly_the_kept_tokens_are_drawn(op, device):
    probs = torch.tensor([0.02, 0.3, 0.05, 0.4, 0.13, 0.1], device=device)
    logits = probs.log().expand(4000, -1)
    for options, expected in (
        ({}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.69}, {1, 3}),
        ({"top_p": 0.71}, {1, 3, 4}),
        ({"min_p": 0.2}, {1, 3, 4, 5}),
        ({"top_k": 4, "top_p": 0.99, "min_p": 0.3}, {1, 3, 4}),
    ):
        tokens = op("sample")(logits, *settings(4000, device=device, **options).values())
        assert set(tokens.tolist()) == expected, options
        share = torch.bincount(tokens, minlength=6) / 4000
        kept = torch.tensor([i in expected for i in range(6)], device=device)
        exact = probs * kept / (probs * kept).sum()
        assert torch.allclose(share, exact, atol=0.03)


@pytest.mark.parametrize(
    ("options", "count"), [({"top_k": 7}, 7), ({"top_k": 600}, 600), ({"top_p": 0.0499}, 60), ({"top_k": 1200}, 1200)]
)
def test_equal_tokens_are_kept_up_to_the_limit(op, device, options, count):
    rows = 16 * count
    logits = torch.zeros(1, 1200, device=device).expand(rows, -1)
    tokens = op("sample")(logits, *settings(rows, device=device, **options).values())
    assert tokens.unique().numel() == count


@pytest.mark.gpu
@pytest.mark.parametrize("count", [7, 1000])
def test_the_first_of_equal_tokens_are_kept(needs_cuda_extension, count):
    logits = torch.zeros(20 * count, 5000, device="cuda")
    logits[:, 100:] = 1
    tokens = ops.sample(logits, *settings(20 * count, device="cuda", top_k=count).values())
    assert tokens.min() == 100 and tokens.max() == 99 + count


def test_each_row_has_its_own_settings(op, device):
    rows = 4 * len(SETTINGS)
    logits = logits_of(rows, 3000, device=device)
    each = [settings(rows, device=device, **options) for options in SETTINGS]
    chosen = {name: torch.stack([each[row // 4][name][row] for row in range(rows)]) for name in each[0]}
    tokens = op("sample")(logits, *chosen.values())
    check_draws(tokens, logits, chosen)
    greedy = torch.arange(rows, device=device) % 4 == 1
    mixed = op("sample")(logits, *(chosen | {"temperature": chosen["temperature"].masked_fill(greedy, 0)}).values())
    assert torch.equal(mixed, torch.where(greedy, logits.argmax(-1), tokens))
    for row in range(rows):
        alone = op("sample")(logits[row : row + 1], *(value[row : row + 1] for value in chosen.values()))
        assert alone[0] == tokens[row]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_of_both_kinds(op, device, dtype):
    """More than 32 for each cluster of blocks on a GPU, greedy ones before, between and behind the others."""
    logits = logits_of(1300, 4099, dtype=dtype, device=device, spread=4.0)
    chosen = settings(1300, device=device, top_k=1)
    for every in (1, 2, 3, 50):
        greedy = torch.arange(1300, device=device) % every == 0
        mixed = chosen | {"temperature": chosen["temperature"].masked_fill(greedy, 0)}
        assert torch.equal(op("sample")(logits, *mixed.values()), logits.float().argmax(-1)), every


def test_rows_may_be_strided_and_unaligned(op, device):
    wide = logits_of(8, 2050, dtype=torch.bfloat16, device=device)
    for view in (wide[:, :2048], wide[:, 1:2049], wide[::2, 3:]):
        chosen = settings(len(view), device=device, top_p=0.9)
        tokens = op("sample")(view, *chosen.values())
        assert torch.equal(tokens, op("sample")(view.contiguous(), *chosen.values()))
        check_draws(tokens, view, chosen)


def test_masked_tokens_are_never_drawn(op, device):
    logits = torch.full((64, 1000), float("-inf"), device=device)
    logits[:, [5, 700]] = torch.tensor([1.0, 1.5], device=device)
    for options in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.01}):
        tokens = op("sample")(logits, *settings(64, device=device, **options).values())
        assert set(tokens.tolist()) == {5, 700}, options


@pytest.mark.gpu
def test_what_is_not_finite_still_gives_a_token(needs_cuda_extension):
    logits = logits_of(3, 1000, device="cuda")
    logits[0] = float("-inf")
    logits[1, 77] = float("inf")
    logits[2, 5] = float("nan")
    for options in ({"temperature": 0.0}, {}, {"top_p": 0.9, "top_k": 5}):
        tokens = ops.sample(logits, *settings(3, device="cuda", **options).values()).tolist()
        assert 0 <= tokens[0] < 1000 and tokens[1:] == [77, 5]


@pytest.mark.gpu
def test_replays_in_a_cuda_graph(needs_cuda_extension):
    """The settings are read when the graph runs, not when it is captured."""
    logits = logits_of(8, 128_256, dtype=torch.bfloat16, device="cuda")
    chosen = settings(8, device="cuda", top_p=0.9)
    ops.sample(logits, *chosen.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = ops.sample(logits, *chosen.values())
    chosen["temperature"].fill_(0)
    graph.replay()
    assert torch.equal(tokens, logits.argmax(-1))
    chosen["temperature"].fill_(0.8)
    logits.copy_(logits.roll(3, 1))
    graph.replay()
    assert torch.equal(tokens, ops.sample(logits, *chosen.values()))
    check_draws(tokens, logits, chosen)


def test_no_rows(op, device):
    assert op("sample")(torch.empty(0, 9, device=device), *settings(0, device=device).values()).shape == (0,)


def test_opcheck():
    torch.library.opcheck(torch.ops.raylm.sample.default, (logits_of(4, 64), *settings(4, top_p=0.9).values()))


@pytest.mark.gpu
def test_bad_arguments_are_named(needs_cuda_extension):
    logits, chosen = torch.zeros(4, 64, device="cuda"), settings(4, device="cuda")

    def fails(match: str, logits: torch.Tensor = logits, **changed: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=match):
            torch.ops.raylm.sample(logits, *(chosen | changed).values())

    fails("sample: logits has 1 dimensions, must have 2", logits[0])
    fails("sample: logits has stride 4 in its last dimension", torch.zeros(64, 4, device="cuda").t())
    fails("sample: top_k is float32, must be int64", top_k=chosen["temperature"])
    fails("sample: seed has size 3 in dimension 0, must have 4", seed=chosen["seed"][:3])
    fails("sample: min_p is not on the CUDA device of the first argument", min_p=chosen["min_p"].cpu())
    fails("sample: logits has 600000 columns, must have at most", torch.zeros(4, 600_000, device="cuda"))


def test_uniform_numbers_differ():
    numbers = uniform_numbers(np.arange(1000), np.zeros(1000, dtype=np.int64))
    assert np.unique(numbers).size == 1000
