"""What engines say of themselves, as metrics: under vLLM's names with the prefix "raylm:"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from raylm.core.histogram import Buckets
from raylm.core.measures import EngineMeasures
from raylm.generation.served_model import EngineStats

_LABELS = ["model_name", "engine"]
_GAUGES = (
    ("running", "raylm:num_requests_running", "Completions that an engine runs now."),
    ("waiting", "raylm:num_requests_waiting", "Completions that wait in an engine."),
    ("waiting_tokens", "raylm:num_prompt_tokens_waiting", "Prompt tokens of the completions that wait in an engine."),
    ("kv_usage", "raylm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is full."),
)
_COUNTERS = (
    ("num_preemptions", "raylm:num_preemptions", "Completions that gave up their place for others."),
    ("num_swaps", "raylm:num_swaps", "Preemptions that copied the KV cache to host memory."),
    ("prefix_queries", "raylm:prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache."),
    ("prefix_hits", "raylm:prefix_cache_hits", "Prompt tokens that were found in the prefix cache."),
    ("num_generated", "raylm:engine_generation_tokens", "Tokens that an engine has generated."),
)
_DRAFT_COUNTERS = (
    ("num_drafts", "raylm:spec_decode_num_drafts", "Drafts, of one token or several, that were verified."),
    ("num_draft_tokens", "raylm:spec_decode_num_draft_tokens", "Draft tokens that were verified."),
    ("num_accepted_tokens", "raylm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
)
_LORA_LABELS = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]


def add_buckets(family: HistogramMetricFamily, labels: list[str], buckets: Buckets) -> None:
    """A series of a histogram."""
    names = [*(str(float(bound)) for bound in buckets.bounds), "+Inf"]
    family.add_metric(labels, list(zip(names, accumulate(buckets.counts), strict=True)), buckets.total)


def engine_metrics(engines: Sequence[EngineStats]) -> Iterator[Metric]:
    """Every engine's series, as it last reported them."""
    families: list[tuple[str, GaugeMetricFamily | CounterMetricFamily]] = [
        *((field, GaugeMetricFamily(name, text, labels=_LABELS)) for field, name, text in _GAUGES),
        *((field, CounterMetricFamily(name, text, labels=_LABELS)) for field, name, text in _COUNTERS),
    ]
    for field, family in families:
        for engine in engines:
            family.add_metric([engine.model, engine.engine_id], getattr(engine.load, field))
        yield family
    yield from _of_drafts(engines)
    yield from _of_measures(engines)
    yield from _of_infos(engines)


def _of_drafts(engines: Sequence[EngineStats]) -> Iterator[Metric]:
    """Speculative decoding."""
    for field, name, text in _DRAFT_COUNTERS:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        for engine in engines:
            family.add_metric([engine.model, engine.engine_id], getattr(engine.load.drafts, field))
        yield family
    by_position = CounterMetricFamily(
        "raylm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that were accepted, by their position in the draft.",
        labels=[*_LABELS, "position"],
    )
    for engine in engines:
        for position, count in enumerate(engine.load.drafts.accepted_by_position):
            by_position.add_metric([engine.model, engine.engine_id, str(position)], count)
    yield by_position


def _of_measures(engines: Sequence[EngineStats]) -> Iterator[Metric]:
    measured = [(engine, engine.measures) for engine in engines if engine.measures is not None]
    stages = HistogramMetricFamily(
        "raylm:step_stage_seconds", "Time of a step of the engine's loop, by stage.", labels=[*_LABELS, "stage"]
    )
    for engine, measures in measured:
        for stage, buckets in measures.step_seconds.items():
            add_buckets(stages, [engine.model, engine.engine_id, stage], buckets)
    yield stages
    for name, text, of in (
        ("raylm:iteration_tokens_total", "Tokens that a step computed.", _step_tokens),
        ("raylm:kv_block_lifetime_seconds", "From a cached block's first use to its eviction.", _lifetime),
        ("raylm:kv_block_idle_before_evict_seconds", "From a cached block's last use to its eviction.", _idle),
        ("raylm:kv_block_reuse_gap_seconds", "From a cached block's use to the next one.", _reuse_gap),
    ):
        family = HistogramMetricFamily(name, text, labels=_LABELS)
        for engine, measures in measured:
            add_buckets(family, [engine.model, engine.engine_id], of(measures))
        yield family


def _step_tokens(measures: EngineMeasures) -> Buckets:
    return measures.step_tokens


def _lifetime(measures: EngineMeasures) -> Buckets:
    return measures.blocks.lifetime


def _idle(measures: EngineMeasures) -> Buckets:
    return measures.blocks.idle_before_evict


def _reuse_gap(measures: EngineMeasures) -> Buckets:
    return measures.blocks.reuse_gap


def _of_infos(engines: Sequence[EngineStats]) -> Iterator[Metric]:
    """What an engine is, which does not change."""
    cache = GaugeMetricFamily(
        "raylm:cache_config_info",
        "The KV cache, in labels: num_gpu_blocks are those of the device, num_cpu_blocks those of swaps.",
        labels=[*_LABELS, "block_size", "num_gpu_blocks", "num_cpu_blocks", "cache_dtype", "enable_prefix_caching"],
    )
    lora = GaugeMetricFamily(
        "raylm:lora_requests_info", "Adapters of the completions that run and wait.", labels=[*_LABELS, *_LORA_LABELS]
    )
    startup = GaugeMetricFamily(
        "raylm:startup_seconds", "How long an engine's start took, by phase.", labels=[*_LABELS, "phase"]
    )
    for engine in engines:
        own = [engine.model, engine.engine_id]
        if (info := engine.info) is None:
            continue
        blocks = [str(info.layout.block_size), str(info.num_blocks), str(info.num_host_blocks)]
        cache.add_metric([*own, *blocks, info.cache_dtype, str(engine.prefix_caching)], 1)
        lora.add_metric([*own, "0", "", ""], 1)
        for phase, seconds in info.phases.items():
            startup.add_metric([*own, phase], seconds)
    yield from (cache, lora, startup)
