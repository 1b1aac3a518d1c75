"""Two `raylm serve` of one machine, as users run them: answers, keys, processes, who listens where, who answers whom,
what happens when a part in front dies, and that nothing is left after a hangup.

The first server has the application that the Helm chart submits by default. The faults are the second one's: the last
test ends the first, which must then be as it was started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import yaml
from openai import AuthenticationError, OpenAI

from tests.helm import rendered
from tests.support import checkpoints
from tests.support.ports import free_port
from tests.support.serve_process import running, wait_for_line

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
INGRESS, REPLICA = "OpenAIIngress", "ray::ServeReplica"
DEMO = "smollm2-135m"


@dataclass(frozen=True)
class Server:
    """A running `raylm serve`, what it prints, its file of keys, and a client of it."""

    popen: subprocess.Popen[str]
    lines: list[str]
    keys: Path
    client: httpx.Client
    model: str
    port: int

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.popen.pid)

    def family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def find(self, name: str) -> list[psutil.Process]:
        """Its processes of this name or title."""
        return [process for process in self.family() if name in title(process)]

    def models(self) -> httpx.Response:
        return self.client.get("/v1/models")


def title(process: psutil.Process) -> str:
    try:
        # Ray puts an actor's class into the command line.
        return " ".join([process.name(), *process.cmdline()[:1]])
    except psutil.Error:
        return ""


def start(stack: ExitStack, model: str, served: Path, port: int) -> Server:
    """Serve a file or a folder; the key is "key-of-" and the model's name."""
    (keys := served.parent / f"{model}.keys").write_text(f"key-of-{model}\n")
    options = ("--host", "127.0.0.1", "--port", str(port), "--api-keys-file", str(keys))
    process, lines = stack.enter_context(running(str(served), *options))
    wait_for_line(process, lines, f"ready: http://127.0.0.1:{port}/v1", seconds=400)
    headers = {"authorization": f"Bearer key-of-{model}"}
    # A connection a request: what is in front is killed and replaced, and closes those that wait for another one.
    alone = httpx.Limits(max_keepalive_connections=0)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60, limits=alone)
    stack.enter_context(client)
    return Server(process, lines, keys, client, model, port)


