"""How busy an engine is."""

from __future__ import annotations

from typing import NamedTuple

from raylm.core.drafting import NOTHING_DRAFTED, DraftCounters


class Load(NamedTuple):
    """What runs and what waits, for metrics, routing and autoscaling; it rides on every Deltas message. Counts are
    since the engine's start.

    num_preemptions counts every preemption, num_swaps those that copied the blocks to host memory; prefix_queries and
    prefix_hits are prompt tokens looked up and found in the prefix cache; waiting_tokens are prompt tokens of requests
    that wait for their first step; drafts are those of speculative decoding; num_generated are tokens of completions;
    queue_s are seconds that those who wait need to leave the queue, by what was measured of late.
    """

    running: int
    waiting: int
    kv_usage: float
    num_preemptions: int = 0
    num_swaps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    waiting_tokens: int = 0
    drafts: DraftCounters = NOTHING_DRAFTED
    num_generated: int = 0
    queue_s: float = 0.0
