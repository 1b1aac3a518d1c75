"""The chart through real Helm: what it renders is what Kubernetes, KubeRay and raylm take."""

from __future__ import annotations

import sys

import jsonschema
import pytest
import yaml
from helm_python.chart import Chart, lint, package

from helm import chart_schema
from raylm.config.application import IngressConfig, ModelDeployment, QueuePolicyConfig, load_ingress, load_model
from raylm.config.demo import DEMO_MODELS
from raylm.config.files import INGRESS_PATH, MODEL_PATH
from raylm.serving.program.serve_file import serve_config
from tests.helm import kube_schemas, rendered

LINKED = [*rendered.ROOT.glob("deployments/*.yaml"), *rendered.ROOT.glob("configs/*.yaml")]
DEPLOYMENTS = sorted(path.stem for path in LINKED if path.parent.name == "deployments")
SETS = ["defaults", *rendered.EXAMPLES]
MULTI_HOST = rendered.values_of("multi-host")
GPU_ONLY = ("gpu", "tp", "pp")


def pods(values: dict[str, object]) -> list[dict]:
    """The pod specifications of all Ray clusters in it, heads first."""
    found = []
    for document in rendered.documents(values):
        spec = document["spec"].get("jobTemplate", document["spec"]) if "spec" in document else {}
        cluster = spec.get("rayClusterConfig") or spec.get("rayClusterSpec")
        if cluster:
            groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
            found += [group["template"]["spec"] for group in groups]
    return found


def containers(values: dict[str, object]) -> list[dict]:
    return [one for pod in pods(values) for one in [*pod.get("initContainers", []), *pod["containers"]]]


@pytest.mark.parametrize("name", SETS)
def test_lint_has_nothing_to_say(name):
    report = lint(rendered.CHART, rendered.values_of(name), strict=True)
    said = [message for message in report["messages"] if "icon is recommended" not in message["error"]]
    assert report["errors"] == [] and said == []


@pytest.mark.parametrize("name", SETS)
def test_every_document_is_what_its_kind_allows(name):
    documents = rendered.documents(rendered.values_of(name))
    assert documents
    for document in documents:
        kube_schemas.check(document)
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("RayService", ["rayClusterConfig", "headGroupSpec", "template", "spec", "dnsPolice"], "x"),
        ("RayService", ["rayClusterConfig", "autoscalerOption"], {}),
        ("PodDisruptionBudget", ["maxUnavailble"], 1),
        ("NetworkPolicy", ["policyTypes"], "Ingress"),
    ],
)
def test_the_check_of_documents_sees_what_it_should(kind, path, value):
    document = next(one for one in rendered.documents({}) if one["kind"] == kind)
    place = document["spec"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        kube_schemas.check(document)


@pytest.mark.parametrize("name", rendered.GOLDEN)
def test_golden_files(name):
    again = f"if this is meant: {sys.executable} -m tests.helm.rendered"
    assert rendered.text(rendered.values_of(name)) == rendered.GOLDEN[name].read_text(encoding="utf-8"), again


def test_the_packaged_chart_renders_the_same(tmp_path):
    path = package(rendered.CHART, destination=tmp_path)
    with Chart.load(path) as packed:
        # Links in the repository, files in the package.
        carried = {file["name"] for file in packed.files if file["name"].startswith(("deployments/", "configs/"))}
        assert carried == {str(path.relative_to(rendered.ROOT)) for path in LINKED}
        files = packed.render(name="demo", namespace="llm")
    assert files == rendered.chart().render(name="demo", namespace="llm")


def test_the_values_schema_is_up_to_date():
    assert chart_schema.TARGET.read_text(encoding="utf-8") == chart_schema.values_schema(), (
        f"run: {sys.executable} helm/chart_schema.py"
    )


def loaded(application: dict) -> IngressConfig | ModelDeployment:
    load = {INGRESS_PATH: load_ingress, MODEL_PATH: load_model}[application["import_path"]]
    return load(application.get("args", {}), source="test")


def in_pods(model: ModelDeployment, seconds: float) -> ModelDeployment:
    """The model as the chart has it: engines listen on their nodes, and wait so long for room."""
    given = "placement_timeout_s" in model.engine.parallel.model_fields_set
    wait = {} if given else {"placement_timeout_s": seconds}
    engine = model.engine.model_copy(update={"parallel": model.engine.parallel.model_copy(update=wait)})
    host = model.channel_host if "channel_host" in model.model_fields_set else "node"
    return model.model_copy(update={"engine": engine, "channel_host": host})


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_serve_config_is_the_deployment_itself(name):
    deployment = yaml.safe_load((rendered.ROOT / "deployments" / f"{name}.yaml").read_text(encoding="utf-8"))
    groups = {"workerGroups": MULTI_HOST["workerGroups"]} if name in GPU_ONLY else {}
    config = rendered.serve_config({"service": {"deployment": name}, **groups})
    assert (config["proxy_location"], config["http_options"]["host"]) == ("EveryNode", "0.0.0.0")
    for application, original in zip(config["applications"], deployment["applications"], strict=True):
        expected = loaded(original)
        assert loaded(application) == (in_pods(expected, 1800) if isinstance(expected, ModelDeployment) else expected)
        assert {**application, "args": {}} == {**original, "args": {}}


@pytest.mark.parametrize("name", [name for name in SETS if name != "batch"])
def test_raylm_takes_every_serve_config(name, tmp_path, monkeypatch):
    """All of it as `raylm serve` checks it, but for models, keys and tenants that are not here."""
    monkeypatch.setattr("raylm.serving.program.serve_file.check_model", lambda engine: None)
    monkeypatch.setattr("raylm.serving.program.serve_file.read_keys", lambda path: None)
    monkeypatch.setattr("raylm.serving.program.serve_file.load_yaml", lambda config, path: None)
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(rendered.serve_config(rendered.values_of(name))), encoding="utf-8")
    config = serve_config(str(path), host=None, port=None)
    service = rendered.values_of(name).get("service", {})
    assert config["http_options"]["port"] == service.get("port", 8000)
    # A model is one of the image or lies in the volume.
    for application in config["applications"][1:]:
        model = loaded(application).engine.model.path
        assert model in DEMO_MODELS or model.startswith("/models/")


