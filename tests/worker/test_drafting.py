"""A worker that drafts on the device gives the tokens of one that does not, in fewer steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raylm import ops
from raylm.config.engine import EngineConfig
from raylm.config.resolve import resolve
from raylm.core.sampling import SamplingParams
from raylm.core.step import NewBlocks, NewRow, RowSampling, Sampled, StepPlan
from raylm.core.structure import StructuredOutput
from raylm.errors import ConfigError
from raylm.worker import building, loading
from raylm.worker.worker import Worker
from tests.support import checkpoints, draft_references

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50)
PENALIZED = SamplingParams(temperature=0.8, presence_penalty=0.7)
BLOCK, COLUMNS, NUM_TOKENS = 4, 12, 20
METHODS = ("draft_model", "eagle3", "mtp")
PROMPTS = {length: [(17 * i * i + 5 * i + length) % 300 for i in range(length)] for length in (3, 9, 14)}


class Models:
    """A target and what drafts for it, by method."""

    def __init__(self, folder: Path) -> None:
        self._llama = checkpoints.llama(folder / "llama")
        self._mimo = checkpoints.mimo(folder / "mimo")
        self._paths = {
            "draft_model": checkpoints.qwen3(folder / "draft", num_hidden_layers=2),
            "eagle3": checkpoints.eagle3(folder / "head", self._llama),
        }

    def target(self, method: str) -> Path:
        return self._mimo if method == "mtp" else self._llama

    def speculation(self, method: str) -> dict[str, object]:
        path = self._paths.get(method)
        return {"method": method, **({"model": str(path)} if path else {})}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def make(target: Path, speculation: dict[str, object] | None = None, **cache: object) -> Worker:
    config = EngineConfig.model_validate(
        {
            "model": {"path": str(target), "max_model_len": 64},
            "cache": {"block_size": BLOCK, "num_blocks": 40, **cache},
            "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 32},
            "runtime": {"device": "cpu", "num_threads": 1},
            "speculation": speculation or {},
        }
    )
    return Worker(resolve(config, "cpu"), progress=False)


def started(target: Path, speculation: dict[str, object] | None = None) -> Worker:
    worker = make(target, speculation)
    worker.start()
    return worker


@pytest.fixture(params=[False, True], ids=["eager", "graphs"])
def graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether steps and drafts run through something that behaves like CUDA graphs, up to their tokens."""
    if request.param:
        monkeypatch.setattr(loading, "captures_graphs", lambda *_: True)
        monkeypatch.setattr(building, "CudaCapture", lambda _: lambda run: run)
        monkeypatch.setattr(ops, "sample_is_async", lambda *_: True)
    return request.param


class Driver:
    """Requests in rows of a worker, each with blocks for all of its tokens."""

    def __init__(self, worker: Worker, sampling: Sequence[SamplingParams]) -> None:
        self.texts = [list(prompt) for prompt in PROMPTS.values()]
        self.counts: list[list[int]] = []
        """Of each step that verified, the tokens that each row got."""
        self._worker = worker
        rows = range(len(self.texts))
        new_rows = [
            NewRow(row, self.texts[row], 0, RowSampling(sampling[row], seed=row, num_prompt=len(self.texts[row])))
            for row in rows
        ]
        blocks = [NewBlocks(row, 0, 0, [1 + COLUMNS * row + i for i in range(COLUMNS)]) for row in rows]
        # Each prompt in two parts.
        self._step(StepPlan(1, new_rows, blocks, list(rows), [1 for _ in rows]), [])
        self._step(StepPlan(2, [], [], list(rows), [len(text) - 1 for text in self.texts]), list(rows))

    def decode(self, num_drafts: Sequence[int]) -> None:
        """One step, in which each row verifies so many drafts."""
        rows = list(range(len(self.texts)))
        bounds = [(row, len(self.texts[row])) for row in rows]
        self._step(StepPlan(3, [], [], rows, [1 + count for count in num_drafts], bounds=bounds), rows)

    def _step(self, plan: StepPlan, sampling: list[int]) -> None:
        result: Sampled = self._worker.step(plan)
        counts = result.counts or [1] * len(sampling)
        assert sum(counts) == len(result.token_ids)
        tokens = iter(result.token_ids)
        for row, count in zip(sampling, counts, strict=True):
            self.texts[row] += [next(tokens) for _ in range(count)]
        if result.counts:
            self.counts.append(counts)


