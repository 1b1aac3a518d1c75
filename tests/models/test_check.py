"""What is found out about a model before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from raylm.bench.dummy import write_shape
from raylm.cli import main
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError
from raylm.models.check import check_model
from raylm.serving.program.serve_file import serve_config


def wrong_models(folder):
    """Engine configurations whose models cannot work, and why."""
    for name in ("empty", "bare", "two"):
        (folder / name).mkdir()
    (folder / "empty/config.json").write_text("{}")
    (folder / "noise.gguf").write_bytes(bytes(range(256)) * 4)
    shape = write_shape("qwen3-0.6b", folder / "bare")
    index = {"weight_map": {"a": "here.safetensors", "b": "not-here.safetensors"}}
    (folder / "two/config.json").write_bytes((shape / "config.json").read_bytes())
    (folder / "two/here.safetensors").touch()
    (folder / "two/model.safetensors.index.json").write_text(json.dumps(index))
    demo = {"path": "smollm2-135m"}
    yield {"model": {"path": str(folder / "empty")}}, "empty/config.json: architectures is None; allowed: one of Llama"
    yield {"model": {"path": str(folder / "noise.gguf")}}, "noise.gguf: not a GGUF file"
    yield {"model": {"path": str(shape)}}, r"holds no weights; allowed: model\.safetensors"
    yield {"model": {"path": str(folder / "two")}}, "names files that are missing: not-here.safetensors"
    yield {"model": {**demo, "load_format": "safetensors"}}, "model.load_format is 'safetensors', but .* allows: auto"
    split = "num_attention_heads is 9, which parallel.tensor 2 cannot divide"
    yield {"model": demo, "parallel": {"tensor": 2}}, split
    yield {"model": demo, "parallel": {"pipeline": 2, "stage_layers": [3, 4]}}, "has 7 layers in all, the model 30"


@pytest.mark.usefixtures("demo")
def test_a_model_that_cannot_work_is_refused_before_anything_starts(tmp_path, capsys):
    path = tmp_path / "engine.yaml"
    for config, problem in wrong_models(tmp_path):
        path.write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=problem) as error:
            serve_config(str(path), host=None, port=None)
        assert main(["doctor", str(path), "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["problem"] == str(error.value)


def test_what_needs_no_weights_has_none(tmp_path):
    folder = str(write_shape("qwen3-0.6b", tmp_path))
    config = EngineConfig.model_validate({"model": {"path": folder, "load_format": "dummy"}, "parallel": {"tensor": 2}})
    assert check_model(config).num_layers == 28


@pytest.mark.usefixtures("demo")
def test_the_usual_model_is_checked_without_torch():
    code = (
        "import sys; from raylm.models.check import check_model; from raylm.config.engine import EngineConfig; "
        "check_model(EngineConfig.model_validate({'model': {'path': 'smollm2-135m'}})); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
