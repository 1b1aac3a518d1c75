"""Serve config files that are refused before anything starts, by `raylm serve` and by `raylm doctor`."""

from __future__ import annotations

import json
import sys

import pytest

from raylm.cli import main
from raylm.errors import ConfigError
from raylm.serving.serve_file import serve_config

ARGS = {"models": [{"engine": {"model": {"path": "smollm2-135m"}}}]}
LLM = {"name": "llm", "import_path": "raylm.serving.app:build_app", "args": ARGS}


def written(folder, data):
    path = folder / "app.yaml"
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (
            {"applications": [LLM], "http_options": {"prt": 8029}},
            "key 'http_options.prt' is unknown (did you mean 'port'?); allowed keys: host, ",
        ),
        (
            {"aplications": [LLM]},
            "key 'aplications' is unknown (did you mean 'applications'?); allowed keys: applications, ",
        ),
        ({"http_options": {"port": 8029}}, "key 'applications' is required"),
        (
            {"applications": [LLM | {"deployments": [{"name": "OpenAIIngress", "num_replica": 2}]}]},
            "key 'applications.0.deployments.0.num_replica' is unknown (did you mean 'num_replicas'?)",
        ),
        ({"applications": [LLM], "http_options": {"port": "many"}}, "key 'http_options.port' has the value 'many'"),
        ({"applications": [{"name": "llm"}]}, "key 'applications.0.import_path' is required"),
        (
            {"applications": [LLM | {"import_path": "raylm.serving.app:bild_app"}]},
            "application 'llm': import_path 'raylm.serving.app:bild_app': raylm.serving.app has no 'bild_app' "
            "(did you mean 'build_app'?)",
        ),
        (
            {"applications": [LLM | {"import_path": "raylm.serving.ap.build_app"}]},
            "cannot be imported: ModuleNotFoundError: No module named 'raylm.serving.ap'",
        ),
    ],
)
def test_what_serve_would_not_notice_is_refused(data, problem, tmp_path, capsys):
    path = written(tmp_path, data)
    with pytest.raises(ConfigError) as error:
        serve_config(path, host=None, port=None)
    assert str(error.value).startswith(f"{path}: ") and problem in str(error.value)
    assert main(["doctor", path, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problem"] == str(error.value)


def test_an_application_of_ones_own_is_found_where_serve_looks(tmp_path, monkeypatch):
    (tmp_path / "own_application.py").write_text("app = object()\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    data = {"applications": [{"import_path": "own_application:app", "args": {"any": {"key": 1}}}]}
    assert serve_config(written(tmp_path, data), host=None, port=None)["applications"] == data["applications"]
    assert sys.path == before
    # What a runtime environment brings along is not here.
    data["applications"][0] |= {"import_path": "not_here:app", "runtime_env": {"pip": ["not-here"]}}
    serve_config(written(tmp_path, data), host=None, port=None)


def test_options_are_those_of_the_file_unless_they_are_given(tmp_path):
    path = written(tmp_path, {"applications": [LLM], "http_options": {"port": "8029", "request_timeout_s": 3}})
    options = serve_config(path, host=None, port=None)["http_options"]
    assert options == {"host": "127.0.0.1", "port": 8029, "request_timeout_s": 3}
    assert serve_config(path, host="::1", port=1)["http_options"] == options | {"host": "::1", "port": 1}
