"""How `raylm serve` hands its applications to Serve: built here, and while Serve's proxies start."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from raylm.config.files import INGRESS_PATH, MODEL_PATH
from raylm.errors import ConfigError, RaylmError
from raylm.log import Laps

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Serve's own, at import
    from ray import serve
    from ray.serve.schema import ServeApplicationSchema

    from raylm.serving.autoscaling import POLICY_PATH
    from raylm.serving.program import deploy


@serve.deployment
class Nothing:
    def __init__(self, args):
        self.args = args


def application(**keys) -> ServeApplicationSchema:
    return ServeApplicationSchema.model_validate(
        {"name": "m", "route_prefix": None, "import_path": MODEL_PATH, "args": {"some": "thing"}, **keys}
    )


@pytest.fixture
def built_here(monkeypatch):
    monkeypatch.setitem(deploy._BUILDERS, MODEL_PATH, Nothing.bind)


def test_an_application_is_built_with_the_options_of_its_file(built_here):
    policy = {"policy_function": POLICY_PATH, "policy_kwargs": {"target_queued_requests": 4}}
    scaling = {"min_replicas": 1, "max_replicas": 3, "policy": policy}
    for options in ({"num_replicas": 2}, {"autoscaling_config": scaling}):
        built = deploy.build(application(deployments=[{"name": "Nothing", "max_ongoing_requests": 7, **options}]))
        (deployment,) = built.deployments
        config = deployment._deployment_config
        assert (built.name, built.route_prefix, built.ingress_deployment_name) == ("m", None, "Nothing")
        assert deployment.init_args == ({"some": "thing"},)
        assert config.max_ongoing_requests == 7
        if "num_replicas" in options:
            assert config.num_replicas == 2 and config.autoscaling_config is None
        else:
            assert config.autoscaling_config.max_replicas == 3
            assert config.autoscaling_config.policy.policy_kwargs == policy["policy_kwargs"]


def test_what_cannot_be_built_is_named_with_the_reason(monkeypatch):
    def refuse(args):
        raise ConfigError("there is no room")

    monkeypatch.setitem(deploy._BUILDERS, MODEL_PATH, refuse)
    with pytest.raises(RaylmError, match="^application 'm' did not start: there is no room$"):
        deploy.build(application())


@pytest.mark.parametrize(
    "keys", [{"import_path": "mine:app"}, {"runtime_env": {"env_vars": {"A": "1"}}}, {"logging_config": {}}]
)
def test_others_applications_and_what_only_serve_knows_are_built_by_serve(built_here, keys):
    asked = []
    client = SimpleNamespace(deploy_apps=lambda schema, _blocking: asked.append(schema))
    schema = SimpleNamespace(applications=[application(), application(**keys)])
    deploy._submit(client, schema)
    assert asked == [schema]


class FakeServe:
    """A controller whose proxies become ready after the applications, and one application in the states given."""

    def __init__(self, monkeypatch, states):
        self.events = []
        self.states = states
        self.ready_after = 1
        monkeypatch.setattr(deploy.api, "_create_controller_and_proxy_refs", self.create)
        monkeypatch.setattr(deploy, "ServeControllerClient", lambda controller: self)
        monkeypatch.setattr(deploy, "_set_global_client", lambda client: None)
        monkeypatch.setattr(deploy, "ray", SimpleNamespace(wait=self.wait, get=lambda refs: None))
        monkeypatch.setattr(deploy, "_POLL_S", 0.0)
        monkeypatch.setattr(deploy, "_is_ready", lambda url, certificate: self.events.append(url) or True)

    def create(self, *options):
        self.events.append("controller")
        return object(), ["proxy"]

    def deploy_applications(self, built, **waiting):
        assert not any(waiting.values())
        self.events.append([each.name for each in built])

    def wait(self, refs, timeout):
        self.events.append("front")
        return ([], refs) if self.events.count("front") <= self.ready_after else (refs, [])

    def list_serve_statuses(self):
        state, message = self.states.pop(0)
        status = SimpleNamespace(status=SimpleNamespace(value=state), message=message)
        return [SimpleNamespace(name="m", app_status=status, deployment_statuses=[])]


CONFIG = {
    "http_options": {"host": "127.0.0.1", "port": 8123},
    "applications": [
        {"name": "f", "route_prefix": "/", "import_path": INGRESS_PATH},
        {"name": "m", "route_prefix": None, "import_path": MODEL_PATH},
    ],
}


def test_replicas_start_while_the_proxies_do(built_here, monkeypatch):
    monkeypatch.setitem(deploy._BUILDERS, INGRESS_PATH, Nothing.bind)
    deploying, running = ("DEPLOYING", ""), ("RUNNING", "")
    fake = FakeServe(monkeypatch, [deploying, deploying, deploying, running])
    laps = Laps()
    deploy.deploy(CONFIG, laps)
    assert fake.events == ["controller", ["f", "m"], "front", "front", "http://127.0.0.1:8123/ready"]
    assert "applications submitted" in str(laps)


def test_a_model_that_fails_is_told_while_the_proxies_start(built_here, monkeypatch):
    monkeypatch.setitem(deploy._BUILDERS, INGRESS_PATH, Nothing.bind)
    FakeServe(monkeypatch, [("DEPLOY_FAILED", "Traceback\nraylm.errors.ConfigError: it is cut short")])
    with pytest.raises(RaylmError, match="^application 'm' did not start: it is cut short$"):
        deploy.deploy(CONFIG, Laps())


@pytest.mark.parametrize(("given", "is_enough"), [(60.0, False), (300.0, True)])
def test_the_front_has_the_time_that_the_environment_gives(built_here, monkeypatch, given, is_enough):
    monkeypatch.setitem(deploy._BUILDERS, INGRESS_PATH, Nothing.bind)
    monkeypatch.setattr(deploy, "PROXY_READY_CHECK_TIMEOUT_S", given)
    fake = FakeServe(monkeypatch, [("DEPLOYING", "")] * 4 + [("RUNNING", "")])
    seconds = iter(range(0, 1000, 50))
    monkeypatch.setattr(deploy, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda s: None))
    fake.ready_after = 3
    if is_enough:
        deploy.deploy(CONFIG, Laps())
    else:
        with pytest.raises(RaylmError, match="did not start: it was not ready after 60 s; on a slow machine try again"):
            deploy.deploy(CONFIG, Laps())
