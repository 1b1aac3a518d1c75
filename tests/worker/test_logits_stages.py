"""Each stage between logits and tokens against a few lines that say the same of one row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from torch import Tensor

from raylm.core.step import NewRow, RowSampling
from raylm.errors import ConfigError
from raylm.parallel.context import ParallelContext
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling import processors
from raylm.worker.sampling.processors import load_processors
from raylm.worker.sampling.sampler import Sampler
from raylm.worker.sampling.stages import LogitRows
from tests.worker.rows import CPU, sampling

VOCAB = 70
ROWS = 4


class Bench:
    """A table and a sampler, and the logits that its stages leave."""

    def __init__(self, **made: processors.LogitsProcessor) -> None:
        self.table = RequestTable(max_rows=ROWS, max_model_len=32, block_size=4, num_groups=1, device=CPU)
        self.sampler = Sampler(self.table, ParallelContext.single(CPU), VOCAB, made)
        self.logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3))

    def begin(self, row: int, token_ids: list[int], wanted: RowSampling) -> None:
        self.table.token_ids[row, : len(token_ids)] = torch.tensor(token_ids)
        self.sampler.begin([NewRow(row, token_ids, 0, wanted)])

    def staged(self, *places: tuple[int, int]) -> Tensor:
        """The logits that are sampled from after `positions` tokens of rows: places are (row, position). All begin as
        the row's own logits."""
        rows = np.array([row for row, _ in places])
        of = LogitRows(rows, torch.from_numpy(rows), torch.tensor([position for _, position in places]))
        return self.sampler.staged(self.logits[rows].clone(), of)


def test_a_bias_is_added_to_its_tokens_alone() -> None:
    bench = Bench()
    bench.begin(1, [5], sampling(logit_bias={3: 2.5, 69: -100.0}))
    bench.begin(2, [5], sampling(logit_bias={4: 1.0}))
    expected = bench.logits.clone()
    expected[1, 3] += 2.5
    expected[1, 69] -= 100
    expected[2, 4] += 1
    assert torch.equal(bench.staged((0, 1), (1, 1), (2, 1), (1, 2)), expected[[0, 1, 2, 1]])


def test_a_row_loses_its_bias_with_its_request() -> None:
    bench = Bench()
    bench.begin(1, [5], sampling(logit_bias=dict.fromkeys(range(40), 1.0)))
    bench.begin(0, [5], sampling(logit_bias={1: 1.0}))
    bench.begin(1, [5], sampling())
    assert torch.equal(bench.staged((1, 1)), bench.logits[[1]])
    # Another row's bias keeps the stage busy.
    assert torch.equal(bench.staged((1, 1), (0, 1))[0], bench.logits[1])


def test_only_allowed_tokens_are_left_and_bad_ones_are_not() -> None:
    bench = Bench()
    bench.begin(0, [5], sampling(allowed_token_ids=(0, 31, 32, 69)))
    bench.begin(1, [5], sampling(bad_token_ids=((7,), (33,))))
    bench.begin(3, [5], sampling(allowed_token_ids=(1, 2), bad_token_ids=((2,),)))
    found = bench.staged((0, 1), (1, 1), (2, 1), (3, 1))
    finite = [torch.isfinite(row).nonzero()[:, 0].tolist() for row in found]
    assert finite == [[0, 31, 32, 69], [t for t in range(VOCAB) if t not in (7, 33)], list(range(VOCAB)), [1]]
    assert torch.equal(found[0, [0, 31, 32, 69]], bench.logits[0, [0, 31, 32, 69]])


def test_an_end_waits_for_min_tokens() -> None:
    bench = Bench()
    wanted = sampling(min_tokens=2, num_prompt=3)._replace(stop_ids=[6, 8, 9])
    bench.begin(0, [1, 2, 3], wanted)
    bench.begin(1, [1, 2, 3], sampling(num_prompt=3))
    bench.begin(2, [1, 2, 3], sampling(min_tokens=1, num_prompt=3)._replace(stop_ids=[10]))
    found = bench.staged((0, 3), (0, 4), (0, 5), (1, 3), (2, 3), (2, 4))
    forbidden = [(row == -math.inf).nonzero()[:, 0].tolist() for row in found]
    assert forbidden == [[6, 8, 9], [6, 8, 9], [], [], [10], []]


