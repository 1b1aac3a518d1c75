"""Every deployment file: checked as Serve and raylm check it, and its GPUs hold what they are given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from raylm.bench.dummy import write_shape
from raylm.config.application import AppConfig, load_app
from raylm.config.resolve import resolve
from raylm.config.source import locate
from raylm.models.arch import ArchConfig
from raylm.worker.gpus import find_gpu
from raylm.worker.sizing import Sizing

FILES = {path.name: path for path in (Path(__file__).parents[2] / "deployments").glob("*.yaml")}
GPU_FILES = ["gpu.yaml", "tp.yaml", "pp.yaml"]


def load(name: str) -> AppConfig:
    (application,) = yaml.safe_load(FILES[name].read_text())["applications"]
    return load_app(application["args"], source=name)


def head(name: str) -> list[str]:
    lines = FILES[name].read_text().splitlines()
    return [line.removeprefix("#").strip() for line in lines if line.startswith("#")]


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_head_says_what_runs_it_and_what_it_needs(name):
    assert head(name)[0] == f"serve run deployments/{name}"
    assert [line for line in head(name) if line.startswith("Needs: ")]


@pytest.mark.parametrize("name", sorted(FILES))
def test_serve_takes_the_file(name):
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(yaml.safe_load(FILES[name].read_text()))


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_cpu_is_enough_where_no_gpu_is_named(name):
    devices = {model.engine.runtime.device for model in load(name).models}
    assert ("cuda" in devices) == (name in GPU_FILES)
    assert all(locate(model.engine.model.path) for model in load(name).models if name not in GPU_FILES)


@pytest.mark.parametrize("name", GPU_FILES)
def test_the_gpus_that_a_head_names_hold_the_model(name, tmp_path):
    (model,) = load(name).models
    (needs,) = (re.fullmatch(r"Needs: (\d+) x (\S+)", line) for line in head(name) if line.startswith("Needs"))
    assert int(needs[1]) == model.engine.parallel.num_workers
    arch = ArchConfig.from_source(locate(str(write_shape(model.engine.model.served_name, tmp_path))))
    context = model.engine.model.max_model_len or 8192
    plan = Sizing(resolve(model.engine, "cuda"), arch, find_gpu(needs[2]), context=context).plan(model.engine.parallel)
    assert plan.problem is None


def test_the_files_are_what_their_names_say():
    (tensor,), (pipeline,), (scaled,) = (load(name).models for name in ("tp.yaml", "pp.yaml", "autoscale.yaml"))
    assert (tensor.engine.parallel.tensor, tensor.engine.parallel.pipeline) == (2, 1)
    assert (pipeline.engine.parallel.tensor, pipeline.engine.parallel.pipeline) == (1, 2)
    assert (scaled.autoscaling.min_replicas, scaled.autoscaling.max_replicas) == (1, 2)
    assert len(load("multi-model.yaml").models) == 2
