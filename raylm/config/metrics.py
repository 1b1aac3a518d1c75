"""What /metrics shows."""

from __future__ import annotations

from raylm.config.base import FrozenConfig


class MetricsConfig(FrozenConfig):
    """GET /metrics of an ingress."""

    vllm_names: bool = False
    """Show what vLLM counts too a second time, under vLLM's own names (`vllm:` in place of `raylm:`), for boards,
    autoscalers and routers that are made for vLLM."""
