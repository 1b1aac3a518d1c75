"""A worker without a model: it keeps rows and a paged cache as the real one does, and checks every step against them.

The cache remembers which token of which group was written to which slot. A step reads back all slots that its rows'
queries read, through their block tables, so a block in two hands, a block freed too early, a copy forgotten or a token
out of order fails at once. The next token is a hash of all tokens before it: any lost or repeated token changes
everything after it.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from raylm.core.control import WorkerControl
from raylm.core.rows import RowCounts, RowStep
from raylm.core.sampling import SamplingParams
from raylm.core.step import (
    CacheLayout,
    Candidates,
    Forced,
    Logprobs,
    ModelInfo,
    NewRow,
    RowSampling,
    Sampled,
    StepPlan,
)
from raylm.core.structure import StructuredOutput
from raylm.executor.base import Preparation

VOCAB = 64
EOS = 0


BROKEN = "broken"
"""A grammar that fails its request once it has said so many tokens."""
BREAKS_AT = 5


def next_token(tokens: list[int], output: list[int] | None = None) -> int:
    """What the fake model says after `tokens`, where `output`, their generated part, has a grammar if it is given."""
    ways = range(VOCAB) if output is None else allowed(output)
    return ways[zlib.crc32(bytes(tokens)) % len(ways)]


def allowed(output: list[int]) -> list[int]:
    """The tokens that the fake grammar allows after an output: one of four times a single one."""
    hash = zlib.crc32(bytes([*output, 1]))
    return [hash // 4 % VOCAB] if hash % 4 == 0 else list(range(hash % 2, VOCAB, 2))


def forced(output: list[int]) -> list[int]:
    """The tokens that must follow an output; now and then what is told of them is wrong."""
    told: list[int] = []
    while len(ways := allowed([*output, *told])) == 1:
        told += ways
    return [*told[:-1], VOCAB - 1] if sum(told) % 5 == 4 else told


def logprob(tokens: list[int], token: int) -> float:
    """How likely the fake model finds `token` after `tokens`; not normed, but always below 0."""
    return -0.1 - zlib.crc32(bytes([*tokens, token])) / 2**32 * 4


def candidates(tokens: list[int], count: int) -> Candidates:
    """The likeliest tokens after `tokens`."""
    ranked = sorted(range(VOCAB), key=lambda token: -logprob(tokens, token))[:count]
    return Candidates(ranked, [logprob(tokens, token) for token in ranked])


def logprobs_of(tokens: list[int], positions: range, num_top: int) -> Logprobs:
    """What the fake model says of the tokens at these positions."""
    ranked = [candidates(tokens[:position], VOCAB) for position in positions]
    own = [tokens[position] for position in positions]
    return Logprobs(
        [logprob(tokens[:position], tokens[position]) for position in positions],
        [found.token_ids.index(token) + 1 for found, token in zip(ranked, own, strict=True)],
        [found.token_ids[:num_top] for found in ranked],
        [found.logprobs[:num_top] for found in ranked],
    )


def expected_tokens(prompt: list[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], str]:
    """The output and finish reason of one request, run alone and naively."""
    tokens = list(prompt)
    limit, stops = limits(prompt, params, max_model_len)
    while True:
        tokens.append(next_token(tokens, tokens[len(prompt) :] if params.structure is not None else None))
        if tokens[-1] in stops:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= limit:
            return tokens[len(prompt) :], "length"


def limits(prompt: list[int], params: SamplingParams, max_model_len: int) -> tuple[int, set[int]]:
    """Longest length and stop tokens of a request."""
    limit = max_model_len if params.max_tokens is None else min(max_model_len, len(prompt) + params.max_tokens)
    return limit, set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})


def expected_beams(
    prompt: list[int],
    params: SamplingParams,
    max_model_len: int,
    text_ends: Callable[[list[int]], bool] = lambda output: False,
) -> list[tuple[list[int], str]]:
    """The results of a beam search, best first, run naively on whole sequences."""
    limit, stops = limits(prompt, params, max_model_len)
    beams, ended = [(0.0, list(prompt))], []

    def norm(score: float, length: int) -> float:
        return score / math.pow(length, params.length_penalty)

    while True:
        ranked = []
        for score, tokens in beams:
            found = candidates(tokens, 2 * params.beam_width)
            ranked += [(score + lp, tokens, token) for token, lp in zip(*found, strict=True)]
        ranked.sort(key=lambda one: -one[0])
        beams = []
        for score, tokens, token in ranked[: 2 * params.beam_width]:
            output = [*tokens[len(prompt) :], token]
            if token in stops or len(tokens) + 1 >= limit or text_ends(output):
                ended.append((norm(score, len(output)), output, "stop" if token in stops else "length"))
            else:
                beams.append((score, [*tokens, token]))
            if len(beams) == params.beam_width:
                break
        ended = sorted(ended, key=lambda one: -one[0])[: params.beam_width]
        if beams and len(ended) == params.beam_width:
            longest = limit if params.length_penalty > 0 else len(beams[0][1])
            beaten = ended[-1][0] >= norm(beams[0][0], longest - len(prompt))
            beams = [] if params.early_stopping or beaten else beams
        if not beams:
            return [(output, reason) for _, output, reason in ended[: params.n]]


@dataclass
class _Row:
    tokens: list[int]
    sampling: RowSampling
    drafts: dict[int, int] = field(default_factory=dict)
    """Proposed tokens by position; a token that turns out known takes its place."""
    blocks: list[dict[int, int]] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.sampling.num_prompt :]

    def next_token(self) -> int:
        return next_token(self.tokens, self.output if self.sampling.params.structure is not None else None)


class _Compiling:
    """A grammar on its way: ready when it has been asked for often enough."""

    def __init__(self, times: int) -> None:
        self._times = times

    def wait(self, seconds: float) -> bool:
        self._times -= 1
        return self._times <= 0


class FakeExecutor:
    """Runs plans on the fake worker; results come in order, when they are asked for."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 64,
        budget: int = 1 << 30,
        windows: tuple[int, ...] = (0,),
        num_host_blocks: int = 0,
    ):
        layout = CacheLayout(block_size, list(windows))
        self.info = ModelInfo(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            layout=layout,
            block_bytes=1,
            prefill_tokens_per_s=1.0 if num_host_blocks else 0.0,
            swap_bytes_per_s=1e9 if num_host_blocks else 0.0,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
            device="fake",
            dtype="float32",
            cache_dtype="float32",
            phases={},
        )
        self.block_size = block_size
        self.windows = windows
        self.budget = budget
        self.counts = RowCounts()
        self.rows: dict[int, _Row] = {}
        self.device: dict[int, dict[int, tuple[int, int, int]]] = {}
        """Of each block, by offset: group, position, token."""
        self.host: dict[int, dict[int, tuple[int, int, int]]] = {}
        self.plans: deque[StepPlan] = deque()
        self.orders: list[tuple[int, WorkerControl]] = []
        """What it was told, each with the number of steps before it."""
        self.num_steps = 0
        self.num_computed = 0
        self.fail_at: int | None = None

    def start(self) -> ModelInfo:
        return self.info

    def prepare(self, structure: StructuredOutput) -> Preparation | None:
        return _Compiling(len(structure.value) % 4)

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    @property
    def done(self) -> bool:
        return True

    def result(self) -> Sampled:
        self.num_steps += 1
        if self.fail_at is not None and self.num_steps >= self.fail_at:
            raise RuntimeError("the fake worker was told to fail")
        return self._execute(self.plans.popleft())

    def control(self, op: WorkerControl) -> list[str]:
        self.orders.append((self.num_steps + len(self.plans), op))
        return ["done"]

    def check(self) -> None:
        """Nobody here can die."""

    def shutdown(self) -> None:
        self.plans.clear()

    def _execute(self, plan: StepPlan) -> Sampled:
        assert 0 < plan.total_tokens <= self.budget
        assert len(set(plan.rows)) == len(plan.rows)
        assert all(count > 0 for count in plan.num_tokens)
        self.num_computed += plan.total_tokens
        self._copy(plan)
        self._check_bounds(plan)
        for new in plan.new_rows:
            self._begin(new)
        for row, token in plan.chosen:
            assert self.rows[row].sampling.num_candidates
            self.rows[row].tokens.append(token)
        for draft in plan.drafts:
            self.rows[draft.row].drafts |= dict(enumerate(draft.token_ids, draft.first))
        for added in plan.new_blocks:
            for column, block in enumerate(added.block_ids, added.first_column):
                assert 0 <= block < self.info.num_blocks
                self.rows[added.row].blocks[added.group][column] = block
        steps = self.counts.take(plan)
        # All of a step's writes come before its reads, as in the kernels.
        for step in steps:
            self._write(step)
        for step in steps:
            self._read(step)
        return self._sample(plan, steps)

    def _check_bounds(self, plan: StepPlan) -> None:
        """The scheduler's upper bounds hold, and are exact where nothing is on its way."""
        taken = {new.row for new in plan.new_rows}
        for row, bound in plan.bounds:
            if row not in taken:
                assert len(self.rows[row].tokens) <= bound

    def _copy(self, plan: StepPlan) -> None:
        if plan.copies is None:
            return
        moves = (
            (plan.copies.swap_out, self.device, self.host),
            (plan.copies.forked, self.device, self.device),
            (plan.copies.swap_in, self.host, self.device),
        )
        for pairs, source, target in moves:
            assert len({to for _, to in pairs}) == len(pairs), "two copies into one block"
            contents = [dict(source.get(block, {})) for block, _ in pairs]
            for (_, to), content in zip(pairs, contents, strict=True):
                target[to] = content

    def _begin(self, new: NewRow) -> None:
        tables: list[dict[int, int]] = [{} for _ in self.windows]
        self.rows[new.row] = _Row(list(new.token_ids), new.sampling, blocks=tables)

    def _text(self, step: RowStep) -> list[int]:
        """The row's tokens as this step reads them: what is known, then drafts, of which an unset cell may hold any."""
        row = self.rows[step.row]
        known = len(row.tokens)
        assert step.end - step.num_drafts <= known, "a step computes tokens that are not known"
        assert not step.num_drafts or step.end - step.num_drafts == known
        return row.tokens + [row.drafts.get(position, 0) for position in range(known, step.end)]

    def _write(self, step: RowStep) -> None:
        text = self._text(step)
        for group, blocks in enumerate(self.rows[step.row].blocks):
            for position in range(step.first, step.end):
                block = blocks[position // self.block_size]
                assert block > 0
                slot = (group, position, text[position])
                self.device.setdefault(block, {})[position % self.block_size] = slot

    def _read(self, step: RowStep) -> None:
        row, text = self.rows[step.row], self._text(step)
        for group, window in enumerate(self.windows):
            first = max(step.first - window + 1, 0) if window else 0
            for position in range(first, step.end):
                block = row.blocks[group][position // self.block_size]
                found = self.device[block].get(position % self.block_size)
                assert found == (group, position, text[position]), "the cache holds something else"

    def _sample(self, plan: StepPlan, steps: list[RowStep]) -> Sampled:
        tokens, counts, logprobs, reports, prompts = [], [], [], [], []
        told: list[Forced] = []
        failed: list[tuple[int, str]] = []
        for step in steps:
            row = self.rows[step.row]
            params = row.sampling.params
            if params.prompt_logprobs is not None and step.first < row.sampling.num_prompt - 1:
                last = min(step.end, row.sampling.num_prompt - 1)
                prompts.append(logprobs_of(row.tokens, range(step.first + 1, last + 1), params.prompt_logprobs))
            if step.reports:
                reports.append(candidates(row.tokens, row.sampling.num_candidates))
            if not step.samples:
                continue
            structure = params.structure
            if structure is not None and structure.value == BROKEN and len(row.output) >= BREAKS_AT:
                failed.append((len(counts), "the fake grammar is broken"))
            accepted = self._accept(step)
            if structure is not None and (must := forced(row.output)):
                told.append(Forced(len(counts), len(row.tokens), must))
            if params.logprobs is not None:
                known = len(row.tokens)
                found = logprobs_of(row.tokens, range(known - len(accepted), known), params.logprobs)
                logprobs.append((len(counts), found))
            tokens += accepted
            counts.append(len(accepted))
        verifies = any(step.num_drafts for step in steps)
        return Sampled(plan.step, tokens, counts if verifies else [], logprobs, reports, prompts, told, failed)

    def _accept(self, step: RowStep) -> list[int]:
        """The tokens that a row samples: up to the first that is not its draft, and that one."""
        row = self.rows[step.row]
        accepted: list[int] = []
        for _ in range(1 + step.num_drafts):
            token = row.next_token()
            draft = row.drafts.get(len(row.tokens), 0)
            row.tokens.append(token)
            accepted.append(token)
            if token != draft:
                break
        self.counts.reject(step.row, 1 + step.num_drafts - len(accepted))
        return accepted
