"""What operators see of a request: its log line, its spans; and the lines of throughput."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from raylm import log
from raylm.config.application import IngressConfig, load_ingress
from raylm.config.observing import LogConfig, TracingConfig
from raylm.core.load import Load
from raylm.core.step import TokenDelta, Waited
from raylm.errors import ConfigError, EngineDeadError, Overloaded
from raylm.generation.served_model import EngineStats
from raylm.serving.observing import observers as observing
from raylm.serving.observing.request_log import RequestLog
from raylm.serving.observing.throughput import Throughput
from raylm.serving.observing.tracing import Tracing
from raylm.serving.observing.watch import RequestWatch
from tests.support.openai_fakes import RawClient, Server, ended

SECRET = "what nobody may read"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}]}
FIRST = TokenDelta("", [*b"on"], None, num_cached_tokens=3, waited=Waited(0.25, 0.5))
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = ["receive", "tokenise", "route", "queue", "prefill", "decode", "detokenise"]


class Lines:
    """The lines of raylm's log as JSON, of a handler of its own."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self._handler = logging.Handler()
        self._handler.emit = lambda record: self.text.append(self._handler.format(record))  # type: ignore[method-assign]
        self._handler.setFormatter(log.JsonLines())

    def __enter__(self) -> Lines:
        logger = logging.getLogger("raylm.serving.observing")
        logger.addHandler(self._handler)
        logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *ignored: object) -> None:
        logging.getLogger("raylm.serving.observing").removeHandler(self._handler)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text]


class Traced:
    """A server whose spans are kept."""

    def __init__(self, *script: Any, ratio: float = 1.0, **config: Any) -> None:
        self.server = Server(*script, **config)
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(TracingConfig(sample_ratio=ratio), self._exporter)
        self.app = RequestWatch(self.server.app, [self.tracing])
        self.server.http._transport.app = self.app  # type: ignore[attr-defined]

    def spans(self) -> dict[str, ReadableSpan]:
        self.tracing.close()
        return {span.name: span for span in self._exporter.get_finished_spans()}


def watched(server: Server) -> Any:
    server.http._transport.app = RequestWatch(server.app, [RequestLog()])  # type: ignore[attr-defined]
    return server.http


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_a_request_without_text(stream: bool) -> None:
    with Lines() as lines:
        http = watched(Server(FIRST, ended(b"e")))
        await http.post("/v1/chat/completions", json={**CHAT, "stream": stream}, headers={"x-request-id": "mine"})
    (line,) = lines.events
    assert line["total_s"] >= line["ttft_s"] > 0
    assert {key: line[key] for key in line if key not in ("time", "total_s", "ttft_s")} == {
        "level": "INFO",
        "logger": "raylm.serving.observing.request_log",
        "event": "request",
        "id": "mine",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "outcome": "ok",
        "model": "tiny",
        "engine": "scripted",
        "route": "prefix; matched-tokens=16",
        "finish_reason": "stop",
        "prompt_tokens": line["prompt_tokens"],
        "cached_tokens": 3,
        "completion_tokens": 4,
        "queue_s": 0.25,
    }
    assert line["prompt_tokens"] > len(SECRET)
    assert SECRET not in lines.text[0] and "one" not in lines.text[0]


@pytest.mark.parametrize(
    ("script", "fields", "expected"),
    [
        ([Overloaded("full", retry_after=1)], {}, {"status": 503, "outcome": "error", "error": "Overloaded"}),
        ([b"on", EngineDeadError("it died")], {"stream": True}, {"status": 200, "outcome": "error"}),
        ([ended()], {"temperature": -1}, {"status": 400, "outcome": "refused"}),
        ([ended()], {"model": "none"}, {"status": 404, "outcome": "refused"}),
    ],
)
async def test_lines_of_requests_that_fail(script: Any, fields: Any, expected: dict[str, Any]) -> None:
    with Lines() as lines:
        await watched(Server(*script)).post("/v1/chat/completions", json={**CHAT, **fields})
    (line,) = lines.events
    assert {key: line.get(key) for key in expected} == expected


