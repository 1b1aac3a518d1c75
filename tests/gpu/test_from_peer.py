"""Weights from a live worker's GPU: NCCL between two processes, and an engine that starts beside a busy one."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from raylm.bench.dummy import write_shape
from raylm.config.engine import EngineConfig, ParallelConfig
from raylm.core.sampling import SamplingParams
from raylm.engine.engine import Engine
from raylm.errors import TransferError
from raylm.parallel import nccl
from raylm.parallel.groups import set_up_libraries
from raylm.parallel.nccl import Communicator
from raylm.worker.graph_runner import CudaCapture
from tests.support.spawned import Ranks

LIMIT_S = 60.0
DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn]
SIZES = [0, 1, 3, 4097, (64 << 20) + 3]
ROUNDS = 12


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"torch sees {torch.cuda.device_count()} GPUs, this needs 2")
    if (problem := nccl.missing(torch.device("cuda", 0))) is not None:
        pytest.skip(problem)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path)
    ranks.run(_set_up)
    yield ranks
    ranks.close()


def test_tensors_of_any_type_go_both_ways(ranks: Ranks) -> None:
    (unique_id, _) = ranks.run(_make_id)
    ranks.run(_check_both_ways, unique_id)


def test_communicators_one_after_another_leave_nothing(ranks: Ranks) -> None:
    free = []
    for _ in range(ROUNDS):
        (unique_id, _) = ranks.run(_make_id)
        free.append(ranks.run(_exchange, unique_id))
    # What the first ones keep (code, a context) stays; later ones add nothing.
    assert all(before - after < 64 << 20 for before, after in zip(free[2], free[-1], strict=True)), free


def test_who_sends_nothing_is_given_up_and_both_go_on(ranks: Ranks) -> None:
    (unique_id, _) = ranks.run(_make_id)
    assert ranks.run(_receive_nothing, unique_id) == ["NCCL had not copied everything after 1.0 s", ""]
    (unique_id, _) = ranks.run(_make_id)
    ranks.run(_check_both_ways, unique_id)


def test_who_never_connects_is_given_up(ranks: Ranks) -> None:
    (unique_id, _) = ranks.run(_make_id)
    assert ranks.run(_connect_alone, unique_id) == ["the other process had not connected over NCCL after 1.0 s", ""]
    (unique_id, _) = ranks.run(_make_id)
    ranks.run(_check_both_ways, unique_id)


def test_graphs_are_captured_while_another_thread_sends(ranks: Ranks) -> None:
    ids = [ranks.run(_make_id)[0] for _ in range(ROUNDS)]
    assert ranks.run(_capture_meanwhile, ids)[0] > 0


def test_an_engine_starts_with_a_busy_ones_weights(tmp_path: Path, cluster: None) -> None:
    """Dummy weights, changed in the live engine, so that they can come from nowhere else."""
    from ray.util.placement_group import remove_placement_group

    from raylm.engine.factory import engine_over, ray_executor
    from raylm.executor.cluster import reserve

    config = EngineConfig.model_validate(
        {
            "model": {"path": str(write_shape("qwen3-0.6b", tmp_path)), "load_format": "dummy", "max_model_len": 512},
            "load": {"from_peer": True},
            "cache": {"prefix_caching": False, "num_blocks": 2048},
            "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 1024},
            "runtime": {"device": "cuda", "ray_workers": True},
        }
    )
    (first_group, worker), (second_group, _) = reserve(config), reserve(config)
    executor = ray_executor(
        config, group=first_group, resources=worker, release=lambda: remove_placement_group(first_group)
    )
    live = engine_over(executor)
    drawn = _in_worker(executor.workers[0], _change)
    changed = _in_worker(executor.workers[0], _digest)
    assert not set(drawn) & set(changed)
    with ThreadPoolExecutor(1) as thread:
        new_executor = ray_executor(
            config,
            group=second_group,
            resources=worker,
            release=lambda: remove_placement_group(second_group),
            peers=executor.workers,
        )
        started = thread.submit(engine_over, new_executor)
        # Ever new numbers of rows: their graphs are captured while the weights are sent.
        meanwhile = []
        while not started.done():
            meanwhile.append(_generate(live, 1 + len(meanwhile) % 24))
        new = started.result()
    try:
        assert _in_worker(new_executor.workers[0], _digest) == changed
        assert _in_worker(executor.workers[0], _digest) == changed
        for index, tokens in enumerate(meanwhile[:48]):
            count = 1 + index % 24
            assert _generate(live, count) == tokens, f"{count} rows, {index} of {len(meanwhile)}"
        assert _generate(new, 8) == _generate(live, 8)
    finally:
        new.shutdown()
        live.shutdown()


@pytest.fixture
def cluster() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, at import and start.
        import ray

        ray.init("local", num_cpus=4, num_gpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Workers cannot import a test.
    yield
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.shutdown()


def _generate(engine: Engine, count: int) -> list[list[int]]:
    """24 greedy tokens for each of `count` requests that come together."""
    tokens: dict[str, list[int]] = {str(index): [] for index in range(count)}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for id in tokens:
        engine.add([id], [1000 + 17 * int(id) + position for position in range(20)], params)
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
    return list(tokens.values())


def _in_worker(worker, function):
    import ray

    from raylm.executor.peers import WEIGHTS

    return ray.get(worker.__ray_call__.options(concurrency_group=WEIGHTS).remote(function), timeout=LIMIT_S)


def _parameters(actor) -> list[Tensor]:
    return actor._worker.weights._parameters


def _change(actor) -> list[str]:
    """Returns the digests from before."""
    before = _digest(actor)
    with torch.inference_mode():
        for x in _parameters(actor):
            x.mul_(1.5) if x.dim() == 1 else x.copy_(x.flip(0))
    torch.cuda.synchronize()
    return before


def _digest(actor) -> list[str]:
    return [sha256(x.contiguous().view(torch.uint8).cpu().numpy()).hexdigest() for x in _parameters(actor)]


def _set_up(rank: int) -> None:
    torch.cuda.set_device(rank)
    set_up_libraries(ParallelConfig(), "127.0.0.1")
    assert nccl.missing(torch.device("cuda", rank)) is None


def _make_id(rank: int) -> bytes | None:
    return nccl.make_id() if rank == 0 else None


def _connect(rank: int, unique_id: bytes, limit_s: float = LIMIT_S) -> Communicator:
    return Communicator.connect(unique_id, rank=rank, size=2, device=torch.device("cuda", rank), limit_s=limit_s)


def _pattern(seed: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    tensors = []
    for dtype in DTYPES:
        for size in SIZES:
            raw = torch.randint(0, 2, (size * dtype.itemsize,), dtype=torch.uint8, device="cuda", generator=generator)
            tensors.append(raw.view(dtype))
    return tensors


def _check_both_ways(rank: int, unique_id: bytes) -> None:
    own, expected = _pattern(rank), _pattern(1 - rank)
    found = [torch.zeros_like(x.view(torch.uint8)).view(x.dtype) for x in expected]
    torch.cuda.synchronize()
    with _connect(rank, unique_id) as communicator:
        # One direction after the other: calls of one communicator are run in order.
        for sender in (0, 1):
            if rank == sender:
                communicator.send(own, 1 - rank)
            else:
                communicator.receive(found, 1 - rank)
        communicator.wait(LIMIT_S)
        dist.barrier()
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), (x.dtype, x.shape)


def _exchange(rank: int, unique_id: bytes) -> int:
    """Returns the bytes that are free on the GPU afterwards."""
    x = torch.full((1 << 20,), rank + 1, device="cuda")
    torch.cuda.synchronize()
    with _connect(rank, unique_id) as communicator:
        communicator.send([x], 1) if rank == 0 else communicator.receive([x], 0)
        communicator.wait(LIMIT_S)
        dist.barrier()
    assert torch.equal(x, torch.ones_like(x))
    dist.barrier()
    return torch.cuda.mem_get_info()[0]


def _receive_nothing(rank: int, unique_id: bytes) -> str:
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    communicator = _connect(rank, unique_id)
    message = ""
    if rank == 0:
        communicator.receive([x], 1)
        with pytest.raises(TransferError) as caught:
            communicator.wait(1.0)
        message = str(caught.value)
    dist.barrier()
    communicator.close()
    return message


def _connect_alone(rank: int, unique_id: bytes) -> str:
    if rank == 1:
        return ""
    with pytest.raises(TransferError) as caught:
        _connect(rank, unique_id, limit_s=1.0)
    return str(caught.value)


def _capture_meanwhile(rank: int, ids: list[bytes]) -> int:
    """Rank 0 captures graphs, and checks what they compute, while its other thread sends; returns how many."""
    device = torch.device("cuda", rank)
    weights = torch.full((64 << 20,), rank + 1.0, device=device)
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def transfer() -> None:
        try:
            for unique_id in ids:
                with _connect(rank, unique_id) as communicator:
                    communicator.send([weights], 1) if rank == 0 else communicator.receive([weights], 0)
                    communicator.wait(LIMIT_S)
                    dist.barrier()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=transfer)
    thread.start()
    count = 0
    if rank == 0:
        capture = CudaCapture(device)
        x = torch.ones(512, 512, device=device)
        product = x @ x  # cuBLAS makes its handle before any capture.
        while thread.is_alive():
            out = torch.zeros_like(x)
            replay = capture(lambda out=out: out.copy_(x @ x))
            replay()
            torch.cuda.current_stream().synchronize()
            assert torch.equal(out, product)
            count += 1
    thread.join()
    assert errors == []
    assert torch.equal(weights, torch.full_like(weights, 1.0))
    return count
