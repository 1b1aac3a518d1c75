"""A real Prometheus scrapes two ingresses of two engines under load: every panel's and every alert's query gives
series, nothing is counted twice, and no counter falls. It needs Debian's package prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from tests.support.paced_config import paced_config
from tests.support.ports import free_port
from tests.support.queries import Query, queries, rules_file
from tests.support.serve_process import running, wait_for_line

pytestmark = pytest.mark.nightly

LOAD_S = 20.0
WINDOW = "30s"
OUTPUT_TOKENS = 8
ENGINES = INGRESSES = 2
_USUAL_AT_VLLM = re.compile(
    r"(raylm|vllm):\S+ (metric names should not contain ':'|.*should not have \"_total\" suffix)"
)
_COMPARISON = re.compile(r" (>=|<=|==|!=|>|<) ")


class Run(NamedTuple):
    """What a loaded run left behind. `tokens` were generated for clients."""

    prometheus: str
    scrape: str
    tokens: int


@pytest.fixture(scope="module")
def binaries() -> dict[str, str]:
    found = {name: shutil.which(name) for name in ("prometheus", "promtool")}
    if missing := [name for name, path in found.items() if path is None]:
        pytest.skip(f"{' and '.join(missing)} not installed (Debian's package prometheus)")
    return {name: path for name, path in found.items() if path is not None}


@pytest.fixture(scope="module")
def run(binaries: dict[str, str], demo: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("prometheus")
    port = free_port()
    (folder / "serve.yaml").write_text(yaml.safe_dump(config(port, folder)))
    with running(str(folder / "serve.yaml")) as (process, lines):
        wait_for_line(process, lines, "http://", 120)
        with prometheus(binaries["prometheus"], folder, port) as url:
            tokens = load(f"http://127.0.0.1:{port}")
            time.sleep(3.0)  # Until what was counted last is scraped.
            yield Run(url, httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text, tokens)


def config(port: int, folder: Path) -> dict[str, Any]:
    (folder / "keys").write_text('{"key": "key-of-anna", "tenant": "anna"}\n{"key": "key-of-ben", "tenant": "ben"}\n')
    (folder / "tenants.yaml").write_text(yaml.safe_dump({"tenants": {"ben": {"requests_per_minute": 2}}}))
    engine = {
        "model": {"path": "smollm2-135m", "name": "m", "max_model_len": 512},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 512},
    }
    http = {"api_keys_file": str(folder / "keys"), "tenants_file": str(folder / "tenants.yaml")}
    face = {"http": http, "metrics": {"vllm_names": True}}
    # So few blocks that prompts push each other out of the cache.
    model = {"engine": engine, "num_blocks": 128}
    return paced_config(port, ingresses=INGRESSES, engines=ENGINES, model=model, face=face)


@contextmanager
def prometheus(binary: str, folder: Path, target: int) -> Iterator[str]:
    """A Prometheus that scrapes every second what a client of the endpoint sees."""
    port = free_port()
    (folder / "rules.yml").write_text(rules_file())
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "raylm", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    command = [binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process, folder / "prometheus.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/-/ready", timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def load(url: str) -> int:
    """Prompts that share beginnings, some that come again, some beyond a limit, some that are wrong; the tokens that
    were generated."""
    deadline = time.monotonic() + LOAD_S

    def ask(worker: int) -> int:
        tokens, turn = 0, 0
        # Each request on a connection of its own, so that both ingresses get some.
        while time.monotonic() < deadline:
            turn += 1
            prompt = [worker + 1] * 64 + [2 + turn % 23] * (16 + 16 * (turn % 5))
            body = {"model": "m", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
            tenant = "ben" if turn % 10 == 0 else "anna"
            if turn % 7 == 0:
                body |= {"max_tokens": -1}
            headers = {"authorization": f"Bearer key-of-{tenant}"}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
            tokens += answer.json()["usage"]["completion_tokens"] if answer.status_code == 200 else 0
        return tokens

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(ask, range(4)))


def asked(run: Run, expression: str) -> list[dict[str, Any]]:
    """The series that an expression gives now."""
    answer = httpx.get(f"{run.prometheus}/api/v1/query", params={"query": expression}, timeout=30).json()
    assert answer["status"] == "success", (expression, answer)
    return answer["data"]["result"]


def value(run: Run, expression: str) -> float:
    (series,) = asked(run, expression)
    return float(series["value"][1])


def as_asked_here(query: Query) -> str:
    """With Grafana's variables filled in. An alert's comparison gives a series whether it is true or not."""
    filled = query.expression.replace("$__rate_interval", WINDOW).replace("$model", ".*")
    return _COMPARISON.sub(r" \1 bool ", filled) if query.where.startswith("alert") else filled


@pytest.mark.timeout(400)
def test_every_panel_and_every_alert_has_series(run: Run) -> None:
    silent = [query for query in queries() if not asked(run, as_asked_here(query))]
    assert not silent


@pytest.mark.timeout(400)
def test_nothing_is_counted_twice_and_no_counter_falls(run: Run) -> None:
    assert value(run, "count(raylm:num_requests_running)") == ENGINES
    assert value(run, "count(process_cpu_seconds_total{ingress!=''})") == INGRESSES
    assert value(run, "sum(raylm:generation_tokens_total)") == run.tokens
    assert value(run, "sum(vllm:generation_tokens_total)") == run.tokens
    assert value(run, "sum(raylm:engine_generation_tokens_total)") == run.tokens
    for name in ("raylm:generation_tokens_total", "raylm:iteration_tokens_total_count", "http_requests_total"):
        assert value(run, f"max(resets({name}[5m]))") == 0, name


@pytest.mark.timeout(400)
def test_promtool_finds_nothing_wrong(run: Run, binaries: dict[str, str], tmp_path: Path) -> None:
    checked = subprocess.run(
        [binaries["promtool"], "check", "metrics"], input=run.scrape, text=True, capture_output=True, check=False
    )
    # It prints what is unusual by Prometheus' guide; names with a colon and such ends are vLLM's.
    unusual = [
        line
        for line in (checked.stdout + checked.stderr).splitlines()
        if not re.match(
            r"(raylm|vllm):\S+ (metric names should not contain ':'|.*should not have \"_total\" suffix)", line
        )
    ]
    assert not unusual
    (rules := tmp_path / "rules.yml").write_text(rules_file())
    subprocess.run([binaries["promtool"], "check", "rules", str(rules)], check=True, capture_output=True)


@pytest.mark.timeout(400)
def test_what_vllms_scrapers_read_is_there(run: Run) -> None:
    for name in ("kv_cache_usage_perc", "num_requests_waiting", "num_requests_running", "cache_config_info"):
        assert len(asked(run, f"vllm:{name}{{model_name='m'}}")) == ENGINES, name
    (info, _) = asked(run, "vllm:cache_config_info")
    assert json.loads(info["metric"]["num_gpu_blocks"]) == 128
