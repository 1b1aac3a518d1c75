"""Where Serve is told to put ingresses."""

from __future__ import annotations

import pytest

from raylm.config.application import load_ingress
from raylm.errors import ConfigError
from raylm.serving.app import ingress_application


def test_ingresses_can_be_kept_to_nodes():
    placement = {"labels": {"pool": "cpu"}, "resources": {"ingress": 0.1}, "max_replicas_per_node": 2, "num_cpus": 1}
    application = ingress_application(load_ingress({"placement": placement}, source="test"))
    deployment = application._bound_deployment
    assert deployment.ray_actor_options == {
        "num_cpus": 1,
        "resources": {"ingress": 0.1},
        "label_selector": {"pool": "cpu"},
    }
    assert deployment._replica_config.max_replicas_per_node == 2


@pytest.mark.parametrize("wrong", [{"resources": {"x": 0}}, {"max_replicas_per_node": 0}, {"label": {"a": "b"}}])
def test_a_wrong_place_is_named(wrong):
    (key,) = wrong
    with pytest.raises(ConfigError, match=f"placement.{key}"):
        load_ingress({"placement": wrong}, source="test")
