"""What an engine measures of itself beside its load."""

from __future__ import annotations

from typing import NamedTuple

from raylm.core.histogram import Buckets

STEP_BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""In seconds, of one stage of one step."""
# The bounds of vLLM's histograms, so that its boards fit.
TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
AGE_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1200.0, 1800.0),
)


class BlockMeasures(NamedTuple):
    """Ages of blocks of the KV cache, in seconds: see BlockAges."""

    lifetime: Buckets
    idle_before_evict: Buckets
    reuse_gap: Buckets


class EngineMeasures(NamedTuple):
    """Told once a second, since the engine's start. step_seconds: by stage of the step loop. step_tokens: tokens that
    each step computed."""

    step_seconds: dict[str, Buckets]
    step_tokens: Buckets
    blocks: BlockMeasures