@pytest.fixture(scope="module")
def servers(demo: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("servers")
    application = folder / "serve.yaml"
    application.write_text(yaml.safe_dump(rendered.serve_config({})), encoding="utf-8")
    served = {DEMO: application, "tiny": checkpoints.llama(folder / "tiny")}
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        starts = [threads.submit(start, stack, model, path, free_port()) for model, path in served.items()]
        yield [starting.result() for starting in starts]


@pytest.fixture(scope="module")
def server(servers: list[Server]) -> Server:
    """The one that faults happen to."""
    return servers[1]


def wait_for(condition: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


def test_a_server_answers_who_has_a_key(servers: list[Server]):
    server = servers[0]
    url = f"http://127.0.0.1:{server.port}"
    with OpenAI(base_url=f"{url}/v1", api_key=f"key-of-{DEMO}", max_retries=5) as client:
        model = client.models.list().data[0].id
        message = {"role": "user", "content": "What is the capital of France?"}
        answer = client.chat.completions.create(model=model, messages=[message], temperature=0, max_tokens=16)
        assert "Paris" in answer.choices[0].message.content
        with pytest.raises(AuthenticationError):
            client.with_options(api_key="theirs").chat.completions.create(model=model, messages=[message])
        server.keys.write_text("theirs  # from now on\n")
        wait_for(lambda: is_listed(client.with_options(api_key="theirs")), "the new key does not count")
        with pytest.raises(AuthenticationError):
            client.models.list()
        server.keys.write_text(f"key-of-{DEMO}\n")
        wait_for(lambda: is_listed(client), "the first key does not count again")
    answer = httpx.get(f"{url}/v1/models", headers={"x-request-id": "mine"}, timeout=60)
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (401, ["mine"])
    for probe in ("/health", "/ready", "/-/healthz"):
        assert httpx.get(f"{url}{probe}", timeout=60).status_code == 200


def is_listed(client: OpenAI) -> bool:
    """Whether the server takes the client's key."""
    try:
        return client.models.list().data[0].id == DEMO
    except AuthenticationError:
        return False


def test_a_server_is_haproxy_and_no_more_of_ray_than_it_needs(servers: list[Server]):
    family = servers[0].process.children(recursive=True)
    assert any("haproxy" in child.name() for child in family)
    scripts = {os.path.basename(word) for child in family for word in child.cmdline()[:4] if word.endswith(".py")}
    assert "log_monitor.py" in scripts
    # Ray's option leaves it out in part only, and waits for the rest; and there is nothing to scale.
    assert not scripts & {"dashboard.py", "monitor.py"}
    assert {niceness(child) for child in family} - {None} == {os.getpriority(os.PRIO_PROCESS, 0)}
    assert not [child.cmdline()[0] for child in family if maps(child, "/pandas/")]


def niceness(process: psutil.Process) -> int | None:
    try:
        return process.nice()
    except psutil.Error:
        return None


def maps(process: psutil.Process, part: str) -> bool:
    """Whether the process has loaded a library at such a path."""
    try:
        return any(part in region.path for region in process.memory_maps())
    except psutil.Error:
        return False  # It has ended, as HAProxy's programs do.


def listeners(server: Server) -> list[tuple[psutil.Process, str, int]]:
    found = [(process, each) for process in server.family() for each in process.net_connections("tcp")]
    return [(process, c.laddr.ip, c.laddr.port) for process, c in found if c.status == psutil.CONN_LISTEN]


def test_all_ports_are_on_loopback_but_for_one_of_rays(servers: list[Server]):
    for server in servers:
        assert server.port in [port for _, _, port in listeners(server)]
        open_ones = [(title(process), ip, port) for process, ip, port in listeners(server) if ip not in LOOPBACK]
        # Serve's channel between deployments takes every interface, one port a replica. raylm does not use it.
        assert {REPLICA in name for name, _, _ in open_ones} <= {True}, open_ones
        assert len(open_ones) == len(server.find(REPLICA))
        for _, _, port in open_ones:
            assert is_refused_without_a_token(port)


def is_refused_without_a_token(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=120)
    return refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_no_port_is_two_servers(servers: list[Server]):
    first, second = ({port for _, _, port in listeners(server)} for server in servers)
    assert not first & second


class Asking:
    """Asks a server for its models without a pause while something happens to it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers: list[httpx.Response] = []
        self.cut: list[httpx.HTTPError] = []

    def __enter__(self) -> Asking:
        self._thread.start()
        wait_for(lambda: bool(self.answers), "the server does not answer")
        return self

    def __exit__(self, *exception: object) -> None:
        self._enough.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._enough.is_set():
            try:
                with httpx.Client(base_url=self._server.client.base_url, headers=self._server.client.headers) as new:
                    self.answers.append(new.get("/v1/models", timeout=60))
            except httpx.HTTPError as error:
                self.cut.append(error)

    def wait_for_more(self, number: int) -> None:
        enough = len(self.answers) + number
        wait_for(lambda: len(self.answers) >= enough, "the server does not answer")


def test_haproxy_killed_is_back_and_no_later_request_is_lost(server: Server):
    # The one of the start has gone, whose place a reload's took.
    wait_for(lambda: len(server.find("haproxy")) == 1, "there is not one HAProxy")
    (haproxy,) = server.find("haproxy")
    with Asking(server) as asking:
        haproxy.kill()
        wait_for(lambda: any(p.pid != haproxy.pid for p in server.find("haproxy")), "HAProxy does not come back")
        asking.wait_for_more(20)
    assert {answer.status_code for answer in asking.answers} == {200}
    assert len(asking.cut) <= 1  # The one that HAProxy had.
    # Serve's manager of HAProxy goes on with the new one.
    assert server.client.get("/-/routes").status_code == 200


@pytest.mark.nightly
def test_haproxys_manager_killed_is_replaced_and_nobody_notices(server: Server):
    """Serve takes a minute to replace the manager."""
    (manager,) = server.find("ray::HAProxyManager")
    wait_for(lambda: len(server.find("raylm-front")) == 1, "there is not one program in front")
    (program,) = server.find("raylm-front")
    body = {"model": server.model, "prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with Asking(server) as asking, server.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        assert "error" not in next(lines)
        manager.kill()
        asking.wait_for_more(5)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        wait_for(lambda: bool(server.find("ray::HAProxyManager")), "the manager is not replaced")
        wait_for(lambda: any(p.pid != program.pid for p in server.find("raylm-front")), "it does not start its HAProxy")
        asking.wait_for_more(20)
    assert {answer.status_code for answer in asking.answers} == {200} and not asking.cut


def test_two_servers_never_answer_for_each_other(servers: list[Server]):
    """Also while one has no ingress."""
    other, one = servers
    assert one.client.get("/v1/models", headers=other.client.headers).status_code == 401
    with Asking(one) as asking:
        for ingress in one.find(INGRESS):
            ingress.kill()
        for _ in range(3):
            wait_for(lambda: bool(one.find(INGRESS)), "the ingress is not replaced")
            asking.wait_for_more(10)
        wait_for(lambda: asking.answers[-1].status_code == 200, "the server does not come back")
    for answer in asking.answers:
        if answer.status_code == 200:
            assert [model["id"] for model in answer.json()["data"]] == [one.model]
        else:
            assert answer.status_code in (500, 502, 503) and answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) > 0
    assert [model["id"] for model in other.models().json()["data"]] == [other.model]


def test_a_hangup_ends_a_server_and_leaves_nothing_behind(servers: list[Server]):
    """As a terminal that is closed does it; Ray's processes must not be hit before Serve has ended."""
    server = servers[0]
    family = server.process.children(recursive=True)
    os.killpg(server.popen.pid, signal.SIGHUP)
    assert server.popen.wait(180) == 0
    assert not any("graceful_shutdown" in line for line in server.lines)
    _, alive = psutil.wait_procs(family, timeout=120)
    assert not alive, [child.cmdline()[:2] for child in alive]
