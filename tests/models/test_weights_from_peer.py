"""Weights from a live worker: what is compared, what is sent, and what happens when it goes wrong. Copies go between
two threads here; tests/gpu/test_from_peer.py has NCCL."""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raylm.config.engine import EngineConfig
from raylm.config.resolve import resolve
from raylm.errors import TransferError
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.decoder import DecoderModel
from raylm.models.from_peer import Manifest, WeightSender, Wires, receive_weights
from raylm.models.load import checkpoint_digest, load_model
from raylm.parallel.context import ParallelContext
from raylm.worker.worker import Worker
from tests.support import checkpoints

CPU = torch.device("cpu")
LIMIT_S = 60.0
FAMILIES = {"llama": checkpoints.llama, "qwen2": checkpoints.qwen2, "gemma3": checkpoints.gemma3}


@dataclass
class Cable:
    """Stands for the connections of one id: bytes go from one thread to the other, in order, and sizes must match."""

    sent: list[queue.Queue[Tensor]] = field(default_factory=lambda: [queue.Queue(), queue.Queue()])
    """By the rank that sent."""
    connects: list[int] = field(default_factory=list)
    ends: list[tuple[int, bool]] = field(default_factory=list)
    """(rank, whether it was aborted)"""

    def wires(self) -> Wires:
        return Wires(missing=lambda device: None, make_id=lambda: b"id", connect=self._connect)

    def _connect(self, unique_id: bytes, *, rank: int, size: int, device: torch.device, **_: object) -> End:
        assert (unique_id, size) == (b"id", 2)
        self.connects.append(rank)
        return End(self, rank)


@dataclass
class End:
    cable: Cable
    rank: int
    wanted: list[Tensor] = field(default_factory=list)

    def send(self, tensors: list[Tensor], to: int) -> None:
        assert to != self.rank
        for x in tensors:
            self.cable.sent[self.rank].put(x.clone())

    def receive(self, tensors: list[Tensor], source: int) -> None:
        assert source != self.rank
        self.wanted += tensors

    def wait(self, limit_s: float, look: Callable[[], None]) -> None:
        deadline = time.monotonic() + limit_s
        while self.wanted:
            try:
                x = self.cable.sent[1 - self.rank].get(timeout=0.02)
            except queue.Empty:
                look()
                if time.monotonic() > deadline:
                    raise TransferError("too late") from None
                continue
            target = self.wanted.pop(0)
            assert x.nbytes == target.nbytes
            target.view(-1).view(torch.uint8).copy_(x.view(-1).view(torch.uint8))

    def __enter__(self) -> End:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.cable.ends.append((self.rank, kind is not None))


class ThreadPeer:
    """A peer in a thread of this process."""

    def __init__(self, sender: WeightSender, *, dies: bool = False) -> None:
        self._sender = sender
        self._dies = dies
        self._sent: Future[None] = Future()

    def manifest(self, limit_s: float) -> Manifest:
        return self._sender.manifest

    def start_sending(self, unique_id: bytes, limit_s: float) -> None:
        threading.Thread(target=self._run, args=(unique_id, limit_s), daemon=True).start()

    def check(self) -> None:
        if self._sent.done():
            self._sent.result()

    def wait_sent(self, limit_s: float) -> None:
        self._sent.result(timeout=limit_s)

    def _run(self, unique_id: bytes, limit_s: float) -> None:
        try:
            if self._dies:
                raise TransferError("the peer is dead")
            self._sender.send(unique_id, limit_s=limit_s, look=lambda: None)
            self._sent.set_result(None)
        except TransferError as error:
            self._sent.set_exception(error)


