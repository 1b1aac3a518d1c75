"""One scrape of any ingress: every ingress's counts and every engine's, none twice, and none that falls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from raylm.api.metrics import HttpMetrics
from raylm.core.histogram import Buckets
from raylm.core.load import Load
from raylm.core.measures import BlockMeasures, EngineMeasures
from raylm.core.step import CacheLayout, ModelInfo, Waited
from raylm.generation.metering import ChoiceMeter
from raylm.generation.served_model import EngineStats
from raylm.serving.directory import Directory
from raylm.serving.metrics import ray_metrics
from raylm.serving.metrics.exchange import MetricsExchange
from raylm.serving.metrics.kept import KEPT_S, LIVE_S, KeptCounts
from raylm.serving.metrics.route_counts import RouterCounts
from raylm.serving.routing.router import ModelRouter
from tests.serving.test_directory import Near, engine
from tests.support.openai_fakes import Server

Series = tuple[str, tuple[tuple[str, str], ...]]

ASKED, TOLD = "endpoint-load-metrics-format", "endpoint-load-metrics"
INFO = ModelInfo(
    num_blocks=101,
    num_host_blocks=0,
    layout=CacheLayout(16, [0]),
    block_bytes=1,
    prefill_tokens_per_s=0.0,
    swap_bytes_per_s=0.0,
    max_model_len=128,
    vocab_size=64,
    eos_token_ids=[],
    device="cpu",
    dtype="float32",
    cache_dtype="float32",
    phases={"weights": 1.5},
)


class Unreachable:
    """A directory that is away."""

    async def ask(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        raise ray.exceptions.RayError("away")


class Models:
    """What an ingress knows of engines without the Directory."""

    def stats(self) -> list[EngineStats]:
        return [EngineStats("tiny", "engine-0", Load(1, 0, 0.0))]


def stats(engine_id: str, *, running: int) -> EngineStats:
    buckets = Buckets((1.0, 2.0), [1, 2, 3], 14.0)
    measures = EngineMeasures({"wait": buckets}, buckets, BlockMeasures(buckets, buckets, buckets))
    return EngineStats("tiny", engine_id, Load(running, 0, 0.5), INFO, True, measures)


def series(text: bytes) -> dict[Series, float]:
    """Every series of a scrape; none may be there twice."""
    samples = [each for family in text_string_to_metric_families(text.decode()) for each in family.samples]
    found = Counter((sample.name, tuple(sorted(sample.labels.items()))) for sample in samples)
    assert not [name for name, times in found.items() if times > 1]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def of(found: dict[Series, float], name: str) -> dict[tuple[str, ...], float]:
    """The values of one name, by what its labels say."""
    return {tuple(value for _, value in labels): value for (each, labels), value in found.items() if each == name}


def finish_one(metrics: HttpMetrics) -> None:
    meter = ChoiceMeter(metrics.model("tiny"), 0.0)
    meter.tokens(3)
    meter.finished("stop")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_any_ingress_shows_all() -> None:
    near = Near(Directory())
    left, right = (MetricsExchange(HttpMetrics(Models()), near, name) for name in ("left", "right"))
    finish_one(left.metrics)
    finish_one(left.metrics)
    finish_one(right.metrics)
    await left.say()
    await right.say()
    await near.report.remote(engine("e-1"), stats("e-1", running=4))
    await near.report.remote(engine("e-2"), stats("e-2", running=5))
    for exchange in (left, right):
        found = series(await exchange.render())
        assert of(found, "raylm:generation_tokens_total") == {("left", "tiny"): 6, ("right", "tiny"): 3}
        assert of(found, "raylm:num_requests_running") == {("e-1", "tiny"): 4, ("e-2", "tiny"): 5}
        assert of(found, "raylm:startup_seconds") == {("e-1", "tiny", "weights"): 1.5, ("e-2", "tiny", "weights"): 1.5}
        assert of(found, "raylm:iteration_tokens_total_count") == {("e-1", "tiny"): 6, ("e-2", "tiny"): 6}
        assert len(of(found, "process_cpu_seconds_total")) == 2
    finish_one(right.metrics)
    assert of(series(await right.render()), "raylm:generation_tokens_total")["right", "tiny"] == 6, "its own are fresh"
    assert of(series(await left.render()), "raylm:generation_tokens_total")["right", "tiny"] == 6, "nothing falls"
    await near.remove.remote("e-1")
    assert of(series(await left.render()), "raylm:num_requests_running") == {("e-2", "tiny"): 5}


async def test_metrics_stay_up_when_the_directory_is_away() -> None:
    clock = Clock()
    near = Near(Directory())
    exchange = MetricsExchange(HttpMetrics(Models()), near, "left", clock=clock)
    other = MetricsExchange(HttpMetrics(Models()), near, "right")
    finish_one(exchange.metrics)
    finish_one(other.metrics)
    await other.say()
    both = {("left", "tiny"): 3.0, ("right", "tiny"): 3.0}
    assert of(series(await exchange.render()), "raylm:generation_tokens_total") == both
    exchange._directory = Unreachable()
    finish_one(exchange.metrics)
    clock.now += LIVE_S
    assert of(series(await exchange.render()), "raylm:generation_tokens_total") == both, "the last copy"
    clock.now += 0.1
    found = series(await exchange.render())
    assert of(found, "raylm:generation_tokens_total") == {("left", "tiny"): 6}, "what it knows itself"
    assert of(found, "raylm:num_requests_running") == {("engine-0", "tiny"): 1}
    # A Directory that has just been made knows nobody.
    exchange._directory = Near(Directory())
    assert of(series(await exchange.render()), "raylm:generation_tokens_total") == {("left", "tiny"): 6}


async def test_counts_of_an_ingress_that_has_gone_stay_for_a_while() -> None:
    clock = Clock()
    directory = Directory()
    directory._counts = KeptCounts(clock=clock)
    near = Near(directory)
    gone, left = (MetricsExchange(HttpMetrics(Models()), near, name) for name in ("gone", "left"))
    finish_one(gone.metrics)
    await gone.say()
    assert len(of(series(await left.render()), "process_resident_memory_bytes")) == 2
    clock.now += LIVE_S + 1
    found = series(await left.render())
    assert of(found, "raylm:generation_tokens_total") == {("gone", "tiny"): 3}
    assert len(of(found, "process_resident_memory_bytes")) == 1, "it uses no memory any more"
    clock.now += KEPT_S
    assert of(series(await left.render()), "raylm:generation_tokens_total") == {}


async def test_vllms_names_are_shown_where_that_is_configured() -> None:
    near = Near(Directory())
    exchange = MetricsExchange(HttpMetrics(Models()), near, "left", vllm_names=True)
    finish_one(exchange.metrics)
    await near.report.remote(engine("e-1"), stats("e-1", running=4))
    found = series(await exchange.render())
    ours = {name.removeprefix("raylm:"): value for (name, _), value in found.items() if name.startswith("raylm:")}
    theirs = {name.removeprefix("vllm:"): value for (name, _), value in found.items() if name.startswith("vllm:")}
    assert theirs.items() <= ours.items()
    # What the gateway inference extension and llm-d read.
    assert {"num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"} <= theirs.keys()
    labels = {name: dict(labels) for (name, labels) in found}
    assert (
        labels["vllm:cache_config_info"] | {"block_size": "16", "num_gpu_blocks": "101"}
        == labels["vllm:cache_config_info"]
    )
    assert labels["vllm:lora_requests_info"]["running_lora_adapters"] == ""
    assert "step_stage_seconds_count" not in theirs, "vLLM has no such thing"


OF_THE_BOARDS = {
    **dict.fromkeys(
        (
            *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
            *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
            *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
            "iteration_tokens_total",
        ),
        "histogram",
    ),
    **dict.fromkeys(("prompt_tokens_total", "generation_tokens_total", "request_success_total"), "counter"),
    **dict.fromkeys(("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"), "gauge"),
}
"""What the panels of vLLM's boards ask for (its examples/observability: prometheus_grafana, and performance_statistics
and query_statistics of dashboards/grafana), by the label model_name or none."""

OF_CACHE_BOARD = {
    **dict.fromkeys(("prompt_tokens_cached_total", "prefix_cache_queries_total", "prefix_cache_hits_total"), "counter"),
    **dict.fromkeys(("kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds"), "histogram"),
    "num_preemptions_total": "counter",
}
"""Of its newer board of the KV cache, what raylm has too."""

OF_PICKERS = {
    "num_requests_waiting": set(),
    "num_requests_running": set(),
    "kv_cache_usage_perc": set(),
    "lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    "cache_config_info": {"block_size", "num_gpu_blocks"},
}
"""What the endpoint pickers of the gateway inference extension and of llm-d read, and which labels."""


async def test_what_vllms_boards_and_pickers_ask_for_is_there() -> None:
    near = Near(Directory())
    exchange = MetricsExchange(HttpMetrics(Models()), near, "left", vllm_names=True)
    finish_one(exchange.metrics)
    await near.report.remote(engine("e-1"), stats("e-1", running=4))
    samples: dict[str, list[dict[str, str]]] = {}
    for (name, labels), _ in series(await exchange.render()).items():
        samples.setdefault(name, []).append(dict(labels))
    for name, kind in (OF_THE_BOARDS | OF_CACHE_BOARD).items():
        for end in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            found = samples[f"vllm:{name}{end}"]
            assert all(labels["model_name"] == "tiny" for labels in found), name
            assert end != "_bucket" or {"0.1", "+Inf"} & {labels["le"] for labels in found}, name
    assert {labels["finished_reason"] for labels in samples["vllm:request_success_total"]} == {"stop"}
    for name, wanted in OF_PICKERS.items():
        (labels,) = [labels for labels in samples[f"vllm:{name}"] if labels["engine"] == "e-1"]
        assert wanted <= labels.keys(), name


async def test_answers_are_counted_by_route() -> None:
    server = Server()
    await server.chat()
    await server.http.get("/v1/models/nobody")
    await server.http.get("/wp-login.php")
    await server.http.request("BREW", "/v1/models")
    found = series((await server.http.get("/metrics")).content)
    answers = of(found, "http_requests_total")
    assert answers["/v1/chat/completions", "POST", "2xx"] == 1
    assert answers["/v1/models/{model:path}", "GET", "4xx"] == 1
    assert answers["none", "GET", "4xx"] == 1
    assert answers["/v1/models", "other", "4xx"] == 1, "what a client makes up is no label"
    refusals = of(found, "raylm:request_rejections_total")
    assert refusals["/v1/models/{model:path}", "model_not_found", "404"] == 1
    assert of(found, "http_request_duration_highr_seconds_count")[()] == 4


@pytest.mark.parametrize("waited", [True, False])
async def test_a_completions_times_are_counted_once(waited: bool) -> None:
    metrics = HttpMetrics(Models())
    meter = ChoiceMeter(metrics.model("tiny"), 0.0)
    if waited:
        meter.waited(Waited(2.0, 3.0))
    meter.tokens(1)
    if waited:
        meter.waited(Waited(20.0, 30.0))  # From an engine that goes on with it.
    meter.tokens(1)
    meter.finished("stop")
    found = series(await metrics.render())
    assert of(found, "raylm:time_to_first_token_seconds_count") == {("tiny",): 1}
    for name, seconds in (("queue", 2.0), ("prefill", 3.0)):
        assert of(found, f"raylm:request_{name}_time_seconds_count") == {("tiny",): float(waited)}
        assert of(found, f"raylm:request_{name}_time_seconds_sum") == {("tiny",): seconds * waited}


async def test_load_and_the_header_that_tells_it() -> None:
    http = Server().http
    assert (await http.get("/load")).json() == {
        "server_load": 5,
        "requests_running": 3,
        "requests_waiting": 2,
        "prompt_tokens_waiting": 60,
        "kv_cache_usage": 0.25,
    }
    told = {form: await http.get("/v1/models", headers={ASKED: form}) for form in ("TEXT", "json", "xml")}
    named = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 2.0, "num_requests_running": 3.0}
    text = ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
    assert told["TEXT"].headers[TOLD] == f"TEXT {text}"
    form, report = told["json"].headers[TOLD].split(" ", 1)
    assert (form, json.loads(report)) == ("JSON", {"named_metrics": named})
    assert TOLD not in told["xml"].headers
    assert TOLD not in (await http.get("/v1/models")).headers


async def test_routers_counts_are_by_model() -> None:
    one, other = ModelRouter("tiny"), ModelRouter("tiny")
    one.selector.counts.by_reason["prefix"] = 2
    other.selector.counts.by_reason["prefix"] = 3
    other.num_held, other.num_resumed = 4, 5
    metrics = HttpMetrics(Models())
    metrics.also(RouterCounts(lambda: [one, other]))
    found = series(await metrics.render())
    assert of(found, "raylm:routing_decisions_total") == {("tiny", "prefix"): 5}
    assert of(found, "raylm:requests_held") == {("tiny",): 4}
    assert of(found, "raylm:requests_resumed_total") == {("tiny",): 5}


def test_rays_metrics_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[tuple[str, str, frozenset[tuple[str, str]]], float] = {}

    class Metric:
        def __init__(self, name: str, text: str, tag_keys: tuple[str, ...]) -> None:
            self._name, self._tag_keys = name, tag_keys

        def set(self, value: float, tags: dict[str, str]) -> None:
            told["gauge", self._name, frozenset(tags.items())] = value

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0 and tags.keys() == set(self._tag_keys), "Ray's counters take nothing else"
            key = "counter", self._name, frozenset(tags.items())
            told[key] = told.get(key, 0.0) + value

    monkeypatch.setattr(ray_metrics, "Counter", Metric)
    monkeypatch.setattr(ray_metrics, "Gauge", Metric)
    metrics, shown = HttpMetrics(Models()), ray_metrics.RayMetrics()
    for _ in range(3):
        finish_one(metrics)
        shown.show([*metrics.own(), *metrics.engines()])
        shown.show(metrics.own())
    tiny = frozenset({("model_name", "tiny")})
    assert told["counter", "raylm_generation_tokens", tiny] == 9
    assert told["counter", "raylm_e2e_request_latency_seconds_count", tiny] == 3
    assert told["gauge", "raylm_num_requests_running", tiny | {("engine", "engine-0")}] == 1
    assert not [name for _, name, _ in told if not name.startswith("raylm_")], "Ray has process metrics of its own"
