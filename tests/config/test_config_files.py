"""What a configuration file names by a relative path is looked for beside it first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from raylm.bench.shapes import SHAPES
from raylm.cli.options import engine_config
from raylm.config.application import load_model
from raylm.config.files import INGRESS_PATH, MODEL_PATH, read_config
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.serving.program.serve_file import serve_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine file, and the models that it could mean: beside it, and in the working folder."""
    for place in ("here/mine", "away/mine", "away/only"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    (tmp_path / "here" / "engine.yaml").write_text("model: {path: mine, load_format: dummy}\n")
    monkeypatch.chdir(tmp_path / "away")
    return tmp_path / "here"


def application(folder: Path, engine: object, import_path: str = MODEL_PATH) -> str:
    path = folder / "app.yaml"
    face = {"name": "llm", "import_path": INGRESS_PATH}
    entry = {"name": "model", "route_prefix": None, "import_path": import_path, "args": {"engine": engine}}
    path.write_text(yaml.safe_dump({"applications": [face, entry]}))
    return str(path)


def model_of(target: str) -> str:
    """The model's path as the process learns it that builds the application, wherever it runs."""
    _, entry = serve_config(target, host=None, port=None)["applications"]
    return load_model(entry["args"], source="test").engine.model.path


def test_a_model_is_looked_for_beside_its_engine_file(folder: Path):
    (folder / "other.yaml").write_text("model: {path: only, load_format: dummy}\n")
    assert model_of(str(folder / "engine.yaml")) == str(folder / "mine")
    assert model_of(str(folder / "other.yaml")) == "only"


@pytest.mark.parametrize("engine", ["engine.yaml", {"model": {"path": "mine", "load_format": "dummy"}}])
def test_an_engine_is_looked_for_beside_the_file_that_names_it(folder: Path, engine: object):
    assert model_of(application(folder, engine)) == str(folder / "mine")


def test_a_chat_template_is_looked_for_beside_its_engine_file(folder: Path):
    (folder / "own.jinja").write_text("{{ messages }}")
    for given, expected in (("own.jinja", str(folder / "own.jinja")), ("chatml", "chatml"), ("{{ 1 }}", "{{ 1 }}")):
        model = {"path": "mine", "load_format": "dummy", "chat_template": given}
        (folder / "chat.yaml").write_text(yaml.safe_dump({"model": model}))
        _, entry = serve_config(str(folder / "chat.yaml"), host=None, port=None)["applications"]
        assert load_model(entry["args"], source="test").engine.model.chat_template == expected


def test_what_drafts_is_looked_for_beside_its_engine_file(folder: Path):
    speculation = "speculation: {method: draft_model, model: mine}"
    (folder / "drafts.yaml").write_text(f"model: {{path: only, load_format: dummy}}\n{speculation}\n")
    _, entry = serve_config(str(folder / "drafts.yaml"), host=None, port=None)["applications"]
    assert load_model(entry["args"], source="test").engine.speculation.model == str(folder / "mine")


@pytest.mark.usefixtures("demo")
def test_then_in_the_working_folder_and_beside_the_package(folder: Path):
    Path("engine2.yaml").write_text("model: {path: only, load_format: dummy}\n")
    assert model_of(application(folder, "engine2.yaml")) == str(folder.parent / "away" / "only")
    assert model_of(application(folder, "configs/smollm2-135m.yaml")) == "smollm2-135m"


def test_what_is_nowhere_is_told_with_the_places(folder: Path):
    with pytest.raises(ConfigError, match=r"'no\.yaml' not found; looked at .*/here/no\.yaml and .*/away/no"):
        serve_config(application(folder, "no.yaml"), host=None, port=None)
    with pytest.raises(ConfigError, match=r"'no' does not exist .*looked in .*/away, and beside the "):
        locate("no")


def test_applications_of_others_are_left_alone(folder: Path):
    data = read_config(application(folder, "no.yaml", "others:app"))
    assert isinstance(data, dict)
    _, entry = data["applications"]
    assert entry["args"] == {"engine": "no.yaml"}


def test_commands_take_the_model_beside_the_file_too(folder: Path):
    from raylm.cli import make_parser

    args = make_parser().parse_args(["generate", str(folder / "engine.yaml"), "Hello"])
    assert engine_config(args).model.path == str(folder / "mine")
