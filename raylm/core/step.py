"""The values that travel between the scheduler and the workers.

They are NamedTuples: frozen, cheap to make, and encoded as arrays by msgpack. They are deltas: a request's tokens
travel once, when it gets a row; after that a decode step costs a few bytes a request. Both sides count alike: a row
whose computed tokens reach its known tokens samples one more token, which the worker keeps on its device.
"""

from __future__ import annotations

from typing import NamedTuple


class RowSampling(NamedTuple):
    """How one row samples. `seed` and the position of the sampled token fix the random number drawn for it."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int


class NewRow(NamedTuple):
    """A request takes a row: everything the worker must know of it. `token_ids` are all its known tokens."""

    row: int
    token_ids: list[int]
    num_computed: int
    sampling: RowSampling


class StepPlan(NamedTuple):
    """One step. Lists are parallel: rows[i] computes num_tokens[i] tokens, after it got new_blocks[i]."""

    step: int
    new_rows: list[NewRow]
    rows: list[int]
    num_tokens: list[int]
    new_blocks: list[list[int]]

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


class StepResult(NamedTuple):
    """The sampled token of every row that sampled in this step, in the plan's order."""

    step: int
    token_ids: list[int]


class ModelInfo(NamedTuple):
    """What the workers report once a model is loaded and its KV cache is sized (the minimum over workers)."""

    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    device: str
    dtype: str
    phases: dict[str, float]
    """Start-up phases in seconds: import, weights, memory ..."""


class TokenDelta(NamedTuple):
    """What one step gave one request. `finish_reason` is "stop", "length", "abort", "error" or None while it runs.

    With "stop" the last of token_ids is the token that ended it: it counts, but is no part of the text.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    message: str | None = None
