"""A step on its way: what it gives is on the device until the engine asks for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raylm.core.step import Candidates, StepResult
from raylm.worker.transfer import Download


class Likeliest(NamedTuple):
    """The likeliest tokens of some rows, likeliest first, and their log probabilities: both [num_rows, most].

    Row i asked for counts[i] of them.
    """

    token_ids: Tensor
    logprobs: Tensor
    counts: list[int]


class Outputs(NamedTuple):
    """What a step gives, on the device. Tensors are parallel to the rows that sampled."""

    token_ids: Tensor | None = None
    """[num_sampled] int64."""
    logprobs: Tensor | None = None
    """[num_sampled], 0 for rows that did not ask; None where none did."""
    likeliest: Likeliest | None = None


class PendingStep:
    """A step that the device has been given. `result` waits for this one and for no later one."""

    def __init__(self, step: int, outputs: Outputs, device: torch.device) -> None:
        self._step = step
        self._outputs = outputs
        tensors = [outputs.token_ids, outputs.logprobs, *(outputs.likeliest or (None, None))[:2]]
        self._download = Download([tensor for tensor in tensors if isinstance(tensor, Tensor)], device)

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._download.done

    def result(self) -> StepResult:
        outputs, arrived = self._outputs, iter(self._download.get())
        token_ids = next(arrived).tolist() if outputs.token_ids is not None else []
        logprobs = next(arrived).tolist() if outputs.logprobs is not None else []
        if outputs.likeliest is None:
            return StepResult(self._step, token_ids, logprobs)
        ids, values = next(arrived).tolist(), next(arrived).tolist()
        counts = outputs.likeliest.counts
        candidates = [Candidates(i[:n], v[:n]) for i, v, n in zip(ids, values, counts, strict=True)]
        return StepResult(self._step, token_ids, logprobs, candidates)
