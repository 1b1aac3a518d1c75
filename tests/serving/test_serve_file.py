"""Serve config files that are refused before anything starts, by `raylm serve` and by `raylm doctor`."""

from __future__ import annotations

import json
import sys

import pytest

from raylm.cli import main
from raylm.errors import ConfigError
from raylm.serving.program.serve_file import serve_config

ENGINE = {"model": {"path": "smollm2-135m"}}
ALIASED = {"model": {"path": "smollm2-135m", "name": "other", "aliases": ["smollm2-135m"]}}
FACE = {"name": "llm", "import_path": "raylm.serving.app:build_ingress"}
MODEL = {
    "name": "model",
    "route_prefix": None,
    "import_path": "raylm.serving.app:build_model",
    "args": {"engine": ENGINE},
}
APPLICATIONS = [FACE, MODEL]
POLICY = "raylm.serving.autoscaling:QueuePolicy"


def deployed(application, **options):
    """The application with options of its deployment."""
    name = "OpenAIIngress" if application is FACE else "ModelReplica"
    return application | {"deployments": [{"name": name, **options}]}


def scaled(policy):
    """The applications, the model with this autoscaling policy."""
    bounds = {"min_replicas": 1, "max_replicas": 2}
    return {"applications": [FACE, deployed(MODEL, autoscaling_config=bounds | policy)]}


def written(folder, data):
    path = folder / "app.yaml"
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (
            {"applications": APPLICATIONS, "http_options": {"prt": 8029}},
            "key 'http_options.prt' is unknown (did you mean 'port'?); allowed keys: host, ",
        ),
        (
            {"aplications": APPLICATIONS},
            "key 'aplications' is unknown (did you mean 'applications'?); allowed keys: applications, ",
        ),
        ({"http_options": {"port": 8029}}, "key 'applications' is required"),
        (
            {"applications": [deployed(FACE, num_replica=2)]},
            "key 'applications.0.deployments.0.num_replica' is unknown (did you mean 'num_replicas'?)",
        ),
        (
            {"applications": APPLICATIONS, "http_options": {"port": "many"}},
            "key 'http_options.port' has the value 'many'",
        ),
        ({"applications": [{"name": "llm"}]}, "key 'applications.0.import_path' is required"),
        (
            {"applications": [FACE | {"import_path": "raylm.serving.app:bild_ingress"}]},
            "application 'llm': import_path 'raylm.serving.app:bild_ingress': raylm.serving.app has no "
            "'bild_ingress' (did you mean 'build_ingress'?)",
        ),
        (
            {"applications": [FACE | {"import_path": "raylm.serving.ap.build_ingress"}]},
            "cannot be imported: ModuleNotFoundError: No module named 'raylm.serving.ap'",
        ),
        (
            {"applications": [FACE | {"import_path": "raylm.serving.app:build_app", "args": {"models": []}}]},
            "application 'llm': import_path 'raylm.serving.app:build_app' is no more: write an application with "
            "import_path 'raylm.serving.app:build_ingress' (its args are http), and one for each model with",
        ),
        (
            {"applications": [FACE, MODEL | {"route_prefix": "/model"}]},
            "application 'model': route_prefix is '/model'; a model has none (route_prefix: null)",
        ),
        ({"applications": [FACE | {"route_prefix": None}]}, "application 'llm': route_prefix is null; an ingress"),
        (
            {"applications": [FACE, MODEL, MODEL | {"name": "again"}]},
            "applications 'model' and 'again': two models of endpoint 'default' are named 'smollm2-135m'",
        ),
        (
            {"applications": [FACE, MODEL, MODEL | {"name": "again", "args": {"engine": ALIASED}}]},
            "applications 'model' and 'again': two models of endpoint 'default' are named 'smollm2-135m'; give one of "
            "them another model.name, or other model.aliases",
        ),
        (
            {"applications": [FACE, MODEL | {"args": {"engine": ENGINE, "endpoint": "other"}}]},
            "application 'model': no application with import_path 'raylm.serving.app:build_ingress' is of its "
            "endpoint 'other'",
        ),
        (
            {"applications": [FACE, MODEL | {"args": {"engine": ENGINE, "drain_timeout": 3}}]},
            "application 'model': key 'drain_timeout' is unknown (did you mean 'drain_timeout_s'?)",
        ),
        (
            {"applications": [FACE, MODEL | {"deployments": [{"name": "ModelReplica:smollm2-135m"}]}]},
            "deployments.0.name is 'ModelReplica:smollm2-135m'; the application's one deployment is 'ModelReplica'",
        ),
        (
            {"applications": [FACE, deployed(MODEL, num_replicas="auto")]},
            "deployments.0.num_replicas is 'auto', with which Serve counts requests that do not pass through it",
        ),
        (
            scaled({}),
            "deployments.0.autoscaling_config.policy.policy_function is None; a model scales by the requests that wait "
            f"in its engines: policy: {{policy_function: '{POLICY}', policy_kwargs: {{target_queued_requests: 4}}}}",
        ),
        (
            scaled({"policy": {"policy_function": POLICY, "policy_kwargs": {"target": 3}}}),
            "deployments.0.autoscaling_config.policy.policy_kwargs: key 'target' is unknown (did you mean "
            "'target_queue_s'?); allowed keys: "
            "max_kv_usage, target_queue_s, target_queued_requests, target_queued_tokens",
        ),
        (
            scaled({"policy": {"policy_function": POLICY}, "upscale_delay": 3}),
            "deployments.0.autoscaling_config: key 'upscale_delay' is unknown (did you mean 'upscale_delay_s'?)",
        ),
        (
            scaled({"policy": {"policy_function": POLICY}, "min_replicas": 0}),
            "deployments.0.autoscaling_config.min_replicas is 0, and initial_replicas None; write initial_replicas: 1",
        ),
        (
            scaled({"policy": {"policy_function": POLICY}, "max_replicas": 0}),
            "deployments.0.autoscaling_config: key 'max_replicas' has the value 0: input should be greater than 0",
        ),
        (
            {"applications": [deployed(FACE, autoscaling_config={"policy": {"policy_function": "no.where:f"}})]},
            "the policy of an autoscaling_config cannot be imported: No module named 'no'",
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
    data = {"applications": [{"import_path": "own_application:app", "args": {"any": {"key": 1}}}]}
    serve_config(written(tmp_path, data), host=None, port=None)  # Ray adds to the path when it is first imported.
    del sys.modules["own_application"]
    before = list(sys.path)
    assert serve_config(written(tmp_path, data), host=None, port=None)["applications"] == data["applications"]
    assert sys.path == before
    # What a runtime environment brings along is not here.
    data["applications"][0] |= {"import_path": "not_here:app", "runtime_env": {"pip": ["not-here"]}}
    serve_config(written(tmp_path, data), host=None, port=None)


@pytest.mark.usefixtures("demo")
def test_options_are_those_of_the_file_unless_they_are_given(tmp_path):
    path = written(tmp_path, {"applications": APPLICATIONS, "http_options": {"port": "8029", "request_timeout_s": 3}})
    options = serve_config(path, host=None, port=None)["http_options"]
    assert options == {"host": "127.0.0.1", "port": 8029, "request_timeout_s": 3}
    assert serve_config(path, host="::1", port=1)["http_options"] == options | {"host": "::1", "port": 1}