def plain(target: Path, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    driver = Driver(started(target), sampling)
    for _ in range(NUM_TOKENS):
        driver.decode([0, 0, 0])
    return driver.texts


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_plain_decoding(method: str, models: Models) -> None:
    sampling = [GREEDY, SAMPLED, PENALIZED]
    expected = plain(models.target(method), sampling)
    driver = Driver(started(models.target(method), models.speculation(method)), sampling)
    for step in range(8):
        # Some rows verify, and some steps are plain.
        driver.decode([(3, 0, 2), (1, 4, 3), (0, 0, 0)][step % 3])
    for found, right in zip(driver.texts, expected, strict=True):
        count = min(len(found), len(right))
        assert count > len(right) - NUM_TOKENS + 6 and found[:count] == right[:count]


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_drafts_are_the_references(method: str, models: Models) -> None:
    target = models.target(method)
    reference = draft_references.Mtp(target) if method == "mtp" else None
    speculation = models.speculation(method)
    reference = reference or draft_references.Eagle3(Path(str(speculation["model"])), target)
    worker = started(target, speculation)
    driver = Driver(worker, [GREEDY] * 3)
    assert worker._runner is not None
    cells = worker._runner._table.token_ids
    for _ in range(4):
        before = [list(text) for text in driver.texts]
        driver.decode([3, 3, 3])
        for row, (known, text, count) in enumerate(zip(before, driver.texts, driver.counts[-1], strict=True)):
            drafts = reference.drafts(known, 3)
            assert text[len(known) : -1] == drafts[: count - 1]
            # Behind a row's last token, drafts that were not looked at are still there.
            assert cells[row, len(text) : len(known) + 3].tolist() == drafts[count:]
        driver.decode([0, 0, 0])


@pytest.mark.usefixtures("graphs")
def test_a_draft_model_that_is_the_target_is_always_right(models: Models) -> None:
    target = models.target("draft_model")
    driver = Driver(started(target, {"method": "draft_model", "model": str(target)}), [GREEDY] * 3)
    for _ in range(3):
        driver.decode([4, 2, 3])
        driver.decode([0, 0, 0])
    assert driver.counts == [[5, 3, 4]] * 3
    expected = plain(target, [GREEDY] * 3)
    assert all(right[: len(text)] == text for text, right in zip(driver.texts, expected, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_masks_of_a_grammar_are_of_the_drafts_of_the_step(
    method: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that leaves one text only: its tokens are accepted as drafts, which they are not with other masks."""
    structure = StructuredOutput("grammar", 'root ::= "a small model answers small questions"')
    form = dataclasses.replace(SAMPLED, temperature=2.0, structure=structure)
    plain = grammar_driver(started(models.target(method)), form)
    for _ in range(7):
        plain.decode([0, 0, 0])
    worker = started(models.target(method), models.speculation(method))
    driver = grammar_driver(worker, form)
    begins = [len(text) for text in driver.texts]
    assert worker._runner is not None and worker._runner._drafts is not None
    token_ids = worker._runner._table.token_ids

    def draft(rows: Tensor, counts: Tensor, most: int, *, max_seq_len: int) -> None:
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            known = len(driver.texts[row])
            token_ids[row, known : known + count] = torch.tensor(plain.texts[row][known : known + count])

    monkeypatch.setattr(worker._runner._drafts._proposer, "draft", draft)
    driver.decode([3, 0, 2])
    driver.decode([2, 3, 3])
    assert driver.counts == [[4, 1, 3], [3, 4, 4]]
    for text, right, begin in zip(driver.texts, plain.texts, begins, strict=True):
        assert text == right[: len(text)] and len(text) > begin


def grammar_driver(worker: Worker, form: SamplingParams) -> Driver:
    assert form.structure is not None
    compiled = worker.prepare(form.structure)
    assert compiled is not None
    compiled.result(60)
    return Driver(worker, [form, SAMPLED, form])


def test_blocks_count_what_drafts(models: Models) -> None:
    target = models.target("eagle3")
    of_target, of_layer = 2 * 3 * BLOCK * 2 * 16 * 4, 2 * BLOCK * 2 * 16 * 4
    # The draft model has two layers, with heads of twice the size.
    for method, num_layers in {None: 0, "eagle3": 1, "draft_model": 2 * 2}.items():
        info = make(target, models.speculation(method) if method else None, swap_gib=1e-3).start()
        assert info.block_bytes == of_target + num_layers * of_layer
        assert info.num_host_blocks == int(1e-3 * 2**30) // info.block_bytes


def test_what_cannot_draft_for_the_target(models: Models, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="speculation.method is mtp, but this LlamaForCausalLM has 0 MTP layers"):
        started(models.target("eagle3"), {"method": "mtp"})
    with pytest.raises(ConfigError, match="speculation.model .* does not exist or is not a .gguf file"):
        started(models.target("eagle3"), {"method": "draft_model", "model": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="draft_vocab_size is missing: this is no EAGLE-3 head"):
        started(models.target("eagle3"), {"method": "eagle3", "model": str(models.target("eagle3"))})
    with pytest.raises(ConfigError, match="need a target with a layer of full attention"):
        started(checkpoints.mistral(tmp_path), models.speculation("draft_model"))
