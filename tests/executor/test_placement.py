"""Where an engine's processes go, and in which order they count, without a cluster."""

from __future__ import annotations

import pytest

from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError
from raylm.executor.placement import (
    GPU_TYPE_LABEL,
    NodeResources,
    WorkerPlace,
    bundle_of_worker,
    choose_placement,
    rank_order,
    seat_of,
    worker_bundles,
    worker_device,
    worker_resources,
)

GPU_WORKER = {"CPU": 0.5, "GPU": 1.0}
CPU_WORKER = {"CPU": 0.5}
ENGINE = {"CPU": 0.2}
HEAD = NodeResources(4, 0)


def config(tensor: int = 1, pipeline: int = 1, gpu_type: str | None = None, device: str = "auto") -> EngineConfig:
    parallel = {"tensor": tensor, "pipeline": pipeline, "gpu_type": gpu_type}
    return EngineConfig.model_validate({"model": {"path": "x"}, "parallel": parallel, "runtime": {"device": device}})


def gpus(count: int, kind: str | None = None, cpus: float = 32) -> NodeResources:
    return NodeResources(cpus, count, {GPU_TYPE_LABEL: kind} if kind else {})


@pytest.mark.parametrize(
    ("device", "gpu_type", "has_gpu", "expected"),
    [
        ("auto", None, False, 0),
        ("auto", None, True, 1),
        ("cpu", None, True, 0),
        ("cuda", None, False, 1),
        ("auto", "H200", False, 1),  # Its nodes may have yet to start.
    ],
)
def test_a_worker_asks_for_a_gpu_where_it_will_use_one(device, gpu_type, has_gpu, expected):
    worker = worker_resources(config(gpu_type=gpu_type, device=device), cluster_has_gpu=has_gpu)
    assert worker.get("GPU", 0) == expected
    assert worker_device(worker) == ("cuda" if expected else "cpu")


def test_a_whole_replica_fits_beside_an_ingress_on_two_cores():
    worker = worker_resources(config(), cluster_has_gpu=False)
    cpus = sum(bundle["CPU"] for bundle in worker_bundles(config(), worker))
    assert cpus + 0.1 <= 1, "two replicas must fit, so that a rolling update can go on"


@pytest.mark.parametrize(
    ("shape", "nodes"),
    [
        ((1, 1), [gpus(1)]),
        ((2, 1), [HEAD, gpus(2)]),
        ((8, 1), [gpus(8), gpus(4)]),
        ((4, 1), [gpus(4, cpus=2.2)]),
    ],
)
def test_one_node_holds_a_single_stage_a_bundle_each(shape, nodes):
    bundles, strategy, labels = choose_placement(config(*shape), GPU_WORKER, nodes)
    assert (strategy, labels) == ("STRICT_PACK", None)
    assert bundles == [ENGINE, *[GPU_WORKER] * (shape[0] * shape[1])]


@pytest.mark.parametrize(
    ("shape", "nodes"),
    [
        ((2, 2), [gpus(2), gpus(2)]),
        ((2, 2), [gpus(3), gpus(3)]),
        ((1, 2), [gpus(1), gpus(1), HEAD]),
        ((4, 3), [HEAD, gpus(8), gpus(4)]),
        ((2, 2), [gpus(2), gpus(2), gpus(4)]),  # The last may be in use.
        ((1, 4), [gpus(4, cpus=2.2)]),
        ((4, 1), [gpus(4, cpus=2), HEAD]),  # The engine has no room beside its workers.
        ((1, 4), [gpus(4, cpus=2), HEAD]),
    ],
)
def test_stages_go_where_there_is_room_each_whole(shape, nodes):
    """One bundle holds a stage's tensor group, so that Ray cannot put its ranks on two nodes."""
    tensor, pipeline = shape
    bundles, strategy, _ = choose_placement(config(*shape), GPU_WORKER, nodes)
    assert strategy == "PACK"
    assert bundles == [ENGINE, *[{"CPU": 0.5 * tensor, "GPU": 1.0 * tensor}] * pipeline]


@pytest.mark.parametrize(
    ("shape", "worker", "nodes"),
    [
        ((2, 1), GPU_WORKER, [gpus(1), gpus(1)]),
        ((1, 1), GPU_WORKER, [HEAD]),
        ((1, 1), CPU_WORKER, []),
        ((2, 2), GPU_WORKER, [gpus(3), gpus(1)]),
        ((1, 2), CPU_WORKER, [NodeResources(0.5, 0), NodeResources(0.5, 0)]),  # There is nothing for the engine.
        ((1, 2), CPU_WORKER, [NodeResources(0.6, 0), NodeResources(0.6, 0)]),  # Only in two halves.
        ((1, 2), CPU_WORKER, [NodeResources(0.1, 0), NodeResources(1.1, 0)]),
    ],
)
def test_what_no_node_can_hold_is_refused(shape, worker, nodes):
    with pytest.raises(ConfigError, match=f"parallel.tensor {shape[0]} and parallel.pipeline {shape[1]} need"):
        choose_placement(config(*shape), worker, nodes)


