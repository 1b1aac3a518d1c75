"""Wrong values end in a message that names the value, before anything is rendered."""

from __future__ import annotations

import copy

import pytest
from helm_python.errors import HelmError

from tests.helm import rendered

GPU = rendered.values_of("gpu")
CUDA = {"model": {"path": "/models/x"}, "runtime": {"device": "cuda"}}
INCREMENTAL = "NewClusterWithIncrementalUpgrade"
GATEWAY = {"gatewayClassName": "istio"}
BATCH = {"enabled": True, "input": "s3://bucket/in.jsonl", "output": "s3://bucket/out.jsonl"}
MODEL = {"model": {"path": "/models/x"}}


def with_value(path: str, value: object, base: dict[str, object] = GPU) -> dict[str, object]:
    """`base` with one value changed; a number in the path is a place in a list."""
    values = copy.deepcopy(base)
    place: dict | list = values
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        place = place[part] if isinstance(place, list) else place.setdefault(part, {})
    place[last] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("replicas", 3, ["additional properties 'replicas' not allowed"]),
        ("image.digest", "sha256:12", ["/image/digest", "sha256:[0-9a-f]{64}"]),
        ("image.pullPolicy", "Sometimes", ["/image/pullPolicy", "'IfNotPresent'"]),
        ("auth.mode", "none", ["/auth/mode", "'token', 'disabled'"]),
        ("rayVersion", "2.59.1", ["/rayVersion"]),
        ("service.deployment", "lllm", ['service.deployment is "lllm"; the chart has', "llm"]),
        ("service.port", 80, ["/service/port", "want 1,024"]),
        ("service.logFormat", "xml", ["/service/logFormat", "'text', 'json'"]),
        ("service.args", {"models": []}, ["/service", "'args' not allowed"]),
        ("service.models", [{}], ["/service/models/0", "missing property 'engine'"]),
        ("service.models.0.engine", {}, ["/service/models/0/engine", "missing property 'model'"]),
        ("service.models.0.engine", {**MODEL, "cahce": {}}, ["/engine", "'cahce' not allowed"]),
        ("service.models.0.engine", {**MODEL, "scheduler": {"max_num_seqs": 0}}, ["/max_num_seqs", "want 1"]),
        ("service.models.0.engine", {**MODEL, "parallel": {"tensor": 0}}, ["/parallel/tensor", "want 1"]),
        ("service.models.0.engine", MODEL, ["service.models[0].engine.runtime.device", '"cuda" or "cpu"']),
        (
            "service",
            {"deployment": "llm"},
            ["deployments/llm.yaml: applications[1].args.engine.runtime.device", '"cuda"'],
        ),
        ("service.models.0.drain_timeout_s", -1, ["/drain_timeout_s", "want 0"]),
        ("service.models.0.endpoint", "other", ["/service/models/0", "'endpoint' not allowed"]),
        ("service.models.0.replicas", 0, ["/service/models/0/replicas", "want 1"]),
        ("service.models.0.replicas", 2, ["service.models[0] has both replicas and autoscaling"]),
        ("service.models.0.autoscaling", {"min": 1}, ["/service/models/0/autoscaling", "'min' not allowed"]),
        (
            "service.models.0.autoscaling",
            {"min_replicas": 3, "max_replicas": 2},
            ["service.models[0].autoscaling.max_replicas is 2; at least its min_replicas, 3"],
        ),
        (
            "service.models",
            GPU["service"]["models"] * 2,
            ['service.models[1] is named "qwen3-0.6b", as another one; give one of them another model.name'],
        ),
        ("service.ingress", {"num_replicas": 2}, ["/service/ingress", "'num_replicas' not allowed"]),
        ("apiKeys", {"existingSecret": "keys"}, ["/apiKeys", "'existingSecret' not allowed"]),
        ("apiKeys.secretName", "My Keys", ["/apiKeys/secretName", "My Keys"]),
        ("apiKeys.secretKey", "", ["/apiKeys/secretKey"]),
        ("apiKeys.secretKey", "a/b", ["/apiKeys/secretKey", "a/b"]),
        ("apiKeys.tenantsSecretName", "My Tenants", ["/apiKeys/tenantsSecretName", "My Tenants"]),
        ("apiKeys.tenantsSecretName", "tenants", ["apiKeys.secretName is empty; it is a key that says which tenant"]),
        ("tls.secretName", "My TLS", ["/tls/secretName", "My TLS"]),
        ("tls", {"certificate": "x"}, ["/tls", "'certificate' not allowed"]),
        ("service.front", {"max_connections": 1}, ["/service/front/max_connections", "want 2"]),
        ("service.front", {"tls": {"key": "/x"}}, ["/service/front", "'tls' not allowed"]),
        (
            "service.ingress",
            {"http": {"api_keys_file": 5}},
            ["/service/ingress/http/api_keys_file", "want"],
        ),
        ("workerGroups", [], ["/workerGroups", "minItems"]),
        ("workerGroups.0.gpus", "one", ["/workerGroups/0/gpus", "want integer"]),
        ("workerGroups.0.hosts", 0, ["/workerGroups/0/hosts", "want 1"]),
        ("workerGroups.0.sharedMemory", "16 GB", ["/workerGroups/0/sharedMemory", "16 GB"]),
        ("workerGroups.0.resources", {"limits": {}}, ["/workerGroups/0/resources", "missing property 'requests'"]),
        ("workerGroups.0.minReplicas", 9, ["workerGroups[0].minReplicas is 9; at most its maxReplicas, 8"]),
        ("workerGroups.0.replicas", 9, ["workerGroups[0].replicas is 9; from its minReplicas, 1"]),
        ("workerGroups", GPU["workerGroups"] * 2, ['workerGroups[1].name is "h200", which another group has too']),
        ("workerGroups.0.minAvailable", "50%", ["/workerGroups/0/minAvailable", "want integer"]),
        ("workerGroups.0.minAvailable", 1, ["workerGroups[0].minAvailable is 1; at most 0", "minReplicas × hosts"]),
        ("podDisruptionBudget.maxUnavailable", 1, ["/podDisruptionBudget", "'maxUnavailable' not allowed"]),
        ("workerGroups.0.terminationSeconds", 5, ["/workerGroups/0/terminationSeconds", "want 10"]),
        ("workerGroups.0.podTemplate", {"containers": []}, ["/workerGroups/0/podTemplate", "'containers' not allowed"]),
        (
            "workerGroups.0.sharedMemory",
            "64Gi",
            ["workerGroups[0].sharedMemory is 64Gi; less than its resources.limits.memory, 64Gi"],
        ),
        ("head.sharedMemory", "5000M", ["head.sharedMemory is 5000M; less than its resources.limits.memory, 4Gi"]),
        (
            "service.models.0.engine",
            {**CUDA, "parallel": {"tensor": 2}},
            ["service.models[0].engine.parallel.tensor is 2; a pod of workerGroups has 1 GPUs at most"],
        ),
        (
            "service.models.0.engine",
            {**CUDA, "parallel": {"pipeline": 9}},
            ["service.models[0].engine.parallel.pipeline is 9; workerGroups have room for 8 stages of 1 GPUs"],
        ),
        (
            "service.models.0.engine",
            {**CUDA, "parallel": {"gpu_type": "L4"}},
            ["rayLabels ray.io/accelerator-type: L4 has 0 GPUs at most"],
        ),
        ("workerGroups.0.gpus", 0, ["parallel.tensor is 1; a pod of workerGroups has 0 GPUs"]),
        (
            "service.models.0.autoscaling",
            {"min_replicas": 9, "max_replicas": 9},
            ["the models want 9 GPUs at the least", "workerGroups have 8 at most"],
        ),
        ("gcsFaultTolerance", {"backend": "redis"}, ["/gcsFaultTolerance/redis/address", "minLength"]),
        ("gcsFaultTolerance", {"redis": {"address": "redis"}}, ["/gcsFaultTolerance/redis/address", "'redis'"]),
        ("service.upgrade", INCREMENTAL, ["service.upgradeOptions.gatewayClassName is empty"]),
        (
            "service",
            {**GPU["service"], "upgrade": INCREMENTAL, "upgradeOptions": {"stepSizePercent": 50, **GATEWAY}},
            ["service.upgradeOptions.stepSizePercent is 50; at most maxSurgePercent, 20"],
        ),
        ("models.volume", {"type": "image"}, ["/models/volume/image", "minLength"]),
        ("models.volume", {"type": "hostPath", "hostPath": "/m"}, ['models.volume.type is "hostPath"', "models.fetch"]),
        ("models.volume", {"type": "emptyDir"}, ["models.volume.size is empty; with emptyDir and models.fetch"]),
        ("models.volume", {"type": "pvc"}, ["models.volume.size is empty; the claim"]),
        (
            "models.volume.accessModes",
            ["ReadWriteOnce"],
            ["models.volume.accessModes is [ReadWriteOnce]; ReadWriteMany", "models.volume.claimName"],
        ),
        ("models.fetch.0", {"folder": "x", "hub": {"repository": "a/b"}}, ["/models/fetch/0/hub", "'revision'"]),
        ("models.volume.type", "nfs", ["/models/volume/type", "'hostPath'"]),
        ("models.volume", {"type": "hostPath"}, ["/models/volume/hostPath", "minLength"]),
        ("models.fetch.0", {"folder": "x"}, ["/models/fetch/0", "oneOf"]),
        ("models.fetch.0.folder", "../x", ["/models/fetch/0/folder"]),
        ("readiness", "always", ["/readiness", "'serve', 'model'"]),
        ("security.runAsUser", 0, ["/security/runAsUser", "want 1"]),
        ("env", {"RAY_AUTH_MODE": "disabled"}, ["env.RAY_AUTH_MODE is not to be set: it comes from auth.mode"]),
        ("networkPolicy.operator", [], ["/networkPolicy/operator", "minItems"]),
        ("routes.paths", [], ["/routes/paths", "minItems"]),
        ("routes.paths", ["v1"], ["/routes/paths/0", "v1"]),
        ("routes.timeoutSeconds", "1h", ["/routes/timeoutSeconds", "want integer"]),
        ("routes.timeoutSeconds", 100000, ["/routes/timeoutSeconds", "want 86,400"]),
        ("routes.maxBodyBytes", "8m", ["/routes/maxBodyBytes", "want integer"]),
        ("ingress", {"enabled": True}, ["/ingress/host", "minLength"]),
        ("httpRoute", {"enabled": True}, ["/httpRoute/parentRefs", "minItems"]),
        ("batch", {"enabled": True}, ["/batch/input", "/batch/output"]),
        ("batch", {"schedule": "every night"}, ["/batch/schedule"]),
        (
            "batch",
            {**BATCH, "workerGroups": [{**GPU["workerGroups"][0], "minAvailable": 1}]},
            ["batch.workerGroups[0].minAvailable is 1; leave it out"],
        ),
    ],
)
def test_a_wrong_value_is_named(path, value, said):
    with pytest.raises(HelmError) as caught:
        rendered.documents(with_value(path, value))
    for part in said:
        assert part in str(caught.value)
    assert rendered.documents(GPU)