async def test_probes_have_no_line_and_a_path_stays_one_line() -> None:
    with Lines() as lines:
        http = watched(Server(ended()))
        await http.get("/health")
        await http.get("/metrics")
        assert lines.text == []
        await http.get("/v1/x%0aERROR%20false")
    assert lines.events[0]["status"] == 404
    assert "\n" not in lines.text[0]


def test_text_lines_quote_what_is_no_word() -> None:
    records: list[str] = []
    logger = logging.getLogger("raylm.tests.words")
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    log.event(logger, "request", path="/a\nb c", status=200, model=None)
    logger.removeHandler(handler)
    assert records == ['request path="/a\\nb c" status=200']


async def test_a_request_has_a_span_a_stage_below_its_client() -> None:
    traced = Traced(FIRST, ended(b"e"))
    await traced.server.http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": PARENT})
    spans = traced.spans()
    top = spans.pop("POST /v1/chat/completions")
    assert sorted(spans) == sorted(STAGES)
    assert top.parent is not None and top.context is not None
    assert f"{top.parent.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{top.parent.span_id:016x}" == PARENT.split("-")[2]
    assert {span.parent.span_id for span in spans.values() if span.parent} == {top.context.span_id}
    times = {name: (span.start_time or 0, span.end_time or 0) for name, span in spans.items()}
    assert all(begin <= end for begin, end in times.values())
    assert times["receive"][1] == times["tokenise"][0] and times["tokenise"][1] == times["route"][0]
    assert times["route"][1] >= times["route"][0]
    assert times["queue"][1] == times["prefill"][0] and times["prefill"][1] == times["decode"][0]
    assert times["prefill"][1] - times["prefill"][0] == pytest.approx(0.5e9, abs=1e4)
    assert top.start_time == times["receive"][0] and top.end_time is not None
    assert top.end_time >= times["decode"][1]
    attributes = dict(top.attributes or {})
    assert attributes["gen_ai.request.model"] == "tiny" and attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["raylm.engines"] == ("scripted",) and attributes["http.response.status_code"] == 200
    assert SECRET not in str([span.to_json() for span in (top, *spans.values())])


async def test_a_client_that_leaves_ends_its_span() -> None:
    traced = Traced(FIRST, None)
    client = RawClient(traced.app, json.dumps({**CHAT, "stream": True}).encode())
    await client.arrived.wait()
    while len(client.sent) < 2:
        await asyncio.sleep(0)
    client.gone.set()
    await asyncio.wait_for(client.task, 60)
    top = traced.spans()["POST /v1/chat/completions"]
    assert (top.attributes or {})["raylm.outcome"] == "client_left"
    assert top.status.status_code.name == "ERROR" and top.end_time is not None


async def test_a_request_that_fails_ends_its_span() -> None:
    traced = Traced(Overloaded("full", retry_after=1))
    await traced.server.chat()
    spans = traced.spans()
    top = spans["POST /v1/chat/completions"]
    assert (top.attributes or {})["http.response.status_code"] == 503
    assert top.status.status_code.name == "ERROR" and top.status.description == "Overloaded"
    assert set(spans) == {"POST /v1/chat/completions", "receive", "tokenise", "route"}


async def test_who_decides_what_is_sampled() -> None:
    unsampled = PARENT[:-2] + "00"
    for ratio, parent, traces in ((0.0, None, 0), (0.0, PARENT, 1), (1.0, unsampled, 0), (1.0, "nonsense", 1)):
        traced = Traced(ended(), ratio=ratio)
        headers = {} if parent is None else {"traceparent": parent}
        await traced.server.http.post("/v1/chat/completions", json=CHAT, headers=headers)
        await traced.server.http.get("/health", headers=headers)
        assert sum(name.startswith(("POST", "GET")) for name in traced.spans()) == traces


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """What takes spans by OTLP over HTTP, and its address."""
    taken: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            taken.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", taken
    server.shutdown()
    thread.join()
    server.server_close()