def test_the_engine_goes_where_it_costs_no_stage():
    nodes = [NodeResources(0.5, 0), NodeResources(0.7, 0)]
    assert choose_placement(config(pipeline=2), CPU_WORKER, nodes).strategy == "PACK"


def test_a_gpu_type_is_a_label_of_the_workers_bundles():
    nodes = [gpus(8, "A100"), gpus(2, "H200")]
    bundles, strategy, labels = choose_placement(config(2, gpu_type="H200"), GPU_WORKER, nodes)
    assert (strategy, labels) == ("STRICT_PACK", [{}, {GPU_TYPE_LABEL: "H200"}, {GPU_TYPE_LABEL: "H200"}])
    nodes = [HEAD, gpus(8, "A100"), gpus(2, "H200", cpus=1), gpus(2, "H200", cpus=1)]
    bundles, strategy, labels = choose_placement(config(2, 2, gpu_type="H200"), GPU_WORKER, nodes)
    assert (strategy, labels) == ("PACK", [{}, {GPU_TYPE_LABEL: "H200"}, {GPU_TYPE_LABEL: "H200"}])
    assert len(bundles) == len(labels)


def test_a_shortage_is_told_with_the_numbers():
    with pytest.raises(ConfigError) as caught:
        choose_placement(
            config(4, 2, gpu_type="H200"), GPU_WORKER, [HEAD, gpus(2, "H200"), gpus(2, "H200"), gpus(8, "A100")]
        )
    assert str(caught.value) == (
        "parallel.tensor 4 and parallel.pipeline 2 need 8 workers of 0.5 CPU, 1 GPU of type H200, the 4 of a stage on "
        "one node, and 0.2 CPU for the engine; the cluster's nodes have: 0 GPU, 4 CPU; 2 × 2 GPU (H200), 32 CPU; "
        "8 GPU (A100), 32 CPU"
    )
    with pytest.raises(ConfigError, match="need a worker of 0.5 CPU, and 0.2 CPU .* the cluster's nodes have: none"):
        choose_placement(config(), CPU_WORKER, [])


def test_workers_fill_bundles_in_order():
    assert [bundle_of_worker(index, num_workers=4, num_bundles=5) for index in range(4)] == [1, 2, 3, 4]
    assert [bundle_of_worker(index, num_workers=4, num_bundles=3) for index in range(4)] == [1, 1, 2, 2]


def place(node: str, *gpu_ids: str) -> WorkerPlace:
    return WorkerPlace(node, f"10.0.0.{node}", list(gpu_ids), 1)


def test_ranks_count_by_node_and_gpu_the_engines_node_first():
    places = [place("3", "10"), place("1", "7"), place("3", "9"), place("2", "0"), place("1", "3"), place("2", "1")]
    assert rank_order(places, "2") == [3, 5, 4, 1, 2, 0]
    assert rank_order(places, "none of them") == [4, 1, 3, 5, 2, 0]


def test_without_gpu_numbers_ranks_count_as_they_were_started():
    assert rank_order([place("1"), place("2"), place("1"), place("2")], "2") == [1, 3, 0, 2]
    assert rank_order([place("1", "GPU-b"), place("1", "GPU-a")], "1") == [0, 1]


def test_a_seat_names_the_gpus_of_its_node():
    places = [place("2", "4"), place("2", "6"), place("1", "0"), place("1", "1")]
    seats = [seat_of(rank, places, "10.0.0.2:99") for rank in range(4)]
    assert [seat.rank for seat in seats] == [0, 1, 2, 3]
    assert {seat.meeting_point for seat in seats} == {"10.0.0.2:99"}
    assert [seat.node_ip for seat in seats] == ["10.0.0.2", "10.0.0.2", "10.0.0.1", "10.0.0.1"]
    assert [seat.visible_gpus for seat in seats] == [["4", "6"], ["4", "6"], ["0", "1"], ["0", "1"]]
    assert [seat.gpu for seat in seats] == [0, 1, 0, 1]
    alone = seat_of(0, [place("1"), place("1")], "x:1")
    assert (alone.visible_gpus, alone.gpu) == ([], 0)