def test_two_files_of_keys():
    values = with_value("service.ingress", {"http": {"api_keys_file": "/data/keys"}})
    face, _ = rendered.serve_config(values)["applications"]
    assert face["args"] == {"http": {"api_keys_file": "/data/keys"}}
    with pytest.raises(HelmError) as caught:
        rendered.documents({**values, "apiKeys": {"secretName": "llm-keys"}})
    assert 'service.ingress.http.api_keys_file is "/data/keys"' in str(caught.value)
    assert 'apiKeys.secretName is "llm-keys"' in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"service.haProxy": False}, 'tls.secretName is "llm-tls"; only HAProxy does this'),
        ({"service.haProxy": False, "tls.secretName": ""}, "service.front is for HAProxy"),
        ({"service.upgrade": INCREMENTAL, "ingress.enabled": False}, "speaks HTTP to the pods"),
        ({"service.ingress": {"http": {"tenants_file": "/data/x"}}}, 'tenants_file is "/data/x"; leave it out'),
    ],
)
def test_what_does_not_go_with_a_certificate_or_tenants(changes, said):
    values = with_value("autoscaler.enabled", True, rendered.values_of("tls"))
    values = with_value("service.upgradeOptions", GATEWAY, values)
    assert rendered.documents(values)
    for path, value in changes.items():
        values = with_value(path, value, values)
    with pytest.raises(HelmError) as caught:
        rendered.documents(values)
    assert said in str(caught.value)


@pytest.mark.parametrize("way", ["ingress", "httpRoute"])
def test_kuberay_makes_the_way_in_of_an_incremental_upgrade(way):
    values = with_value("service.upgrade", INCREMENTAL)
    values["service"]["upgradeOptions"] = GATEWAY
    assert rendered.documents(values)
    values[way] = {"enabled": True, "host": "llm.example.com"} if way == "ingress" else {}
    if way == "httpRoute":
        values[way] = {"enabled": True, "parentRefs": [{"name": "gateway"}]}
    with pytest.raises(HelmError, match=f"{way}.enabled is true; .* the Gateway demo-raylm-gateway"):
        rendered.documents(values)
    with pytest.raises(HelmError, match="autoscaler.enabled is false"):
        rendered.documents({**values, "autoscaler": {"enabled": False}})
