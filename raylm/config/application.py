"""The `args` of a Serve config file's applications: the HTTP face, and one application a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from raylm.config.base import FrozenConfig, parse
from raylm.config.engine import EngineConfig
from raylm.config.files import find_config, read_config
from raylm.config.mcp import McpConfig
from raylm.config.metrics import MetricsConfig
from raylm.config.observing import LogConfig, TracingConfig
from raylm.config.responses import ResponsesConfig
from raylm.config.routing import RoutingConfig
from raylm.config.serving import HttpConfig

Endpoint = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")]


class IngressPlacement(FrozenConfig):
    """Where Serve puts ingress replicas."""

    num_cpus: float = Field(default=0.1, ge=0)
    """CPUs that Ray sets aside for one."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Custom resources of a node, such as {"ingress": 0.1}: only nodes that have them take ingresses."""
    labels: dict[str, str] = {}
    """Labels that its node must have, as Ray's label selectors say it: {"pool": "cpu"}, {"pool": "!in(gpu)"}."""
    max_replicas_per_node: int | None = Field(default=None, ge=1, le=100)
    """So that one node's end takes no more of them."""


class IngressConfig(FrozenConfig):
    """The HTTP face (`build_ingress`): it serves every model of its endpoint."""

    endpoint: Endpoint = "default"
    """An ingress and the models of the same endpoint find each other; a cluster may have several endpoints."""
    http: HttpConfig = HttpConfig()
    placement: IngressPlacement = IngressPlacement()
    responses: ResponsesConfig = ResponsesConfig()
    mcp: McpConfig = McpConfig()
    routing: RoutingConfig = RoutingConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    drain_timeout_s: float = Field(default=60.0, ge=0)
    """An ingress that is going lets its requests end for this many seconds, then ends them with an error."""


class ModelDeployment(FrozenConfig):
    """One model (`build_model`)."""

    engine: EngineConfig
    """In YAML: the name of an engine configuration file, or its content in place."""
    endpoint: Endpoint = "default"
    """The endpoint that serves the model. Names of its models differ."""
    drain_timeout_s: float = Field(default=60.0, ge=0)
    """A replica that is going lets its requests end for this many seconds, then ends them with an error."""
    channel_host: Literal["auto", "loopback", "node"] = "auto"
    """Where engines listen for ingresses: loopback keeps everything on one node; node is the node's own address;
    auto takes loopback while the cluster has one node."""


class QueuePolicyConfig(FrozenConfig):
    """`autoscaling_config.policy.policy_kwargs` of a ModelReplica: what adds replicas. One goes again when nobody waits
    and one fewer would be half full at most."""

    target_queued_requests: float = Field(default=4.0, gt=0)
    """Waiting requests a replica; more than this on average adds replicas."""
    target_queued_tokens: float | None = Field(default=None, gt=0)
    """Prompt tokens that wait, a replica; more than this on average adds replicas. By default nobody looks at them."""
    target_queue_s: float | None = Field(default=None, gt=0)
    """Seconds in the queue that a newcomer may expect, the part of its time to first token that replicas shorten; more
    than this on average adds replicas. By default it is not looked at."""
    max_kv_usage: float = Field(default=0.95, gt=0, le=1)
    """Share of the KV cache in use; more than this on average, while requests wait, adds a replica."""


class IngressPolicyConfig(FrozenConfig):
    """`autoscaling_config.policy.policy_kwargs` of an OpenAIIngress."""

    target_open_requests: float = Field(default=256.0, gt=0)
    """Open requests an ingress; more than this on average adds ingresses."""
    max_busy: float = Field(default=0.7, gt=0, le=1)
    """Share of the time that an ingress's event loop is busy; more than this on average adds ingresses."""


def load_ingress(args: Mapping[str, object], *, source: str) -> IngressConfig:
    """Check the `args` of an ingress application. Raises ConfigError."""
    return parse(IngressConfig, dict(args), source=source)


def load_model(args: Mapping[str, object], *, source: str) -> ModelDeployment:
    """Check the `args` of a model's application, reading the engine file that it names. Raises ConfigError."""
    data = dict(args)
    if isinstance(name := data.get("engine"), str):
        # Parsed on its own, so that errors name that file.
        path = find_config(name)
        data["engine"] = parse(EngineConfig, read_config(path), source=str(path))
    return parse(ModelDeployment, data, source=source)