def load(
    path: Path,
    load_format: str = "auto",
    *,
    context: ParallelContext | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> DecoderModel:
    source = locate(str(path))
    arch = ArchConfig.from_source(source)
    return load_model(
        source, arch, context or ParallelContext.single(CPU), dtype, load_format, seed=seed, progress=False
    )


def digest(path: Path, load_format: str = "auto", seed: int = 0) -> str:
    source = locate(str(path))
    return checkpoint_digest(source, ArchConfig.from_source(source), load_format, seed=seed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.llama(tmp_path / "llama")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", [None, (1, 2, 0, 1), (0, 2, 1, 2)], ids=["alone", "tensor rank", "stage"])
def test_all_parameters_arrive(family: str, place: tuple[int, int, int, int] | None, tmp_path: Path) -> None:
    path = FAMILIES[family](tmp_path)
    context = ParallelContext.single(CPU)
    if place is not None:
        tensor_rank, tensor_size, stage, stages = place
        context = replace(
            context, tensor_rank=tensor_rank, tensor_size=tensor_size, pipeline_rank=stage, pipeline_size=stages
        )
    lent, model = load(path, context=context), load(path, "dummy", context=context)
    assert not torch.equal(lent.layers[str(lent.layer_numbers[0])].mlp.down_proj.weight.plain, _down(model))
    cable = Cable()
    peer = ThreadPeer(WeightSender(lent, "same", wires=cable.wires()))
    receive_weights(model, "same", peer, limit_s=LIMIT_S, wires=cable.wires())
    for (name, own), theirs in zip(model.named_parameters(), lent.parameters(), strict=True):
        assert torch.equal(own, theirs), name
    assert sorted(cable.connects) == [0, 1]
    assert cable.ends == [(0, False), (1, False)], "the sender closes first, once it has the receipt"


def _down(model: DecoderModel) -> Tensor:
    return model.layers[str(model.layer_numbers[0])].mlp.down_proj.weight.plain


def test_what_differs_is_refused_before_anything_is_sent(folder: Path, tmp_path: Path) -> None:
    lent = load(folder)
    first = replace(ParallelContext.single(CPU), tensor_size=2)
    larger = checkpoints.llama(tmp_path / "larger", intermediate_size=128)
    cases = [
        (load(folder, "dummy"), "other", "another checkpoint than the one that is here"),
        (load(folder, context=first), "same", "tensor rank 0 of 1 in stage 0 of 1, this worker tensor rank 0 of 2 in"),
        (
            load(folder, dtype=torch.bfloat16),
            "same",
            r"embed_tokens.weight.values \(320, 64\) in float32, this worker .*bfloat",
        ),
        (load(larger), "same", r"gate_up_proj.weight.values \(192, 64\) in float32, this worker .*\(256, 64\)"),
        (load(checkpoints.llama(tmp_path / "more", num_hidden_layers=4)), "same", "the peer has .* parameters"),
    ]
    for model, checkpoint, message in cases:
        before = [x.clone() for x in model.parameters()]
        cable = Cable()
        peer = ThreadPeer(WeightSender(lent, "same", wires=cable.wires()))
        with pytest.raises(TransferError, match=message):
            receive_weights(model, checkpoint, peer, limit_s=LIMIT_S, wires=cable.wires())
        assert cable.connects == []
        assert all(map(torch.equal, before, model.parameters()))


def test_another_version_is_refused(folder: Path) -> None:
    manifest = Manifest.of(load(folder), "same")
    assert manifest.difference(manifest) is None
    other = manifest._replace(version="0.0.9")
    assert manifest.difference(other) == f"the peer runs raylm 0.0.9, this worker {manifest.version}"


def test_a_peer_that_dies_ends_the_wait(folder: Path) -> None:
    lent, cable = load(folder), Cable()
    peer = ThreadPeer(WeightSender(lent, "same", wires=cable.wires()), dies=True)
    with pytest.raises(TransferError, match="the peer is dead"):
        receive_weights(load(folder, "dummy"), "same", peer, limit_s=LIMIT_S, wires=cable.wires())
    assert cable.ends == [(1, True)]


def test_a_peer_that_sends_nothing_is_given_up(folder: Path) -> None:
    lent, cable = load(folder), Cable()
    peer = ThreadPeer(WeightSender(lent, "same", wires=Cable().wires()))
    with pytest.raises(TransferError, match="too late"):
        receive_weights(load(folder, "dummy"), "same", peer, limit_s=0.2, wires=cable.wires())
    assert cable.ends == [(1, True)]


def test_without_a_gpu_nothing_is_tried(folder: Path) -> None:
    model, sender = load(folder), WeightSender(load(folder), "same")
    reason = "NCCL copies between GPUs, and this worker's device is cpu"
    with pytest.raises(TransferError, match=reason):
        receive_weights(model, "same", ThreadPeer(sender), limit_s=LIMIT_S)
    with pytest.raises(TransferError, match=reason):
        sender.send(b"", limit_s=LIMIT_S, look=lambda: None)


def test_a_digest_tells_checkpoints_apart(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert digest(copy) == digest(folder)
    file = copy / "model.safetensors"
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        tensors = load_file(file)
        tensors[name] = tensors[name] * 1.01
        before = digest(copy)
        save_file(tensors, file)
        assert digest(copy) != before
    assert digest(folder, "dummy", 1) != digest(folder, "dummy", 2)
    quants = {"blk.0.ffn_down.weight": gguf.GGMLQuantizationType.Q8_0}
    first = checkpoints.write_gguf(folder, tmp_path / "first.gguf", quants)
    second = checkpoints.write_gguf(copy, tmp_path / "second.gguf", quants)
    assert len({digest(first), digest(second), digest(folder)}) == 3


@pytest.mark.parametrize("has_peer", [False, True])
def test_a_worker_falls_back_to_files(has_peer: bool, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "load": {"from_peer": True},
            "cache": {"num_blocks": 8},
            "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 16},
            "runtime": {"device": "cpu", "num_threads": 1},
        }
    )
    peer = ThreadPeer(WeightSender(load(folder), digest(folder))) if has_peer else None
    worker = Worker(resolve(config, "cpu"), peer=peer, progress=False)
    with caplog.at_level(logging.INFO, logger="raylm"):
        worker.start()
    reason = "NCCL copies between GPUs, and this worker's device is cpu" if has_peer else "there is none"
    assert f"weights: not from a live peer (load.from_peer): {reason}" in caplog.messages
    assert any(line.startswith("weights: 0.00 GB from") and str(folder) in line for line in caplog.messages)
    # It lends what it has read, to the next one.
    assert worker.weights is not None
    assert worker.weights.manifest == Manifest.of(load(folder), digest(folder))
