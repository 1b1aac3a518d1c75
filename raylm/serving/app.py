"""From the `args` of a Serve config file to Serve applications: the HTTP face, and one a model.

Ingresses and models find each other through the Directory, not by Serve handles: so Serve takes them for applications
that have nothing to do with each other, and a change of one restarts no other.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve._private.constants import (
    RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S,
    RAY_SERVE_ENABLE_DIRECT_INGRESS,
)

from raylm.config.application import IngressConfig, ModelDeployment, load_ingress, load_model
from raylm.config.base import load_yaml
from raylm.config.tenants import TenantsConfig
from raylm.executor.cluster import plan_worker, wait_for_room
from raylm.executor.placement import REPLICA_CPUS
from raylm.model_files.deployed import pinned
from raylm.model_files.source import locate
from raylm.serving.identity.keys import read_keys
from raylm.serving.ingress import OpenAIIngress
from raylm.serving.observing.observers import check_tracing
from raylm.serving.replica import ModelReplica

_MAX_ONGOING_REQUESTS = 100_000
"""The queue is the engine's: it knows what waiting costs, and refuses with a reason."""
_HEALTH_CHECK_PERIOD_S = 1.0
_INGRESS_CHECK_S = 2.0
_MODEL_CHECK_S = 5.0
"""Serve replaces a replica whose check has failed, or not answered for so long, three times in a row. To replace a
model costs more than to wait."""
_AFTER_DRAIN_S = 30.0
"""What Serve waits for longer than the drain: an engine stops its workers in it."""


def build_ingress(args: dict[str, Any]) -> Application:
    """The application for `import_path: raylm.serving.app:build_ingress`. Raises ConfigError before anything starts."""
    return ingress_application(load_ingress(args, source="args of the ingress application"))


def build_model(args: dict[str, Any]) -> Application:
    """The application for `import_path: raylm.serving.app:build_model`. Raises ConfigError before anything starts."""
    return model_application(load_model(args, source="args of the model's application"))


def ingress_application(config: IngressConfig) -> Application:
    """The HTTP face of one endpoint."""
    if (keys := config.http.api_keys_file) is not None:
        read_keys(keys)
    if (tenants := config.http.tenants_file) is not None:
        load_yaml(TenantsConfig, tenants)
    check_tracing(config.tracing)
    if config.responses.enabled:
        # An unreadable url_file is told before anything starts.
        config.responses.database_url()
    for server in config.mcp.servers.values():
        server.headers()
    deployment = serve.deployment(serve.ingress()(OpenAIIngress)).options(
        name="OpenAIIngress",
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        ray_actor_options={
            "num_cpus": config.placement.num_cpus,
            "resources": config.placement.resources,
            "label_selector": config.placement.labels or None,
        },
        max_replicas_per_node=config.placement.max_replicas_per_node,
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=_INGRESS_CHECK_S,
        graceful_shutdown_timeout_s=_stop_seconds(config.drain_timeout_s),
        logging_config={"enable_access_log": False},
    )
    return deployment.bind(config)


def model_application(config: ModelDeployment) -> Application:
    """One model: replicas, each with an engine. Waits until the cluster has room for one."""
    locate(config.engine.model.reference)
    config = config.model_copy(update={"engine": pinned(config.engine)})
    worker = plan_worker(config.engine)
    bundles, strategy, labels = wait_for_room(config.engine, worker)
    deployment = serve.deployment(ModelReplica).options(
        placement_group_bundles=bundles,
        placement_group_strategy=strategy,
        placement_group_bundle_label_selector=labels,
        **deployment_options(config),
    )
    return deployment.bind(config, worker, channel_host(config.channel_host))


def deployment_options(config: ModelDeployment) -> dict[str, Any]:
    """Serve's options of a model's replicas, but where they are placed."""
    return {
        "name": "ModelReplica",
        "ray_actor_options": {"num_cpus": REPLICA_CPUS},
        "max_ongoing_requests": _MAX_ONGOING_REQUESTS,
        "health_check_period_s": _HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": _MODEL_CHECK_S,
        "graceful_shutdown_timeout_s": _stop_seconds(config.drain_timeout_s),
    }


def channel_host(choice: str) -> str:
    """The address engines listen on, or "node" for each one's own."""
    if choice != "auto":
        return choice
    return "loopback" if sum(node["Alive"] for node in ray.nodes()) <= 1 else "node"


def _stop_seconds(drain_timeout_s: float) -> float:
    """What Serve gives a replica from the moment it is asked to stop. Behind HAProxy every application's first
    deployment waits for load balancers to let go of it, models too, before its own drain begins."""
    before = RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S if RAY_SERVE_ENABLE_DIRECT_INGRESS else 0.0
    return before + drain_timeout_s + _AFTER_DRAIN_S
