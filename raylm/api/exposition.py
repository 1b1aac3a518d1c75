"""Metrics as they travel from the ingress that counts to the one that is scraped, and as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

PREFIX = "raylm:"
_VLLM_PREFIX = "vllm:"
VLLM_NAMES = frozenset(
    {
        "cache_config_info",
        "e2e_request_latency_seconds",
        "generation_tokens",
        "inter_token_latency_seconds",
        "iteration_tokens_total",
        "kv_block_idle_before_evict_seconds",
        "kv_block_lifetime_seconds",
        "kv_block_reuse_gap_seconds",
        "kv_cache_usage_perc",
        "lora_requests_info",
        "num_preemptions",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "prompt_tokens_cached",
        "request_decode_time_seconds",
        "request_generation_tokens",
        "request_inference_time_seconds",
        "request_max_num_generation_tokens",
        "request_params_max_tokens",
        "request_params_n",
        "request_prefill_time_seconds",
        "request_prompt_tokens",
        "request_queue_time_seconds",
        "request_success",
        "request_time_per_output_token_seconds",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_drafts",
        "time_per_output_token_seconds",
        "time_to_first_token_seconds",
    }
)
"""Families, without the prefix, that vLLM has under the same name and with the same meaning."""


class Family(msgspec.Struct, array_like=True, frozen=True):
    """One metric with all its series: (name, labels, value) each. `kind` is Prometheus' type."""

    name: str
    kind: str
    text: str
    samples: list[tuple[str, dict[str, str], float]]


_decoder = msgspec.msgpack.Decoder(list[Family])


def families_of(metrics: Iterable[Metric]) -> list[Family]:
    """Metrics as values, with the counts of this moment."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples],
        )
        for metric in metrics
    ]


def packed(families: list[Family]) -> bytes:
    return msgspec.msgpack.encode(families)


def unpacked(data: bytes) -> list[Family]:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(data)


def labelled(families: Iterable[Family], labels: Mapping[str, str]) -> list[Family]:
    """The same with these labels on every series."""
    return [
        Family(each.name, each.kind, each.text, [(name, {**own, **labels}, value) for name, own, value in each.samples])
        for each in families
    ]


def without_gauges(families: Iterable[Family]) -> list[Family]:
    """What a process that has gone may still be counted with: what is now is no more."""
    return [each for each in families if each.kind != "gauge"]


def render(families: Iterable[Family], *, vllm_names: bool = False) -> bytes:
    """Prometheus' text. Families of one name are made one. With `vllm_names` those that vLLM has come a second time,
    under its prefix."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(families, vllm_names))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, families: Iterable[Family], vllm_names: bool) -> None:
        self._families = families
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        by_name: dict[str, Metric] = {}
        for family in self._families:
            for prefix in self._prefixes(family.name):
                name = family.name if prefix is None else prefix + family.name.removeprefix(PREFIX)
                metric = by_name.get(name)
                if metric is None:
                    metric = by_name[name] = Metric(name, family.text, family.kind)
                for sample, labels, value in family.samples:
                    named = sample if prefix is None else prefix + sample.removeprefix(PREFIX)
                    metric.add_sample(named, labels, value)
        yield from by_name.values()

    def _prefixes(self, name: str) -> tuple[str | None, ...]:
        is_vllms = self._vllm_names and name.startswith(PREFIX) and name.removeprefix(PREFIX) in VLLM_NAMES
        return (None, _VLLM_PREFIX) if is_vllms else (None,)
