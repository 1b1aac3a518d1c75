"""How a new replica reaches the workers of one that serves: real actors; on a CPU they come as far as NCCL."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import ray
import torch
import zmq
from gguf import GGMLQuantizationType

from raylm import ops
from raylm.config.sampling import SamplingDefaults
from raylm.core.load import Load
from raylm.errors import TransferError
from raylm.executor.peers import WEIGHTS, PeerWorker
from raylm.serving.directory import DirectoryClient, EngineEntry, ModelEntry, find_directory
from raylm.serving.peers import find_peers

pytestmark = pytest.mark.serve
MODEL = "smollm2-135m"
LIMIT_S = 120.0


class Borrower:
    """A new engine's worker, as far as a peer sees it; the answers are what its Peer raised."""

    def __init__(self) -> None:
        self._wait = threading.Event()

    def wait_for_start(self) -> None:
        self._wait.wait()

    def ask(self, worker: object) -> tuple[str, int, str]:
        peer = PeerWorker(worker)
        peer.check()
        manifest = peer.manifest(LIMIT_S)
        peer.start_sending(bytes(128), LIMIT_S)
        return manifest.checkpoint, len(manifest.parameters), self._failure(peer)

    def send_nothing(self, worker: object) -> str:
        peer = PeerWorker(worker)
        peer.start_sending(bytes(128), LIMIT_S)
        peer.check()
        ray.kill(worker)
        return self._failure(peer)

    def ask_briefly(self, worker: object) -> str:
        try:
            PeerWorker(worker).manifest(0.2)
        except TransferError as error:
            return str(error)
        return ""

    def _failure(self, peer: PeerWorker) -> str:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                peer.check()
            except TransferError as error:
                return str(error)
            time.sleep(0.02)
        return "no failure"


class Silent:
    """A worker that never answers."""

    def manifest(self) -> None:
        threading.Event().wait()

    def send_weights(self, unique_id: bytes, limit_s: float, borrower: object) -> None:
        threading.Event().wait()


@pytest.fixture(scope="module", autouse=True)
def by_value() -> Iterator[None]:
    """The actors' processes cannot import a test."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def borrower(serve_url: str) -> Iterator[ray.actor.ActorHandle]:
    actor = ray.remote(concurrency_groups={WEIGHTS: 1})(Borrower).options(num_cpus=0).remote()
    yield actor
    ray.kill(actor)


@pytest.fixture
def silent(serve_url: str) -> Iterator[ray.actor.ActorHandle]:
    actor = ray.remote(concurrency_groups={WEIGHTS: 1})(Silent).options(num_cpus=0).remote()
    yield actor
    ray.kill(actor)


def peers(model: str = MODEL) -> list[ray.actor.ActorHandle]:
    return asyncio.run(find_peers(DirectoryClient("default"), model, limit_s=LIMIT_S))


def test_a_serving_replica_s_workers_are_asked_while_it_serves(serve_url: str, borrower) -> None:
    (worker,) = peers()
    body = {"model": MODEL, "prompt": "A", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{serve_url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
        lines = answer.iter_lines()
        # On a busy machine a comment may come first, after a second of silence.
        assert next(line for line in lines if line and not line.startswith(":")).startswith("data: ")
        checkpoint, num_parameters, failure = ray.get(borrower.ask.remote(worker), timeout=LIMIT_S)
        assert next(lines) == ""  # The stream has not been held up: the end of its first event is still to be read.
        assert next(line for line in lines if line and not line.startswith(":")).startswith("data: ")
    assert len(checkpoint) == 64
    # Queries, keys and values are parameters of their own where they stay in blocks, and so are gate and up.
    in_blocks = ops.block_kernels(torch.empty(0), GGMLQuantizationType.Q4_1)
    assert num_parameters == 2 + 30 * (9 if in_blocks else 6)
    assert failure == "the peer says: NCCL copies between GPUs, and this worker's device is cpu"


def test_no_replica_serves_another_model(serve_url: str) -> None:
    assert peers("other") == []


def test_an_engine_that_has_just_ended_is_passed_over(serve_url: str) -> None:
    directory = find_directory("default")
    model = ModelEntry(MODEL, MODEL, MODEL, SamplingDefaults(), since=0.0)
    # It would be asked first: it has nothing to do at all.
    key = zmq.curve_keypair()[0]
    gone = EngineEntry("gone", model, "node", "tcp://127.0.0.1:1", key, "ready", Load(-1, 0, 0.0))
    ray.get(directory.report.remote(gone))
    try:
        assert len(peers()) == 1
    finally:
        ray.get(directory.remove.remote("gone"))


def test_a_peer_that_dies_is_noticed(borrower, silent) -> None:
    assert ray.get(borrower.send_nothing.remote(silent), timeout=LIMIT_S).startswith("the peer is dead")


def test_a_peer_that_does_not_answer_is_given_up(borrower, silent) -> None:
    failure = ray.get(borrower.ask_briefly.remote(silent), timeout=LIMIT_S)
    assert failure == "the peer has not answered within 0.2 s"