async def test_spans_reach_a_collector(collector: tuple[str, list[ExportTraceServiceRequest]]) -> None:
    address, taken = collector
    config = TracingConfig(endpoint=address, service_name="my-llm")
    (tracing,) = observing.observers(LogConfig(), config)
    assert isinstance(tracing, Tracing)
    server = Server(FIRST, ended(b"e"))
    server.http._transport.app = RequestWatch(server.app, [tracing])  # type: ignore[attr-defined]
    await server.http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": PARENT})
    await asyncio.to_thread(tracing.close)
    # One message, or several where the exporter's time came before the last span.
    found = [resources for message in taken for resources in message.resource_spans]
    for resources in found:
        own = {each.key: each.value.string_value for each in resources.resource.attributes}
        assert own["service.name"] == "my-llm"
    spans = [span for resources in found for scope in resources.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {"POST /v1/chat/completions", *STAGES}
    assert {span.trace_id.hex() for span in spans} == {PARENT.split("-")[1]}


def test_nobody_watches_by_default() -> None:
    config = IngressConfig()
    assert observing.observers(config.log, config.tracing) == []
    assert [type(each) for each in observing.observers(LogConfig(format="json"), config.tracing)] == [RequestLog]
    assert observing.observers(LogConfig(format="json", requests=False), config.tracing) == []


def test_tracing_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "_NEEDED", "opentelemetry_is.not_here")
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[tracing\]'"):
        observing.check_tracing(TracingConfig(endpoint="http://127.0.0.1:4318/v1/traces"))


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"tracing": {"endpoint": "collector:4318"}}, "tracing.endpoint"),
        ({"tracing": {"sample_ratio": 2}}, "tracing.sample_ratio"),
        ({"log": {"format": "xml"}}, "log.format"),
        ({"log": {"throughput_every_s": -1}}, "log.throughput_every_s"),
    ],
)
def test_wrong_configuration_names_the_key(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_ingress(section, source="test")


def test_throughput_is_told_where_there_was_traffic() -> None:
    now = 100.0
    loads = {"a": Load(0, 0, 0.0), "b": Load(0, 0, 0.0)}
    lines = Throughput(lambda: [EngineStats("tiny", name, load) for name, load in loads.items()], lambda: now)
    with Lines() as seen:
        lines.look()
        now = 110.0
        loads["a"] = Load(2, 1, 0.5, prefix_queries=400, prefix_hits=100, num_generated=50)
        loads["c"] = Load(0, 0, 0.25, num_generated=70)  # Started since.
        lines.look()
        now = 120.0
        loads["a"] = loads["a"]._replace(running=0, waiting=0)
        lines.look()
    (line,) = seen.events
    assert {key: line[key] for key in line if key not in ("time", "level", "logger")} == {
        "event": "throughput",
        "model": "tiny",
        "engines": 3,
        "prompt_tokens_per_s": 40.0,
        "generation_tokens_per_s": 12.0,
        "running": 2,
        "waiting": 1,
        "cache_usage": 0.25,
        "prefix_hit_rate": 0.25,
    }


def test_json_goes_to_the_process_own_standard_error() -> None:
    """Serve puts another sys.stderr in its place."""
    code = (
        "import sys, io; sys.stderr = io.StringIO(); from raylm import log; log.configure(); "
        "log.configure(form='json'); log.get_logger('x').info('one')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["message"] == "one"


def test_json_lines_hold_tracebacks() -> None:
    logger = logging.getLogger("raylm.tests")
    try:
        raise ValueError("bad")
    except ValueError:
        record = logger.makeRecord("raylm.tests", logging.ERROR, "f", 1, "went %s", ("wrong",), sys.exc_info())
    line = json.loads(log.JsonLines().format(record))
    assert (line["message"], line["level"], line["logger"]) == ("went wrong", "ERROR", "raylm.tests")
    assert "ValueError: bad" in line["traceback"] and line["time"].endswith("+00:00")