@pytest.mark.parametrize("name", ["gpu", "multi-host", "everything"])
def test_models_and_ingress_of_the_values_are_what_is_served(name):
    values = rendered.values_of(name)
    service = values["service"]
    face, *models = rendered.serve_config(values)["applications"]
    ingress = {key: value for key, value in service.get("ingress", {}).items() if key != "replicas"}
    if "apiKeys" in values:
        ingress["http"] = {**ingress["http"], "api_keys_file": "/etc/raylm/api-keys"}
    form = service.get("logFormat", "text")
    ingress["log"] = {"format": form}
    assert loaded(face) == load_ingress(ingress, source=name)
    for application, given in zip(models, service["models"], strict=True):
        args = {key: value for key, value in given.items() if key not in ("replicas", "autoscaling")}
        args["engine"] = {**args["engine"], "runtime": {**args["engine"].get("runtime", {}), "log_format": form}}
        expected = in_pods(load_model(args, source=name), service.get("placementSeconds", 1800))
        assert loaded(application) == expected
        assert application["name"] == f"model-{expected.engine.model.served_name}"


def test_replicas_are_options_of_serve_which_restart_nothing():
    def deployments(name: str) -> list[dict]:
        applications = rendered.serve_config(rendered.values_of(name))["applications"]
        return [options for application in applications for options in application.get("deployments", [])]

    face, fixed, scaled = deployments("everything")
    assert face == {"name": "OpenAIIngress", "num_replicas": 2}
    assert fixed == {"name": "ModelReplica", "num_replicas": 2}
    policy = {
        "policy_function": "raylm.serving.autoscaling:QueuePolicy",
        "policy_kwargs": {"target_queued_requests": 8, "target_queue_s": 2.5},
    }
    bounds = {"min_replicas": 2, "max_replicas": 4, "upscale_delay_s": 10, "downscale_delay_s": 300}
    assert scaled["autoscaling_config"] == {**bounds, "look_back_period_s": 15, "policy": policy}
    (usual,) = deployments("gpu")
    assert usual["autoscaling_config"]["policy"]["policy_kwargs"] == {"target_queued_requests": 4}
    assert usual["autoscaling_config"]["downscale_delay_s"] == 120


def test_a_model_can_sleep():
    autoscaling = {"min_replicas": 0, "max_replicas": 2, "target_queued_tokens": 1000, "max_kv_usage": 0.8}
    values = {"service": {"models": [{"engine": {"model": {"path": "smollm2-135m"}}, "autoscaling": autoscaling}]}}
    _, model = rendered.serve_config(values)["applications"]
    (options,) = model["deployments"]
    found = options["autoscaling_config"]
    # It is loaded once, to see that it can be.
    assert (found["min_replicas"], found["initial_replicas"], found["max_replicas"]) == (0, 1, 2)
    kwargs = {"target_queued_requests": 4, "target_queued_tokens": 1000, "max_kv_usage": 0.8}
    assert found["policy"]["policy_kwargs"] == kwargs and QueuePolicyConfig(**kwargs)


