"""build_app: from the `args` of a Serve config file to a Serve application."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve import Application

from raylm.config.application import AppConfig, ModelDeployment, load_app
from raylm.config.resolve import resolve
from raylm.config.source import locate
from raylm.executor.cluster import plan_worker, wait_for_room
from raylm.executor.placement import REPLICA_CPUS, worker_device
from raylm.serving.autoscaling import serve_autoscaling
from raylm.serving.ingress import OpenAIIngress
from raylm.serving.keys import read_keys
from raylm.serving.replica import ModelReplica

INGRESS_CPUS = 0.1
_MAX_ONGOING_REQUESTS = 100_000
"""The queue is the engine's: it knows what waiting costs, and refuses with a reason."""
_HEALTH_CHECK_PERIOD_S = 1.0
"""Serve replaces a replica whose check has failed three times in a row."""
_AFTER_DRAIN_S = 30.0
"""What Serve waits for longer than the drain: an engine stops its workers in it."""


def build_app(args: dict[str, Any]) -> Application:
    """The application for `import_path: raylm.serving.app:build_app`. Raises ConfigError before anything starts."""
    return assemble(load_app(args, source="args of the Serve application"))


def assemble(config: AppConfig) -> Application:
    """Bind one ingress deployment to one deployment a model."""
    for model in config.models:
        locate(model.engine.model.path)
    if (keys := config.ingress.http.api_keys_file) is not None:
        read_keys(keys)
    directory = "+".join(model.engine.model.served_name for model in config.models)
    host = channel_host(config.channel_host)
    models = [_bind_model(model, host, directory) for model in config.models]
    ingress = serve.deployment(serve.ingress()(OpenAIIngress)).options(
        name="OpenAIIngress",
        num_replicas=config.ingress.num_replicas,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        # An ingress that goes holds streams of engines that stay: it gets the time that a draining engine has.
        graceful_shutdown_timeout_s=max(model.drain_timeout_s for model in config.models) + _AFTER_DRAIN_S,
        logging_config={"enable_access_log": False},
    )
    return ingress.bind(config, directory, models)


def channel_host(choice: str) -> str:
    """The address engines listen on, or "node" for each one's own."""
    if choice != "auto":
        return choice
    return "loopback" if sum(node["Alive"] for node in ray.nodes()) <= 1 else "node"


def _bind_model(model: ModelDeployment, host: str, directory: str) -> Application:
    worker = plan_worker(model.engine)
    bundles, strategy, labels = wait_for_room(model.engine, worker)
    capacity = resolve(model.engine, worker_device(worker)).scheduler.max_num_seqs
    deployment = serve.deployment(ModelReplica).options(
        name=f"ModelReplica:{model.engine.model.served_name}",
        autoscaling_config=serve_autoscaling(model.autoscaling, capacity=capacity),
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        placement_group_bundles=bundles,
        placement_group_strategy=strategy,
        placement_group_bundle_label_selector=labels,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=model.drain_timeout_s + _AFTER_DRAIN_S,
    )
    return deployment.bind(model, worker, host, directory)
