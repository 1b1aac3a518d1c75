"""A step on its way: what it gives is on the device until the engine asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raylm.core.step import Candidates, Forced, Logprobs, Sampled
from raylm.worker.input_batch import starts
from raylm.worker.sampling.logprobs import HostLogprobs, Likeliest, TokenLogprobs
from raylm.worker.transfer import Download


class LogprobParts(NamedTuple):
    """Log probabilities of tokens, and whose they are: part i has lens[i] of the tokens, in order, and wants num_top[i]
    likeliest tokens of each; -1 where it wants nothing."""

    tokens: TokenLogprobs
    lens: np.ndarray
    num_top: np.ndarray


class Outputs(NamedTuple):
    """What a step gives, on the device."""

    token_ids: Tensor | None = None
    """int64 [M]: what was sampled after every token of rows that sample."""
    num_sampled: np.ndarray | None = None
    counts: Tensor | None = None
    """Of each row that samples: how many of token_ids are its, and how many of those it keeps; None where no row has
    drafts."""
    logprobs: LogprobParts | None = None
    """Of token_ids, one part a row that samples; None where none wants them."""
    likeliest: Likeliest | None = None
    num_candidates: list[int] = []
    """Of rows that report: the likeliest tokens, and how many of them each has asked for."""
    prompts: LogprobParts | None = None
    """Of tokens of prompts, one part a row."""
    forced: list[Forced] = []
    failed: list[tuple[int, str]] = []
    """As Sampled has them."""


class PendingStep:
    """A step that the device has been given. `result` waits for this one and for no later one."""

    def __init__(self, step: int, outputs: Outputs, device: torch.device) -> None:
        self._step = step
        self._outputs = outputs
        given = outputs
        tensors = [given.token_ids, given.counts, *(given.likeliest or ())]
        for parts in (given.logprobs, given.prompts):
            tensors += parts.tokens if parts is not None else ()
        self._download = Download([tensor for tensor in tensors if tensor is not None], device)

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._download.done

    def result(self) -> Sampled:
        given, arrived = self._outputs, iter(self._download.get())
        token_ids = next(arrived).tolist() if given.token_ids is not None else []
        counts = next(arrived).tolist() if given.counts is not None else []
        candidates = []
        if given.likeliest is not None:
            ids, values = next(arrived).tolist(), next(arrived).tolist()
            candidates = [Candidates(i[:n], v[:n]) for i, v, n in zip(ids, values, given.num_candidates, strict=True)]
        logprobs = [] if given.logprobs is None else _cut(given.logprobs, _take(arrived))
        prompts = [] if given.prompts is None else _cut(given.prompts, _take(arrived))
        if counts:
            assert given.num_sampled is not None, "rows that verify drafts say how many"
            first = starts(given.num_sampled).tolist()
            token_ids = [
                token for start, count in zip(first, counts, strict=False) for token in token_ids[start : start + count]
            ]
            logprobs = [(index, found.first(counts[index])) for index, found in logprobs]
        told = [found for _, found in prompts]
        return Sampled(self._step, token_ids, counts, logprobs, candidates, told, given.forced, given.failed)


def _take(arrived: Iterator[Tensor]) -> HostLogprobs:
    """The next tensors that have arrived, as log probabilities."""
    return HostLogprobs(list(islice(arrived, len(TokenLogprobs._fields))))


def _cut(parts: LogprobParts, found: HostLogprobs) -> list[tuple[int, Logprobs]]:
    """(i, what part i wanted)."""
    first = starts(parts.lens).tolist()
    return [
        (index, found.cut(first[index], first[index + 1], num_top))
        for index, num_top in enumerate(parts.num_top.tolist())
        if num_top >= 0
    ]
