"""KubeRay's incremental upgrade (a second cluster, traffic moved in steps): the chart's values and KubeRay's limits.

The names, types and required keys are in the custom resource definition. The limits are not: KubeRay's controller
checks them (ValidateClusterUpgradeOptions) and says so in the RayService's events, long after `helm upgrade` has
returned. So the chart has to refuse what the controller would."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
from helm_python.errors import HelmError

from tests.helm import kube_schemas, rendered

INCREMENTAL = "NewClusterWithIncrementalUpgrade"


class Field(NamedTuple):
    """A key of clusterUpgradeOptions; `lowest` and `highest` as the controller has them, None where it has no limit."""

    kind: str
    is_required: bool
    lowest: int | None = None
    highest: int | None = None


KUBERAY = {
    "gatewayClassName": Field("string", is_required=True),
    "stepSizePercent": Field("integer", is_required=True, lowest=0, highest=100),
    "intervalSeconds": Field("integer", is_required=True, lowest=1, highest=2**31 - 1),
    "maxSurgePercent": Field("integer", is_required=False, lowest=0, highest=100),
}


def upgrading(**options: object) -> dict[str, object]:
    """The values of the GPU example with an incremental upgrade of these options."""
    values = copy.deepcopy(rendered.values_of("gpu"))
    values["service"] |= {"upgrade": INCREMENTAL, "upgradeOptions": {"gatewayClassName": "istio", **options}}
    return values


def strategy(values: dict[str, object]) -> dict:
    (service,) = (one for one in rendered.documents(values) if one["kind"] == "RayService")
    kube_schemas.check(service)
    return service["spec"]["upgradeStrategy"]


def test_the_options_are_those_of_the_custom_resource():
    spec = kube_schemas.custom_schema("ray.io/v1", "RayService")["properties"]["spec"]["properties"]
    options = spec["upgradeStrategy"]["properties"]["clusterUpgradeOptions"]
    found = {
        name: (schema["type"], name in options["required"], schema.get("format"))
        for name, schema in options["properties"].items()
    }
    assert found == {
        name: (field.kind, field.is_required, "int32" if field.kind == "integer" else None)
        for name, field in KUBERAY.items()
    }


@pytest.mark.parametrize("upgrade", ["NewCluster", "None"])
def test_other_upgrades_have_no_options(upgrade):
    values = upgrading()
    values["service"]["upgrade"] = upgrade
    assert strategy(values) == {"type": upgrade}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stepSizePercent": 1, "maxSurgePercent": 1, "intervalSeconds": 1},
        {"stepSizePercent": 100, "maxSurgePercent": 100, "intervalSeconds": 86_400},
        {"stepSizePercent": 5, "maxSurgePercent": 50},
    ],
)
def test_what_the_chart_lets_through_kuberay_takes(options):
    made = strategy(upgrading(**options))
    assert made["type"] == INCREMENTAL
    written = made["clusterUpgradeOptions"]
    assert written.keys() == KUBERAY.keys() and written.items() >= options.items()
    for name, field in KUBERAY.items():
        if field.kind == "integer":
            assert type(written[name]) is int and field.lowest <= written[name] <= field.highest
    assert written["stepSizePercent"] <= written["maxSurgePercent"]


REFUSED: list[tuple[str, object]] = [
    ("gatewayClassName", ""),
    ("intervalSeconds", 86_401),
    ("no such key", 1),
    # A step of nothing is within KubeRay's limits, and an upgrade that never ends.
    ("stepSizePercent", 0),
]
for _name, _field in KUBERAY.items():
    # With null Helm takes the chart's own value away.
    REFUSED += [(_name, None), (_name, 1.5)]
    if _field.lowest is not None:
        REFUSED += [(_name, _field.lowest - 1), (_name, _field.highest + 1), (_name, "10")]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_kuberay_refuses_the_chart_names(name, value):
    with pytest.raises(HelmError, match="upgradeOptions") as caught:
        rendered.documents(upgrading(**{name: value}))
    assert name in str(caught.value)