def test_an_engine_file_that_only_the_image_has_is_left_to_it():
    _, model = rendered.serve_config({"service": {"models": [{"engine": "mine/x.yaml"}]}})["applications"]
    assert (model["name"], model["args"]["engine"]) == ("model-x", "mine/x.yaml")


@pytest.mark.parametrize("name", ["defaults", "gpu", "everything"])
def test_the_grace_period_covers_the_drain_and_serves_own_end(name):
    values = rendered.values_of(name)
    for group in values.get("workerGroups", []):
        group.pop("terminationSeconds", None)
    service = values.get("service", {})
    default = ModelDeployment.model_fields["drain_timeout_s"].default
    asked = [*service.get("models", [{}]), service.get("ingress", {})]
    drain = max(one.get("drain_timeout_s", default) for one in asked)
    # Behind HAProxy a replica's drain begins that much later.
    drain += 5 if service.get("haProxy", True) else 0
    wait = values.get("drain", {}).get("replacementSeconds", 60)
    service = next(one for one in rendered.documents(values) if one["kind"] == "RayService")
    assert service["spec"]["rayClusterDeletionDelaySeconds"] >= drain + 30
    for pod in pods({**values, "batch": {}}):
        hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
        deadline = int(hook.rsplit(" ", 1)[1])
        # Serve stops a replica its graceful_shutdown_timeout_s, drain + 30, before the deadline.
        assert deadline >= wait + drain + 30
        assert pod["terminationGracePeriodSeconds"] >= deadline + 32
        if pod["containers"][0]["name"] == "ray-worker":
            assert (
                hook.splitlines()[1].startswith("ray drain-node ")
                and f"--deadline-remaining-seconds {deadline} " in hook
            )


@pytest.mark.parametrize("name", SETS)
def test_no_container_has_more_rights_than_it_needs(name):
    for pod in pods(rendered.values_of(name)):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        autoscales = rendered.values_of(name).get("autoscaler", {}).get("enabled", False)
        is_head = pod["containers"][0]["name"] == "ray-head"
        assert pod["automountServiceAccountToken"] is (autoscales and is_head)
        assert pod["serviceAccountName"].endswith("-head") is is_head
    for container in containers(rendered.values_of(name)):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        # What Ray writes to.
        mine = container["name"].startswith(("ray-", "fetch-"))
        assert not mine or {"/tmp", "/home/raylm"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
    for account in (one for one in rendered.documents({}) if one["kind"] == "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_only_the_clusters_own_pods_reach_the_token_channel():
    for document in rendered.documents(rendered.values_of("everything")):
        if document["kind"] != "NetworkPolicy":
            continue
        inside, *outside = document["spec"]["ingress"]
        assert inside == {"from": [{"podSelector": document["spec"]["podSelector"]}]}
        # Engines listen on ports of the system's choice: whoever else may come in is held to named ones.
        allowed = {port["port"] for rule in outside for port in rule["ports"]}
        assert allowed <= {"serve", "dashboard", "metrics"} and all(rule["ports"] for rule in outside)


def test_gpu_pods():
    head, worker = pods(rendered.values_of("gpu"))
    resources = worker["containers"][0]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 1
    tolerated = [one for one in worker["tolerations"] if one["effect"] == "NoSchedule"]
    assert tolerated == [{"effect": "NoSchedule", "key": "nvidia.com/gpu", "operator": "Exists"}]
    assert not [one for one in head["tolerations"] if one["effect"] == "NoSchedule"]
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]
    digest = rendered.values_of("gpu")["image"]["digest"]
    assert all(one["image"].endswith(f"@{digest}") for one in containers(rendered.values_of("gpu")))


def test_environment_is_said_explicitly():
    for name, mode, proxy in (("defaults", "token", "1"), ("everything", "token", "0")):
        for pod in pods({**rendered.values_of(name), "batch": {}}):
            env = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
            assert env["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] == "5"
            assert env["RAY_AUTH_MODE"] == mode and env["RAY_SERVE_ENABLE_HA_PROXY"] == proxy
    assert (env["LIMIT"], env["FLAG"]) == ("3", "true")
