"""The house keeps its own rules."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raylm.config.application import load_ingress, load_model
from raylm.config.base import load_yaml
from raylm.config.engine import EngineConfig
from raylm.config.files import INGRESS_PATH, MODEL_PATH
from tests import check_layers

CONFIGS = sorted((check_layers.ROOT / "configs").glob("*.yaml"))
DEPLOYMENTS = sorted((check_layers.ROOT / "deployments").glob("*.yaml"))


def test_imports_and_sizes():
    assert check_layers.problems() == []


@pytest.mark.parametrize(
    ("name", "code", "problem"),
    [
        ("raylm/core/x.py", "import torch", "core must not import torch"),
        ("raylm/core/x.py", "from raylm.worker import worker", "core must not import raylm.worker"),
        ("raylm/worker/x.py", "from raylm.core.scheduler import Scheduler", "worker meets core only in"),
        ("raylm/engine/x.py", "from ray import serve\nimport ray.serve", "ray.serve belongs to"),
        ("raylm/models/x.py", "import ray", "ray belongs to"),
        ("raylm/serving/x.py", "from raylm.worker import worker", "serving must not import raylm.worker"),
        ("raylm/novelty/x.py", "import raylm.config", "novelty has no place in ARROWS"),
    ],
)
def test_the_check_sees_what_it_should(name, code, problem):
    found = list(check_layers._imports(name, ast.parse(code)))
    assert any(problem in line for line in found), found


def test_a_long_function_is_seen():
    code = "def f():\n" + "    pass\n" * 61
    assert list(check_layers._sizes("x.py", code, ast.parse(code)))


def test_importing_raylm_is_cheap():
    code = "import raylm, sys; print([m for m in ('torch', 'ray', 'transformers', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["raylm.engine.actor", "raylm.text.processor"])
def test_the_engine_and_the_text_layer_do_without_torch(module):
    code = f"import {module}, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_engine_configuration_loads(path: Path):
    assert load_yaml(EngineConfig, path).model.path


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_every_deployment_loads(path: Path):
    for application in yaml.safe_load(path.read_text())["applications"]:
        load = {INGRESS_PATH: load_ingress, MODEL_PATH: load_model}[application["import_path"]]
        assert load(application.get("args", {}), source=str(path)).endpoint == "default"
