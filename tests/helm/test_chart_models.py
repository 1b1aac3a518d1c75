"""How models come into pods: once, complete, and never changed under those who run them."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path

import pytest

from tests.helm import kube_schemas, rendered

HUB = {"folder": "qwen", "hub": {"repository": "Qwen/Qwen3-0.6B", "revision": "v1"}}
STORE = {"folder": "llama", "objectStore": {"url": "s3://bucket/llama", "endpoint": "https://store.example.com"}}


def values_with(*fetch: dict[str, object], **volume: object) -> dict[str, object]:
    return {"models": {"volume": {"size": "10Gi", **volume}, "fetch": list(fetch)}}


def pods(values: dict[str, object]) -> tuple[dict, dict]:
    """The specifications of the head's and of a worker's pod."""
    (service,) = (one for one in rendered.documents(values) if one["kind"] == "RayService")
    kube_schemas.check(service)
    cluster = service["spec"]["rayClusterConfig"]
    return cluster["headGroupSpec"]["template"]["spec"], cluster["workerGroupSpecs"][0]["template"]["spec"]


def jobs(values: dict[str, object]) -> list[dict]:
    return [one for one in rendered.documents(values) if one["kind"] == "Job"]


def test_every_worker_fetches_its_own_files():
    _, worker = pods(rendered.values_of("everything"))
    store, hub = worker["initContainers"]
    assert store["command"][3:] == [
        *("fetch", "/models/llama", "s3://bucket/llama https://store.example.com"),
        *("aws", "--endpoint-url", "https://store.example.com", "s3", "sync", "--no-progress"),
        *("s3://bucket/llama", "/models/llama"),
    ]
    assert store["envFrom"] == [{"secretRef": {"name": "store-keys"}}]
    assert hub["command"][3:] == [
        *("fetch", "/models/qwen", "Qwen/Qwen3-0.6B@v1"),
        *("hf", "download", "Qwen/Qwen3-0.6B", "--revision", "v1", "--local-dir", "/models/qwen"),
    ]
    token = next(entry for entry in hub["env"] if entry["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hub-token", "key": "HF_TOKEN"}
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in worker["containers"][0]["volumeMounts"]
    # Kubernetes places it where there is room for them.
    assert worker["containers"][0]["resources"]["requests"]["ephemeral-storage"] == "200Gi"
    assert not jobs(rendered.values_of("everything"))


def test_the_head_fetches_no_weights():
    head, worker = pods(values_with(HUB, STORE))
    for ours, theirs in zip(head["initContainers"], worker["initContainers"], strict=True):
        options = ours["command"][len(theirs["command"]) :]
        assert options[::2] == ["--exclude"] * (len(options) // 2)
        assert "*.safetensors" in options and "*.gguf" not in options, "a .gguf file holds the tokenizer too"
        assert ours["command"][5] == f"{theirs['command'][5]} without weights"
    assert "ephemeral-storage" not in head["containers"][0]["resources"]["requests"]


def test_one_job_fetches_into_a_claim_and_pods_wait_for_it():
    values = values_with(HUB, STORE, type="pvc")
    (job,) = jobs(values)
    kube_schemas.check(job)
    pod = job["spec"]["template"]["spec"]
    assert [one["command"][4:6] for one in pod["initContainers"]] == [
        ["/models/qwen", "Qwen/Qwen3-0.6B@v1"],
        ["/models/llama", "s3://bucket/llama https://store.example.com"],
    ]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "demo-raylm-models"}} in pod["volumes"]
    for one in pods(values):
        (wait,) = one["initContainers"]
        assert wait["command"][4:] == [word for entry in pod["initContainers"] for word in entry["command"][4:6]]
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in wait["volumeMounts"]


def test_other_models_are_another_job():
    """Kubernetes changes no Job's pods."""
    other = copy.deepcopy(HUB)
    other["hub"]["revision"] = "v2"
    names = {jobs(values_with(one, type="pvc"))[0]["metadata"]["name"] for one in (HUB, HUB, other, STORE)}
    assert len(names) == 3 and all(len(name) <= 63 for name in names)


def test_files_that_are_there_are_not_fetched():
    for volume in ({"type": "pvc", "claimName": "mine"}, {"type": "hostPath", "hostPath": "/m"}):
        values = {"models": {"volume": volume}}
        assert not jobs(values) and all("initContainers" not in one for one in pods(values))


def test_an_image_can_hold_the_models():
    head, worker = pods({"models": {"volume": {"type": "image", "image": "registry.example.com/models:1"}}})
    source = {"image": {"reference": "registry.example.com/models:1", "pullPolicy": "IfNotPresent"}}
    assert {"name": "models", **source} in head["volumes"] and {"name": "models", **source} in worker["volumes"]


@pytest.fixture
def fetch(tmp_path: Path):
    """Runs the fetching container's program in a folder, with something else in place of the download."""
    _, worker = pods(values_with(HUB))
    shell, option, script, *_ = worker["initContainers"][0]["command"]

    def run(source: str, *download: str) -> subprocess.CompletedProcess[str]:
        words = [shell, option, script, "fetch", str(tmp_path), source, *download]
        return subprocess.run(words, capture_output=True, text=True, timeout=60)

    return run


def test_a_folder_that_is_complete_is_left_alone(fetch, tmp_path):
    weights = tmp_path / "weights"
    assert fetch("a@1", "false").returncode != 0 and not (tmp_path / ".fetched").exists()
    assert fetch("a@1", "touch", str(weights)).returncode == 0
    assert (tmp_path / ".fetched").read_text(encoding="utf-8") == "a@1"
    assert fetch("a@1", "false").returncode == 0, "what is complete is not asked for again"
    other = fetch("a@2", "rm", str(weights))
    assert other.returncode == 1 and weights.exists(), "replicas may run from it"
    assert "holds a@1; give a@2 a folder of its own in models.fetch" in other.stderr


def test_pods_wait_until_all_folders_are_complete(tmp_path):
    head, _ = pods(values_with(HUB, STORE, type="pvc"))
    shell, option, script, *_ = head["initContainers"][0]["command"]
    for name in ("qwen", "llama"):
        (tmp_path / name).mkdir()
    words = [shell, option, script, "wait", str(tmp_path / "qwen"), "a@1", str(tmp_path / "llama"), "b"]
    (tmp_path / "qwen" / ".fetched").write_text("a@1", encoding="utf-8")
    # The script's own sleep between two looks, a shorter one.
    (sleep := tmp_path / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.1\n", encoding="utf-8")
    sleep.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == f"waiting for the Job that fetches b into {tmp_path / 'llama'}\n"
        (tmp_path / "llama" / ".fetched").write_text("b", encoding="utf-8")
        assert waiting.wait(60) == 0
