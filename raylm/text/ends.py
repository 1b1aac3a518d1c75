"""Stop strings for those who choose between sequences: whether one more token ends a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from raylm.core.sampling import SamplingParams
from raylm.text.processor import TextProcessor

_MARGIN = 8
"""Bytes looked at before those that a stop string may reach back to: the characters there may have begun earlier."""


def text_ends(text: TextProcessor, params: SamplingParams) -> Callable[[Sequence[int]], bool]:
    """A function from an output's tokens to whether the last of them completes one of params.stop. A call looks at as
    many of the last tokens as the longest stop string may reach back to, whatever the length of the output."""
    stops = text.stop_table(params)
    table = text.tokenizer.table if params.skip_special_tokens else text.tokenizer.table_with_special
    reach = max((len(stop.encode()) for stop in params.stop), default=0) + _MARGIN

    def ends(token_ids: Sequence[int]) -> bool:
        # What is not free of stop strings may still begin in a token that is.
        if len(token_ids) <= params.min_tokens:
            return False
        first, num_bytes = len(token_ids) - 1, 0
        while first > 0 and num_bytes < reach:
            first -= 1
            num_bytes += len(table[token_ids[first]])
        free = replace(params, min_tokens=max(params.min_tokens - first, 0), max_tokens=None)
        stream = text.stream(free, continues_prompt=True, stops=stops)
        stream.push(list(token_ids[first:]), None)
        return stream.stopped

    return ends
