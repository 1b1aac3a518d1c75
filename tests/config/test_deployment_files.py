"""Every deployment file: checked as Serve and raylm check it, and its GPUs hold what they are given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from raylm.bench.dummy import write_shape
from raylm.config.application import ModelDeployment, load_model
from raylm.config.files import INGRESS_PATH, MODEL_PATH
from raylm.config.resolve import resolve
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.planning.gpus import find_gpu
from raylm.planning.sizing import Sizing
from raylm.serving.program.serve_file import serve_config

FILES = {path.name: path for path in (Path(__file__).parents[2] / "deployments").glob("*.yaml")}
GPU_FILES = ["gpu.yaml", "tp.yaml", "pp.yaml"]


def models(name: str) -> list[ModelDeployment]:
    applications = yaml.safe_load(FILES[name].read_text())["applications"]
    return [load_model(one["args"], source=name) for one in applications if one["import_path"] == MODEL_PATH]


def head(name: str) -> list[str]:
    lines = FILES[name].read_text().splitlines()
    return [line.removeprefix("#").strip() for line in lines if line.startswith("#")]


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_head_says_what_runs_it_and_what_it_needs(name):
    assert head(name)[0] == f"serve run deployments/{name}"
    assert [line for line in head(name) if line.startswith("Needs: ")]


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize("name", sorted(set(FILES) - set(GPU_FILES)))
def test_raylm_serve_takes_the_file(name):
    applications = serve_config(str(FILES[name]), host=None, port=None)["applications"]
    assert [one["import_path"] for one in applications] == [INGRESS_PATH] + [MODEL_PATH] * len(models(name))


@pytest.mark.parametrize("name", GPU_FILES)
def test_only_the_model_is_missing_from_a_file_for_gpus(name):
    """Everything before it has been checked by then."""
    with pytest.raises(ConfigError, match=r"model\.path '/models/\S+' does not exist"):
        serve_config(str(FILES[name]), host=None, port=None)


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize("name", sorted(FILES))
def test_a_cpu_is_enough_where_no_gpu_is_named(name):
    devices = {model.engine.runtime.device for model in models(name)}
    assert ("cuda" in devices) == (name in GPU_FILES)
    assert all(locate(model.engine.model.path) for model in models(name) if name not in GPU_FILES)


@pytest.mark.parametrize("name", GPU_FILES)
def test_the_gpus_that_a_head_names_hold_the_model(name, tmp_path):
    (model,) = models(name)
    (needs,) = (re.fullmatch(r"Needs: (\d+) x (\S+)", line) for line in head(name) if line.startswith("Needs"))
    assert int(needs[1]) == model.engine.parallel.num_workers
    arch = ArchConfig.from_source(locate(str(write_shape(model.engine.model.served_name, tmp_path))))
    context = model.engine.model.max_model_len or 8192
    plan = Sizing(resolve(model.engine, "cuda"), arch, find_gpu(needs[2]), context=context).plan(model.engine.parallel)
    assert plan.problem is None


def test_the_files_are_what_their_names_say():
    (tensor,), (pipeline,) = (models(name) for name in ("tp.yaml", "pp.yaml"))
    assert (tensor.engine.parallel.tensor, tensor.engine.parallel.pipeline) == (2, 1)
    assert (pipeline.engine.parallel.tensor, pipeline.engine.parallel.pipeline) == (1, 2)
    _, scaled = yaml.safe_load(FILES["autoscale.yaml"].read_text())["applications"]
    (options,) = scaled["deployments"]
    assert [options["autoscaling_config"][key] for key in ("min_replicas", "max_replicas")] == [1, 2]
    assert len(models("multi-model.yaml")) == 2
