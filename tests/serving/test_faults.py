"""What happens when a part of a served model dies or hangs: real processes, two tensor ranks, OpenAI's client.

    pytest tests/serving/test_faults.py -m "nightly or not nightly" -o log_cli=true -o log_cli_level=INFO

logs the figures of docs/reliability.md.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

import openai
import psutil
import pytest

from tests.support import checkpoints
from tests.support.faults import (
    MODEL,
    EngineProcesses,
    FaultCluster,
    Measured,
    Remains,
    Witness,
    fault_cluster,
    wait_for,
)

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]
LIMIT_S = 25
STEP_TIMEOUT_S = 8
"""A worker of a busy machine may be held for seconds, which is no hang."""
ENGINE = """
model: {{path: {path}, name: {name}}}
parallel: {{tensor: 2}}
cache: {{cpu_memory_gib: 0.05}}
scheduler: {{max_num_seqs: 8, max_num_batched_tokens: 256}}
runtime: {{device: cpu, num_threads: 1, step_timeout_s: {timeout}}}
"""
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
OUT_OF_MEMORY, STAY_AWAY = signal.SIGUSR1, signal.SIGUSR2  # hooks/sitecustomize.py
logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    folder = checkpoints.llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=4096)
    with fault_cluster(ENGINE.format(path=folder, name=MODEL, timeout=STEP_TIMEOUT_S)) as running:
        yield running


@pytest.fixture
def witness(cluster: FaultCluster) -> Iterator[Witness]:
    client = Witness(cluster.url)
    wait_for(lambda: cluster.processes() is not None and client.answers(), 300)
    yield client
    client.close()


@pytest.fixture
def processes(cluster: FaultCluster, witness: Witness) -> EngineProcesses:
    found = cluster.processes()
    assert found is not None
    return found


def report(what: str, measured: Measured) -> None:
    logger.info("| %s | %.1f s | %.1f s |", what, measured.detected_s, measured.recovered_s)


def check_errors(measured: Measured, *messages: str) -> None:
    """Every request that lived at the fault has an error that says what happened (one of `messages`), in OpenAI's
    form."""
    assert measured.detected_s < LIMIT_S
    *streams, whole = measured.heard
    for heard in streams:
        assert heard.events > 0 and isinstance(heard.error, openai.APIError), heard
        assert any(message in heard.error.message for message in messages) and heard.error.code == "engine_dead"
    assert isinstance(whole.error, openai.InternalServerError) and whole.error.status_code == 503, whole
    assert any(message in whole.error.message for message in messages)


class Fault(NamedTuple):
    """Which process gets which signal, and what its clients hear."""

    pick: Callable[[EngineProcesses], psutil.Process]
    number: int
    message: str


FAULTS = {
    "kill -9 of a worker, rank 1": Fault(
        lambda p: p.workers[1], KILL, "worker 1 of 2 (process {pid} on 127.0.0.1) died"
    ),
    "a worker stays away from a collective, rank 1": Fault(lambda p: p.workers[1], STAY_AWAY, "the workers hang"),
}
MORE_FAULTS = {
    "kill -9 of the engine": Fault(lambda p: p.engine, KILL, "the engine has died"),
    "kill -9 of the replica": Fault(lambda p: p.replica, KILL, "the engine has died"),
    "a worker is stopped (SIGSTOP), rank 0": Fault(lambda p: p.workers[0], STOP, "the workers hang"),
    "a worker is out of memory, rank 1": Fault(
        lambda p: p.workers[1], OUT_OF_MEMORY, "worker 1 of 2 failed in a step: OutOfMemoryError"
    ),
    "kill -9 of a worker, rank 0": Fault(
        lambda p: p.workers[0], KILL, "worker 0 of 2 (process {pid} on 127.0.0.1) died"
    ),
    "the engine is stopped (SIGSTOP)": Fault(lambda p: p.engine, STOP, "the engine hangs"),
}


@pytest.mark.parametrize("what", [*FAULTS, *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE_FAULTS)])
def test_a_fault_under_load(what, cluster, witness, processes):
    pick, number, message = (FAULTS | MORE_FAULTS)[what]
    victim, remains = pick(processes), Remains(processes.all)
    measured = witness.measure(lambda: victim.send_signal(number))
    report(what, measured)
    check_errors(measured, message.format(pid=victim.pid))
    assert remains.find(cluster) == []


@pytest.mark.nightly
def test_a_worker_that_is_killed_while_nobody_asks(cluster, witness, processes):
    remains = Remains(processes.all)
    measured = witness.measure_idle(processes.workers[0].kill)
    report("kill -9 of an idle engine's worker", measured)
    assert measured.detected_s < LIMIT_S
    assert remains.find(cluster) == []


def test_a_node_that_dies(cluster, witness, processes):
    """The raylet goes, and with it all processes of the node; another node has room for the engine."""
    remains = Remains(processes.all)
    measured = witness.measure(processes.raylet.kill)
    report("kill -9 of the raylet of the engine's node", measured)
    # All die at once: a worker may still say that it misses the other one, or the engine goes first.
    check_errors(measured, "died", "failed in a step")
    successor = cluster.processes()
    assert successor is not None and successor.raylet.pid != processes.raylet.pid
    assert remains.find(cluster) == []


def test_a_worker_that_hangs_does_not_hold_up_the_end(cluster, processes):
    """Serve shuts down with a stopped worker; the fixture's end asserts that no process is left."""
    processes.workers[1].send_signal(STOP)
    assert cluster.close() == []
