"""The values that travel between the scheduler and the workers.

They are NamedTuples: frozen, cheap to make, and encoded as arrays by msgpack. They are deltas: a request's tokens
travel once, when it gets a row; after that a decode step costs a few bytes a request. Both sides count alike, by
RowCounts' rule: a row whose computed tokens reach its known ones samples (a row with `num_candidates` does not sample:
it reports candidates, and the plan that goes on with it brings the token). What a row computes past its known tokens
are drafts, which the step verifies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from raylm.core.sampling import SamplingParams


class RowSampling(NamedTuple):
    """Sampling of one row: what its request asked for, and what the row needs beside it."""

    params: SamplingParams
    seed: int = 0
    """The random number of a sampled token follows from the seed and the token's position alone."""
    num_prompt: int = 0
    """Tokens of the prompt. A request that gets a row again brings tokens that it has generated with them."""
    stop_ids: list[int] = []
    """Tokens that end the request; only where `params.min_tokens` forbids them at first, or `params.structure` does."""
    num_candidates: int = 0
    """Over 0: sample nothing, report this many likeliest tokens with their log probabilities instead."""


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


class Drafts(NamedTuple):
    """Tokens that a row may go on with: they go into its cells of the positions `first`, first + 1, and so on.

    Cells of tokens that the worker knows by then keep them, so a proposer may guess tokens of steps on their way too.
    """

    row: int
    first: int
    token_ids: list[int]


class StepPlan(NamedTuple):
    """One step. `rows` and `num_tokens` are parallel: rows[i] computes its next num_tokens[i] tokens.

    A row with u known tokens to compute that computes u + k of them verifies k drafts: whatever stands in its cells
    past the known tokens.
    """

    step: int
    new_rows: list[NewRow]
    new_blocks: list[NewBlocks]
    rows: list[int]
    num_tokens: list[int]
    copies: Copies | None = None
    chosen: list[tuple[int, int]] = []
    """(row, token): the known tokens of a row with num_candidates grow by this one."""
    drafts: list[Drafts] = []
    bounds: list[tuple[int, int]] = []
    """(row, upper bound on the row's known tokens when this plan begins), for rows of which drafts were rejected."""

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


class Candidates(NamedTuple):
    """The likeliest next tokens of one row, likeliest first, and their log probabilities."""

    token_ids: list[int]
    logprobs: list[float]


class Logprobs(NamedTuple):
    """Log probabilities of some tokens; all four are parallel to the tokens."""

    values: list[float]
    ranks: list[int]
    """Of the token itself among all tokens; 1 is the likeliest."""
    top_ids: list[list[int]]
    top_values: list[list[float]]
    """The likeliest tokens, likeliest first, or those of `logprob_token_ids`; empty where none were asked for."""

    def since(self, index: int) -> Logprobs:
        """Those from the index-th token on."""
        return Logprobs(self.values[index:], self.ranks[index:], self.top_ids[index:], self.top_values[index:])

    def first(self, count: int) -> Logprobs:
        """Those of the first `count` tokens."""
        return Logprobs(self.values[:count], self.ranks[:count], self.top_ids[:count], self.top_values[:count])


def join_logprobs(parts: Iterable[Logprobs | None]) -> Logprobs | None:
    """Log probabilities of several pieces of a text, in order; None where no piece has any."""
    found = [part for part in parts if part is not None]
    if len(found) < 2:
        return found[0] if found else None
    whole = Logprobs([], [], [], [])
    for part in found:
        whole.values.extend(part.values)
        whole.ranks.extend(part.ranks)
        whole.top_ids.extend(part.top_ids)
        whole.top_values.extend(part.top_values)
    return whole


class Forced(NamedTuple):
    """Tokens that a row is likely to have next: at each place its grammar allows this token and
    beginnings of it alone.

    nth: the row is the nth of those of its step that sampled. first: the position of the first of token_ids.
    """

    nth: int
    first: int
    token_ids: list[int]


class Sampled(NamedTuple):
    """What a step gave, in the plan's order of rows."""

    step: int
    token_ids: list[int]
    """The tokens of all rows that sampled, one row after the other."""
    counts: list[int] = []
    """Tokens of each row that sampled; empty where all have one."""
    logprobs: list[tuple[int, Logprobs]] = []
    """(i, log probabilities of the tokens of the i-th row that sampled), for the rows that asked."""
    candidates: list[Candidates] = []
    """One for every row with num_candidates whose known tokens are all computed."""
    prompt_logprobs: list[Logprobs] = []
    """Log probabilities of prompt tokens: one entry for each row that asked for `prompt_logprobs` and computed prompt
    tokens before its last. A token's comes with the step that computes the token before it."""
    forced: list[Forced] = []
    """For rows with a grammar that has begun; each run of such tokens once."""
    failed: list[tuple[int, str]] = []
    """(i, what went wrong) of the i-th row that sampled: its tokens mean nothing."""


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
        return bisect_right(range(1, limit + 1), num_blocks, key=partial(self.blocks_for, chunk=chunk))


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
    """Of activations, and of weights that are not kept otherwise."""
    cache_dtype: str
    """Of keys and values."""
    phases: dict[str, float]
    """Start-up phases in seconds: import, weights, memory ..."""


class Waited(NamedTuple):
    """What came before a sequence's first token, in seconds: from the engine's taking it in to its first step, and
    from there to the token. Sequences of one prompt share its first step."""

    queue_s: float
    prefill_s: float


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
    logprobs: Logprobs | None = None
    """Of token_ids, where SamplingParams.logprobs asked for them."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt's second token and all after it: on the first delta of a prompt's first sequence, and of others of
    its sequences that had to compute the prompt themselves."""
    waited: Waited | None = None
    """On a sequence's first delta."""
