"""What controllers make of the manifests: evictions, ways in from outside, changes of a running cluster."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator

import pytest
import yaml

from raylm.config.serving import HttpConfig
from tests.helm import kube_schemas, rendered

DOCS = (rendered.ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
SETS = ["defaults", *rendered.EXAMPLES]


def of_kind(values: dict[str, object], kind: str) -> list[dict]:
    return [one for one in rendered.documents(values) if one["kind"] == kind]


def with_group(**changes: object) -> dict[str, object]:
    """The values of the GPU example, with other ones of its worker group."""
    values = copy.deepcopy(rendered.values_of("gpu"))
    values["workerGroups"][0] |= changes
    return values


# --- Evictions


def pod_labels(values: dict[str, object]) -> list[dict[str, str]]:
    """The labels of the service's pods: the chart's, and the one that KubeRay adds."""
    (service,) = of_kind(values, "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    heads = [cluster["headGroupSpec"] | {"groupName": "headgroup"}]
    groups = [*heads, *cluster["workerGroupSpecs"]]
    return [one["template"]["metadata"]["labels"] | {"ray.io/group": one["groupName"]} for one in groups]


def test_the_owner_of_pods_cannot_say_how_many_there_should_be():
    """So a budget may have no maxUnavailable and no percentage. Fails when KubeRay gives a RayCluster its scale."""
    assert list(kube_schemas.subresources("ray.io/v1", "RayCluster")) == ["status"]


@pytest.mark.parametrize("values", [*map(rendered.values_of, SETS), with_group(minReplicas=4, minAvailable=3)])
def test_budgets_are_integers_of_pods_to_leave(values):
    for budget in of_kind(values, "PodDisruptionBudget"):
        assert set(budget["spec"]) == {"minAvailable", "selector"}
        assert type(budget["spec"]["minAvailable"]) is int and budget["spec"]["minAvailable"] > 0


@pytest.mark.parametrize(
    ("values", "left"),
    [
        ({}, {"headgroup": [1]}),
        (with_group(minReplicas=4, minAvailable=3), {"headgroup": [1], "h200": [3]}),
        (with_group(minReplicas=2, hosts=2, minAvailable=3), {"headgroup": [1], "h200": [3]}),
        (with_group(minAvailable=0), {"headgroup": [1]}),
        (rendered.values_of("everything"), {"cpu": [2]}),
        ({"podDisruptionBudget": {"enabled": False}}, {}),
    ],
)
def test_a_pod_is_in_one_budget_at_most(values, left):
    found: dict[str, list[int]] = {}
    for labels in pod_labels(values):
        for budget in of_kind(values, "PodDisruptionBudget"):
            if budget["spec"]["selector"]["matchLabels"].items() <= labels.items():
                found.setdefault(labels["ray.io/group"], []).append(budget["spec"]["minAvailable"])
    assert found == left


# --- Ways in from outside

ROUTED: dict[str, object] = {
    "ingress": {"enabled": True, "host": "llm.example.com"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
}


def routed_paths(values: dict[str, object]) -> tuple[list[str], list[str]]:
    (ingress,), (route,) = of_kind(values, "Ingress"), of_kind(values, "HTTPRoute")
    paths = ingress["spec"]["rules"][0]["http"]["paths"]
    assert all(one["pathType"] == "Prefix" for one in paths)
    matches = [match for rule in route["spec"]["rules"] for match in rule["matches"]]
    assert all(match["path"]["type"] == "PathPrefix" for match in matches)
    return [one["path"] for one in paths], [match["path"]["value"] for match in matches]


def test_what_is_for_the_cluster_is_not_on_the_internet():
    for paths in routed_paths(ROUTED):
        assert paths == ["/v1", "/health", "/ready"]
    for paths in routed_paths({**ROUTED, "routes": {"paths": ["/v1"]}}):
        assert paths == ["/v1"]


def test_ways_in_wait_as_long_as_an_answer_takes_and_take_the_bodies_that_raylm_takes():
    for document in (*of_kind(ROUTED, "Ingress"), *of_kind(ROUTED, "HTTPRoute")):
        kube_schemas.check(document)
    (ingress,), (route,) = of_kind(ROUTED, "Ingress"), of_kind(ROUTED, "HTTPRoute")
    assert ingress["metadata"]["annotations"] == {
        "nginx.ingress.kubernetes.io/proxy-buffering": "off",
        "nginx.ingress.kubernetes.io/proxy-body-size": str(HttpConfig().max_body_bytes),
        "nginx.ingress.kubernetes.io/proxy-read-timeout": "3600",
        "nginx.ingress.kubernetes.io/proxy-send-timeout": "3600",
    }
    (rule,) = route["spec"]["rules"]
    assert rule["timeouts"] == {"request": "3600s", "backendRequest": "3600s"}


def test_what_ways_in_let_through_can_be_changed():
    values = rendered.values_of("everything")
    (ingress,), (route,) = of_kind(values, "Ingress"), of_kind(values, "HTTPRoute")
    nginx = "nginx.ingress.kubernetes.io"
    expected = {f"{nginx}/proxy-body-size": "33554432", f"{nginx}/proxy-read-timeout": "600"}
    assert ingress["metadata"]["annotations"].items() >= {**expected, "a": "b"}.items()
    assert route["spec"]["rules"][0]["timeouts"]["request"] == "600s"
    values["ingress"]["annotations"] = {f"{nginx}/proxy-read-timeout": "7"}
    (ingress,) = of_kind(values, "Ingress")
    assert ingress["metadata"]["annotations"][f"{nginx}/proxy-read-timeout"] == "7", "what the user says counts"


# --- Changes of a running cluster


def hashed(values: dict[str, object]) -> dict:
    """What KubeRay compares of a RayCluster to see whether it is to be a new one: all but some fields
    (GenerateHashWithoutReplicasAndWorkersToDelete at feeaf72, issue 4568)."""
    (service,) = of_kind(values, "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        for left_out in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(left_out, None)
        group["template"]["spec"].pop("tolerations", None)
    return cluster


def said_not_to_arrive() -> set[str]:
    """The values that docs/kubernetes.md lists as those which do not reach a running cluster."""
    (line,) = re.findall(r"^\*\*These do not reach a running cluster\*\*: (.+?)\.\s", DOCS, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([^`]+)`", line))


CHANGES: dict[str, Callable[[dict], object]] = {
    "workerGroups[].replicas": lambda values: values["workerGroups"][0].update(replicas=2),
    "workerGroups[].minReplicas": lambda values: values["workerGroups"][0].update(minReplicas=2),
    "workerGroups[].maxReplicas": lambda values: values["workerGroups"][0].update(maxReplicas=9),
    "workerGroups[].tolerations": lambda values: values["workerGroups"][0].update(tolerations=[{"key": "a"}]),
    "lostNodeSeconds": lambda values: values.update(lostNodeSeconds=60),
    "head.tolerations": lambda values: values.update(head={"tolerations": [{"key": "a"}]}),
    "workerGroups[].gpus": lambda values: values["workerGroups"][0].update(gpus=2),
    "workerGroups[].nodeSelector": lambda values: values["workerGroups"][0].update(nodeSelector={"a": "b"}),
    "workerGroups[].annotations": lambda values: values["workerGroups"][0].update(annotations={"a": "b"}),
    "image.tag": lambda values: values["image"].update(tag="2"),
    "env": lambda values: values.update(env={"A": "b"}),
    "autoscaler.enabled": lambda values: values.update(autoscaler={"enabled": False}),
}


@pytest.mark.parametrize("value", CHANGES)
def test_the_documentation_says_which_changes_do_not_arrive(value):
    before = rendered.values_of("gpu")
    after = copy.deepcopy(before)
    CHANGES[value](after)
    (old,), (new,) = of_kind(before, "RayService"), of_kind(after, "RayService")
    assert old != new
    assert (hashed(before) == hashed(after)) is (value in said_not_to_arrive())
    assert said_not_to_arrive() <= CHANGES.keys()


def documented_patches() -> Iterator[dict]:
    for patch in re.findall(r"--type json -p '(.+?)'", DOCS, re.DOTALL):
        yield from yaml.safe_load(patch)


def test_the_documented_patches_fit_a_cluster():
    """Each of them changes what is there (or adds tolerations), and leaves a cluster that KubeRay takes."""
    (service,) = of_kind(rendered.values_of("gpu"), "RayService")
    cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "spec": service["spec"]["rayClusterConfig"]}
    patched = set()
    for patch in documented_patches():
        *parents, last = patch["path"].strip("/").split("/")
        place = cluster
        for part in parents:
            place = place[int(part) if part.isdigit() else part]
        assert patch["op"] in ("add", "replace") and (last in place or patch["op"] == "add")
        place[last] = patch["value"]
        patched.add(last)
    # lostNodeSeconds is a toleration too.
    assert patched == {value.rpartition(".")[2] for value in said_not_to_arrive() - {"lostNodeSeconds"}}
    kube_schemas.check(cluster)


def test_the_documented_name_of_the_running_cluster_is_where_kuberay_puts_it():
    (path,) = re.findall(r"-o jsonpath='\{\.status\.(.+?)\}'", DOCS)
    place = kube_schemas.custom_schema("ray.io/v1", "RayService")["properties"]["status"]
    for part in path.split("."):
        place = place["properties"][part]
    assert place["type"] == "string"
