"""Stop strings for those who choose between sequences: whether one more token ends a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raylm.core.sampling import SamplingParams
from raylm.text.processor import TextProcessor

_MARGIN = 8
"""Bytes looked at before those that a stop string may reach back to: the characters there may have begun earlier."""


def text_ends(text: TextProcessor, params: SamplingParams) -> Callable[[Sequence[int]], bool]:
    """A function from an output's tokens to whether the last of them completes one of params.stop. A call looks at as
    many of the last tokens as the longest stop string may reach back to, whatever the length of the output. `params`
    have no min_tokens, which would allow no stop string at first: a beam search has none."""
    stops = text.stop_table(params)
    # Called for every candidate of every step: only what the text depends on, checked once.
    of_text = SamplingParams(
        stop=params.stop,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    table = text.tokenizer.table if params.skip_special_tokens else text.tokenizer.table_with_special
    reach = max((len(stop.encode()) for stop in params.stop), default=0) + _MARGIN

    def ends(token_ids: Sequence[int]) -> bool:
        first, num_bytes = len(token_ids) - 1, 0
        while first > 0 and num_bytes < reach:
            first -= 1
            num_bytes += len(table[token_ids[first]])
        stream = text.stream(of_text, continues_prompt=True, stops=stops)
        stream.push(list(token_ids[first:]), None)
        return stream.stopped

    return ends
