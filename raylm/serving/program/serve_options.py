"""The `deployments` of raylm's applications in a Serve config file: Serve's options, with which a change restarts
nothing else."""

from __future__ import annotations

from typing import Any

from raylm.config.application import QueuePolicyConfig
from raylm.config.base import parse, parse_foreign
from raylm.errors import ConfigError
from raylm.serving.autoscaling import POLICY_PATH


def check_deployments(application: dict[str, Any], name: str, *, source: str) -> None:
    """Check the options of an application whose one deployment is called `name`. Raises ConfigError."""
    for index, options in enumerate(application.get("deployments") or []):
        place = f"{source}: deployments.{index}"
        if options["name"] != name:
            raise ConfigError(f"{place}.name is {options['name']!r}; the application's one deployment is {name!r}")
        if options.get("num_replicas") == "auto":
            raise ConfigError(
                f"{place}.num_replicas is 'auto', with which Serve counts requests that do not pass through it; "
                "write a number, or an autoscaling_config"
            )
        if (autoscaling := options.get("autoscaling_config")) is not None:
            _check_autoscaling(autoscaling, name, source=place)


def _check_autoscaling(config: dict[str, Any], name: str, *, source: str) -> None:
    from ray.serve.config import AutoscalingConfig

    place = f"{source}.autoscaling_config"
    if name == "ModelReplica":
        policy = config.get("policy") or {}
        if policy.get("policy_function") != POLICY_PATH:
            raise ConfigError(
                f"{place}.policy.policy_function is {policy.get('policy_function')!r}; a model scales by the requests "
                f"that wait in its engines: policy: {{policy_function: {POLICY_PATH!r}, policy_kwargs: {{"
                "target_queued_requests: 4}}"
            )
        if config.get("min_replicas") == 0 and not config.get("initial_replicas"):
            raise ConfigError(
                f"{place}.min_replicas is 0, and initial_replicas {config.get('initial_replicas')}; write "
                "initial_replicas: 1, so that the model starts once: only then is it known what it takes, and a model "
                "that cannot start is not found out by the first request"
            )
        parse(QueuePolicyConfig, policy.get("policy_kwargs") or {}, source=f"{place}.policy.policy_kwargs")
    parse_foreign(AutoscalingConfig, config, source=place)