def test_the_last_token_of_a_bad_word_is_not_sampled_behind_the_others() -> None:
    bench = Bench()
    wanted = sampling(bad_token_ids=((7, 8), (1, 7, 9), (2, 8)), num_prompt=2)
    bench.begin(0, [1, 7, 5, 1, 7, 4], wanted)
    # After the prompt alone, in the midst, after 1, after 1 7, and after more.
    found = bench.staged((0, 2), (0, 3), (0, 4), (0, 5), (0, 6), (1, 5))
    forbidden = [(row == -math.inf).nonzero()[:, 0].tolist() for row in found]
    assert forbidden == [[], [], [], [8, 9], [], []]


@pytest.mark.parametrize("typical_p", [0.2, 0.6, 0.95])
def test_typical_tokens_are_those_of_about_the_usual_information(typical_p: float) -> None:
    bench = Bench()
    bench.begin(0, [1], sampling(temperature=0.7, typical_p=typical_p))
    bench.begin(1, [1], sampling(temperature=0.0, typical_p=typical_p))
    probs = (bench.logits[0].double() / 0.7).softmax(-1)
    information = -probs.log()
    entropy = (probs * information).sum()
    kept, mass = set(), 0.0
    for token in sorted(range(VOCAB), key=lambda token: abs(information[token] - entropy)):
        if mass >= typical_p:
            break
        kept.add(token)
        mass += float(probs[token])
    found = bench.staged((0, 1), (1, 1))
    assert set(torch.isfinite(found[0]).nonzero()[:, 0].tolist()) == kept
    assert torch.equal(found[1], bench.logits[1]), "greedy has no use for it"


@pytest.mark.parametrize(
    "tiny",
    [
        {"temperature": 1e-46, "typical_p": 0.9},
        {"typical_p": 1e-46, "top_k": 1},
        {"top_p": 1e-46},
        {"temperature": 1e-39},
    ],
    ids=str,
)
def test_numbers_too_small_for_float32_leave_the_likeliest_token(tiny: dict[str, float]) -> None:
    bench = Bench()
    # One token is nearly certain, so it is the most typical one too.
    bench.logits[0, 50] += 30
    bench.begin(0, [1], sampling(**{"temperature": 1.0, **tiny}))
    rows = np.array([0])
    of = LogitRows(rows, torch.from_numpy(rows), torch.tensor([1]))
    assert bench.sampler.sample(bench.logits[rows].clone(), of).token_ids.tolist() == [50]


class Lifts:
    """Makes the token that the row had last the likeliest."""

    def __call__(self, logits: Tensor, token_ids: Tensor, num_tokens: Tensor) -> Tensor:
        last = token_ids.gather(1, num_tokens[:, None] - 1)
        return logits.scatter_add(1, last, torch.full_like(last, 50).to(logits.dtype))


class Doubles:
    def __call__(self, logits: Tensor, token_ids: Tensor, num_tokens: Tensor) -> Tensor:
        return logits * 2


def test_processors_run_in_the_order_of_their_request() -> None:
    bench = Bench(doubles=Doubles(), lifts=Lifts())
    bench.begin(0, [4, 9], sampling(logits_processors=("lifts", "doubles")))
    bench.begin(1, [4, 9], sampling(logits_processors=("doubles", "lifts")))
    bench.begin(2, [4, 9], sampling())
    found = bench.staged((0, 2), (1, 1), (2, 2))
    expected = bench.logits[[0, 1, 2]].clone()
    expected[0, 9] += 50
    expected[:2] *= 2
    expected[1, 4] += 50
    assert torch.allclose(found, expected)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that has processors."""
    entries = [
        EntryPoint("lifts", f"{__name__}:Lifts", processors.GROUP),
        EntryPoint("broken", f"{__name__}:Missing", processors.GROUP),
    ]
    monkeypatch.setattr(processors, "entry_points", lambda group: [one for one in entries if one.group == group])
    return


def test_processors_are_found_by_their_names(installed: None) -> None:
    assert type(load_processors(["lifts"])["lifts"]).__name__ == "Lifts"
    with pytest.raises(ConfigError, match="names 'other', but the installed packages have broken, lifts in"):
        load_processors(["other"])
    with pytest.raises(ConfigError, match="logits_processors: broken could not be made: AttributeError"):
        load_processors(["broken"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_left_gets_one_all_the_same(temperature: float) -> None:
    """Allowed and forbidden together: whatever is sampled then, it is a token, and the engine lives."""
    bench = Bench()
    bench.begin(0, [5], sampling(temperature=temperature, allowed_token_ids=(3,), bad_token_ids=((3,),)))
    rows = np.array([0])
    of = LogitRows(rows, torch.from_numpy(rows), torch.tensor([1]))
    assert 0 <= int(bench.sampler.sample(bench.logits[:1].clone(), of).token_ids) < VOCAB
