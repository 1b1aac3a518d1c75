"""What the chart says beside pods: batch jobs, models, metrics."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from raylm.config.application import load_ingress
from tests.helm import rendered


def document(name: str, kind: str) -> dict:
    return next(one for one in rendered.documents(rendered.values_of(name)) if one["kind"] == kind)


def test_a_batch_is_a_job_that_survives_its_clusters():
    spec = document("batch", "RayJob")["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:3] == ["python", "-m", "raylm.batch"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options == {
        "--input": "s3://bucket/in.jsonl",
        "--output": "s3://bucket/out.jsonl",
        "--model": "/models/qwen3-0.6b",
    }
    assert spec["backoffLimit"] == 2 and spec["shutdownAfterJobFinishes"] and spec["submissionMode"] == "HTTPMode"


def test_a_nightly_batch_has_a_schedule_and_workers_of_its_own():
    spec = document("nightly", "RayCronJob")["spec"]
    assert (spec["schedule"], spec["timeZone"]) == ("0 2 * * *", "Europe/Zurich")
    job = spec["jobTemplate"]
    # A quote in a name is no end of a word.
    assert "/data/today's requests.jsonl" in shlex.split(job["entrypoint"])
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    assert (workers["groupName"], workers["replicas"], workers["maxReplicas"]) == ("batch", 2, 4)


def test_long_times_are_numbers_and_options_follow():
    spec = document("everything", "RayJob")["spec"]
    assert (spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (2592000, 604800)
    assert spec["suspend"] is True and shlex.split(spec["entrypoint"])[-1] == "--no-keep-order"


def test_the_batch_program_has_the_options_of_the_entrypoint():
    words = shlex.split(document("batch", "RayJob")["spec"]["entrypoint"])
    help_text = subprocess.run([sys.executable, *words[1:3], "--help"], capture_output=True, text=True, check=True)
    assert all(word in help_text.stdout for word in words if word.startswith("--"))


def test_a_group_of_hosts_is_one_replica():
    (group,) = document("multi-host", "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (group["numOfHosts"], group["replicas"], group["maxReplicas"]) == (2, 1, 2)
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 8 and limits["rdma/ib"] == 8
    assert group["labels"] == {"ray.io/accelerator-type": "H200"}


def pods_of(values: dict[str, object]) -> dict[str, list[dict]]:
    """The specifications of all pods with Ray, by the kind of what makes them."""
    found = {}
    for one in rendered.documents(values):
        if one["kind"] in ("RayService", "RayJob"):
            cluster = one["spec"].get("rayClusterConfig") or one["spec"]["rayClusterSpec"]
            groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
            found[one["kind"]] = [group["template"]["spec"] for group in groups]
    return found


def test_api_keys_come_from_a_secret_into_every_pod_that_may_hold_an_ingress():
    values = rendered.values_of("everything")
    pods = pods_of(values)
    assert len(pods["RayService"]) == 1 + len(values["workerGroups"])
    face, *_ = rendered.serve_config(values)["applications"]
    path = Path(face["args"]["http"]["api_keys_file"])
    # What else the ingress was told is still there.
    assert face["args"]["http"]["max_body_bytes"] == 33554432
    for pod in pods["RayService"]:
        (volume,) = (one for one in pod["volumes"] if one["name"] == "api-keys")
        assert volume["secret"] == {"secretName": "llm-keys", "items": [{"key": "keys.txt", "path": path.name}]}
        (mount,) = (one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "api-keys")
        # With a subPath it would never change.
        assert mount == {"name": "api-keys", "mountPath": str(path.parent), "readOnly": True}
    assert pods["RayJob"] and "api-keys" not in str(pods["RayJob"]), "a batch answers nobody"


@pytest.mark.parametrize("deployment", ["llm", "multi-model"])
def test_every_deployment_can_have_keys(deployment):
    values = {"service": {"deployment": deployment}, "apiKeys": {"secretName": "llm-keys"}}
    face, *models = rendered.serve_config(values)["applications"]
    assert load_ingress(face["args"], source=deployment).http.api_keys_file == "/etc/raylm/api-keys"
    assert models and all("http" not in model["args"] for model in models)
    (volume,) = (one for one in pods_of(values)["RayService"][0]["volumes"] if one["name"] == "api-keys")
    assert volume["secret"]["items"] == [{"key": "api-keys", "path": "api-keys"}]


def test_without_a_secret_there_are_no_keys():
    assert "api-keys" not in rendered.text({}) and "api_keys_file" not in rendered.text({})
    assert "Bearer" not in notes({})
    assert "/v1/models -H 'authorization: Bearer KEY'" in notes({"apiKeys": {"secretName": "llm-keys"}})


def notes(values: dict[str, object]) -> str:
    files = rendered.chart().render(values=values, name="demo", namespace="llm")
    return files["raylm/templates/NOTES.txt"]


def test_hub_downloads_are_what_the_installed_program_takes():
    program = Path(sys.executable).with_name("hf")
    answer = subprocess.run([program, "download", "--help"], capture_output=True, text=True, check=True)
    assert "--revision" in answer.stdout and "--local-dir" in answer.stdout


@pytest.mark.parametrize(("volume", "source"), [
    ({"type": "hostPath", "hostPath": "/m"}, {"hostPath": {"path": "/m", "type": "Directory"}}),
    ({"type": "pvc", "claimName": "mine"}, {"persistentVolumeClaim": {"claimName": "mine"}}),
    ({"type": "pvc", "size": "1Ti"}, {"persistentVolumeClaim": {"claimName": "demo-raylm-models"}}),
    ({"size": "9Gi"}, {"emptyDir": {"sizeLimit": "9Gi"}}),
])  # fmt: skip
def test_where_models_lie(volume, source):
    documents = rendered.documents({"models": {"volume": volume}})
    service = next(one for one in documents if one["kind"] == "RayService")
    pod = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    assert {"name": "models", **source} in pod["volumes"]
    made = [one["metadata"]["name"] for one in documents if one["kind"] == "PersistentVolumeClaim"]
    assert made == (["demo-raylm-models"] if volume.get("size") == "1Ti" else [])


@pytest.mark.parametrize(("choice", "path"), [("serve", "/-/healthz"), ("model", "/ready")])
def test_what_makes_a_worker_ready(choice, path):
    service = next(one for one in rendered.documents({"readiness": choice}) if one["kind"] == "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    worker = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert worker["readinessProbe"]["httpGet"] == {"path": path, "port": "serve"}
    # KubeRay submits the application to a ready head: the head cannot wait for it.
    assert head["readinessProbe"]["httpGet"]["path"] == "/api/healthz"


def test_routes_lead_to_the_service_that_kuberay_makes():
    rule = document("everything", "Ingress")["spec"]["rules"][0]["http"]["paths"][0]
    assert rule["backend"]["service"] == {"name": "chat-serve-svc", "port": {"number": 9000}}
    assert document("everything", "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0] == {
        "name": "chat-serve-svc",
        "port": 9000,
    }
