"""What pods are made of: placement, drains by group, and what users merge over them."""

from __future__ import annotations

import copy
import http.server
import subprocess
import threading

import pytest
from helm_python.errors import HelmError

from tests.helm import kube_schemas, rendered


def templates(values: dict[str, object]) -> dict[str, dict]:
    """The pod templates of the service's cluster by group, the head's under "head"."""
    (service,) = (one for one in rendered.documents(values) if one["kind"] == "RayService")
    kube_schemas.check(service)
    cluster = service["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **groups}


def gpu_values(**group: object) -> dict[str, object]:
    values = copy.deepcopy(rendered.values_of("gpu"))
    values["workerGroups"][0] |= group
    return values


def tolerations(template: dict, effect: str) -> dict[str, dict]:
    return {one["key"]: one for one in template["spec"]["tolerations"] if one.get("effect") == effect}


@pytest.mark.parametrize(
    ("resource", "keys"),
    [
        (None, {"nvidia.com/gpu"}),
        # Nodes with MIG's devices have the taint of all NVIDIA's.
        ("nvidia.com/mig-3g.71gb", {"nvidia.com/gpu", "nvidia.com/mig-3g.71gb"}),
        ("amd.com/gpu", {"amd.com/gpu"}),
    ],
)
def test_pods_tolerate_the_taints_of_their_devices(resource, keys):
    pods = templates(gpu_values(**({"gpuResource": resource} if resource else {})))
    assert tolerations(pods["h200"], "NoSchedule").keys() == keys
    assert not tolerations(pods["head"], "NoSchedule")


def test_the_pods_of_a_lost_node_are_replaced_soon():
    keys = {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
    for template in templates({"lostNodeSeconds": 40}).values():
        found = tolerations(template, "NoExecute")
        assert {key: one["tolerationSeconds"] for key, one in found.items()} == dict.fromkeys(keys, 40)
    own = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    found = tolerations(templates(gpu_values(tolerations=[own]))["h200"], "NoExecute")
    assert found["node.kubernetes.io/unreachable"] == own
    assert found["node.kubernetes.io/not-ready"]["tolerationSeconds"] == 30


def hook(template: dict) -> str:
    return template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]


@pytest.mark.parametrize(("seconds", "deadline"), [(25, 20), (120, 96), (600, 560)])
def test_machines_that_are_taken_away_have_a_drain_of_their_own(seconds, deadline):
    pods = templates(gpu_values(terminationSeconds=seconds))
    assert pods["h200"]["spec"]["terminationGracePeriodSeconds"] == seconds
    assert f"--deadline-remaining-seconds {deadline} && exec sleep {deadline}" in hook(pods["h200"])
    assert pods["head"] == templates(gpu_values())["head"]


class Health(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/api/healthz" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.mark.parametrize(("status", "waits"), [(200, True), (503, False), (None, False)])
@pytest.mark.parametrize("role", ["head", "cpu"])
def test_a_pod_whose_ray_does_not_answer_waits_for_nothing(role, status, waits, tmp_path):
    """So a head that hangs is back after its liveness probe has failed, not after a drain of minutes."""
    for name in ("ray", "sleep"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    with http.server.HTTPServer(("127.0.0.1", 0), type("Answer", (Health,), {"status": status})) as server:
        port = server.server_address[1]
        script = f"PATH={tmp_path}:$PATH\n" + hook(templates({})[role]).replace("52365", str(port))
        # Who answers does so at once, but for a busy machine.
        assert "timeout 5 " in script
        script = script.replace("timeout 5 ", "timeout 60 ")
        if status is None:
            server.server_close()
        else:
            threading.Thread(target=server.handle_request, daemon=True).start()
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    said = [line.split()[0] for line in done.stdout.splitlines()]
    assert said == ((["ray"] if role == "cpu" else []) + ["sleep"] if waits else [])


def test_named_values_of_a_group_are_its_pods():
    own = {"runtimeClassName": "nvidia", "schedulerName": "volcano", "priorityClassName": "high"}
    values = gpu_values(**own, labels={"team": "llm"}) | {"priorityClassName": "usual"}
    values["env"] = {"TOKEN": {"secretKeyRef": {"name": "store", "key": "token"}}}
    pods = templates(values)
    assert pods["h200"]["spec"].items() >= own.items()
    assert pods["h200"]["metadata"]["labels"].items() >= {"team": "llm", "app.kubernetes.io/name": "raylm"}.items()
    assert pods["head"]["spec"]["priorityClassName"] == "usual" and "schedulerName" not in pods["head"]["spec"]
    for template in pods.values():
        (token,) = (one for one in template["spec"]["containers"][0]["env"] if one["name"] == "TOKEN")
        assert token == {"name": "TOKEN", "valueFrom": values["env"]["TOKEN"]}


def test_queues_and_gangs_read_labels_of_the_resource():
    """Kueue's and Volcano's are on the RayService or RayJob; KubeRay hands them to the cluster."""
    values = copy.deepcopy(rendered.values_of("everything"))
    values["service"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus"}
    values["batch"]["labels"] = {"kueue.x-k8s.io/queue-name": "spare"}
    found = {
        one["kind"]: one["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") for one in rendered.documents(values)
    }
    assert (found["RayService"], found["RayJob"], found["ConfigMap"]) == ("gpus", "spare", None)


def test_a_pod_template_is_merged_over_the_pods():
    sidecar = {"name": "logs", "image": "fluent-bit", "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}
    lock = {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}, "env": [{"name": "HOME", "value": "/h"}]}
    values = gpu_values(podTemplate={"spec": {"containers": [{"name": "ray-worker", **lock}], "dnsPolicy": "Default"}})
    values["podTemplate"] = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "containers": [sidecar],
            "dnsPolicy": "None",
            "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}],
        },
    }
    before, after = templates(gpu_values()), templates(values)
    assert (after["head"]["spec"]["dnsPolicy"], after["h200"]["spec"]["dnsPolicy"]) == ("None", "Default")
    for role, template in after.items():
        first, second = template["spec"]["containers"]
        assert second == sidecar and template["metadata"]["annotations"] == {"a": "b"}
        (plain,) = before[role]["spec"]["containers"]
        assert first == plain or role == "h200"
        (tmp,) = (one for one in template["spec"]["volumes"] if one["name"] == "tmp")
        assert tmp["emptyDir"] == {"sizeLimit": "20Gi", "medium": "Memory"}
        assert len(template["spec"]["volumes"]) == len(before[role]["spec"]["volumes"])
    worker, plain = after["h200"]["spec"]["containers"][0], before["h200"]["spec"]["containers"][0]
    security = plain["securityContext"]["capabilities"] | {"add": ["IPC_LOCK"]}
    assert worker["securityContext"] == {**plain["securityContext"], "capabilities": security}
    home = [{**one, "value": "/h"} if one["name"] == "HOME" else one for one in plain["env"]]
    assert worker == {**plain, "securityContext": worker["securityContext"], "env": home}


def test_without_a_pod_template_nothing_is_merged():
    assert templates({"podTemplate": {}}) == templates({})
    with pytest.raises(HelmError, match="/podTemplate"):
        rendered.documents({"podTemplate": {"containers": []}})


# --- The head's memory outside of it

REDIS = {"address": "redis://redis:6379", "username": "ray", "secretName": "redis", "secretKey": "pass"}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, None),
        ({"backend": "redis", "redis": {"address": "redis://r:1"}}, {"redisAddress": "redis://r:1"}),
        (
            {"backend": "redis", "redis": REDIS},
            {
                "redisAddress": "redis://redis:6379",
                "redisUsername": {"value": "ray"},
                "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "pass"}}},
            },
        ),
        (
            {"backend": "rocksdb", "rocksdb": {"storageClassName": "ssd"}},
            {"backend": "rocksdb", "storage": {"size": "1Gi", "storageClassName": "ssd"}},
        ),
    ],
)
def test_where_the_heads_memory_is_kept(given, options):
    values = {"gcsFaultTolerance": given, "batch": {"enabled": True, "input": "s3://b/i", "output": "s3://b/o"}}
    clusters = [one["spec"] for one in rendered.documents(values) if one["kind"] in ("RayService", "RayJob")]
    for cluster in clusters:
        spec = cluster.get("rayClusterConfig") or cluster["rayClusterSpec"]
        assert spec.get("gcsFaultToleranceOptions") == options
        # What KubeRay sets itself, and refuses where somebody else has.
        names = {entry["name"] for entry in spec["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]}
        assert not names & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME", "RAY_gcs_storage"}
    assert templates(values) and len(clusters) == 2
