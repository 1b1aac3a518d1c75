"""The values that travel between the scheduler and the workers.

They are NamedTuples: frozen, cheap to make, and encoded as arrays by msgpack. They are deltas: a request's tokens
travel once, when it gets a row; after that a decode step costs a few bytes a request. Both sides count alike: a row
whose computed tokens reach its known tokens samples one more token, which the worker keeps on its device (a row with
`num_candidates` does not sample: it reports candidates, and the plan that goes on with it brings the token).
"""

from __future__ import annotations

from typing import NamedTuple


class RowPenalties(NamedTuple):
    """What a row's tokens do to the logits of the next one; at least one of the three is not neutral.

    The first `num_prompt` tokens are the prompt, which only counts for `repetition`. A request that gets a row again
    brings tokens that it has generated: the length of what comes with the row does not say.
    """

    num_prompt: int
    repetition: float
    frequency: float
    presence: float


class RowSampling(NamedTuple):
    """How one row samples. `seed` and the position of the sampled token fix the random number drawn for it."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    logprob: bool = False
    """Report the log probability of each sampled token (of the model's own distribution, at temperature 1)."""
    num_candidates: int = 0
    """Over 0: sample nothing, report this many likeliest tokens with their log probabilities instead."""
    penalties: RowPenalties | None = None


class NewRow(NamedTuple):
    """A request takes a row: everything the worker must know of it. `token_ids` are all its known tokens.

    The first `num_computed` of them are in blocks that this plan or an earlier one filled.
    """

    row: int
    token_ids: list[int]
    num_computed: int
    sampling: RowSampling


class NewBlocks(NamedTuple):
    """Blocks for columns first_column, first_column + 1, ... of a row's block table in one cache group.

    Column c holds positions c * block_size and on. Block 0 stands for a column that no kernel will read any more.
    """

    row: int
    group: int
    first_column: int
    block_ids: list[int]


class Copies(NamedTuple):
    """Whole blocks to copy before the step computes, all of one list before the next; pairs are (from, to)."""

    swap_out: list[tuple[int, int]]
    """From a device block to a host block."""
    forked: list[tuple[int, int]]
    """From a device block to a device block."""
    swap_in: list[tuple[int, int]]
    """From a host block to a device block."""


class StepPlan(NamedTuple):
    """One step. `rows` and `num_tokens` are parallel: rows[i] computes its next num_tokens[i] tokens."""

    step: int
    new_rows: list[NewRow]
    new_blocks: list[NewBlocks]
    rows: list[int]
    num_tokens: list[int]
    copies: Copies | None = None
    chosen: list[tuple[int, int]] = []
    """(row, token): the known tokens of a row with num_candidates grow by this one."""

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


class Candidates(NamedTuple):
    """The likeliest next tokens of one row, likeliest first, and their log probabilities."""

    token_ids: list[int]
    logprobs: list[float]


class StepResult(NamedTuple):
    """What a step sampled, in the plan's order of rows."""

    step: int
    token_ids: list[int]
    """One for every row that sampled."""
    logprobs: list[float] = []
    """Parallel to token_ids where any of these rows asked for it, else empty; 0.0 for rows that did not."""
    candidates: list[Candidates] = []
    """One for every row with num_candidates whose known tokens are all computed."""


class CacheLayout(NamedTuple):
    """How the KV cache is cut into blocks.

    Layers stand in groups of equal size; a block holds `block_size` tokens of all layers of one group, and blocks of
    every group come from one pool. windows[g] is the sliding window of group g in tokens, 0 for full attention.
    """

    block_size: int
    windows: list[int]

    def blocks_for(self, num_tokens: int, *, chunk: int) -> int:
        """Blocks that one request of `num_tokens` holds at most, when a step computes up to `chunk` of its tokens."""
        total = 0
        for window in self.windows:
            # A window and a chunk may both begin inside a block.
            held = num_tokens if not window else min(num_tokens, window + chunk + 2 * self.block_size)
            total += -(-held // self.block_size)
        return total

    def longest(self, num_blocks: int, *, chunk: int, limit: int) -> int:
        """Tokens, up to `limit`, of the longest request that `num_blocks` blocks hold."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_for(middle, chunk=chunk) <= num_blocks else (low, middle - 1)
        return low


class ModelInfo(NamedTuple):
    """What the workers report once a model is loaded and its KV cache is sized (the minimum over workers)."""

    num_blocks: int
    """Device blocks; block 0 is for padding."""
    num_host_blocks: int
    """Blocks of the swap pool in host memory; 0 without one."""
    layout: CacheLayout
    block_bytes: int
    prefill_tokens_per_s: float
    """Tokens a second of a full step of prefill, and bytes a second of a copy between device and host: what a
    preemption by recompute and one by swap would cost. 0 where not measured."""
    swap_bytes_per_s: float
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    device: str
    dtype: str
    phases: dict[str, float]
    """Start-up phases in seconds: import, weights, memory ..."""


class TokenDelta(NamedTuple):
    """What one step gave one sequence.

    `finish_reason` is None while it runs, else "stop", "length", "abort", "deadline" (its time was up; `message` says
    so) or "error". With "stop" the last of token_ids is the token that ended it: it counts, but is no part of the text.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    message: str | None = None
    num_cached_tokens: int = 0
    """On a sequence's first delta: tokens of its prompt that were in the prefix cache."""
    logprobs: list[float] = []
    """Parallel to token_ids where SamplingParams.logprobs asked for them."""
