"""AppConfig: the Serve application, as the `args` of deployments/*.yaml give it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from raylm.config.base import FrozenConfig, parse
from raylm.config.engine import EngineConfig
from raylm.config.files import find_config, read_config
from raylm.config.serving import HttpConfig


class AutoscalingConfig(FrozenConfig):
    """How many replicas a model has. Equal bounds fix the number."""

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    target_queued_requests: float = Field(default=4.0, gt=0)
    """Waiting requests a replica; more than this on average adds replicas."""
    upscale_delay_s: float = Field(default=5.0, ge=0)
    downscale_delay_s: float = Field(default=120.0, ge=0)

    @model_validator(mode="after")
    def _bounds_in_order(self) -> AutoscalingConfig:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) must be at least min_replicas ({self.min_replicas})")
        return self


class ModelDeployment(FrozenConfig):
    """One model of the application."""

    engine: EngineConfig
    """In YAML: the name of an engine configuration file, or its content in place."""
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    drain_timeout_s: float = Field(default=60.0, ge=0)
    """A replica that is going finishes its requests for this long, then ends them."""


class IngressConfig(FrozenConfig):
    """The HTTP face."""

    num_replicas: int = Field(default=1, ge=1)
    http: HttpConfig = HttpConfig()


class AppConfig(FrozenConfig):
    """Models behind one OpenAI endpoint."""

    models: list[ModelDeployment] = Field(min_length=1)
    ingress: IngressConfig = IngressConfig()
    channel_host: Literal["auto", "loopback", "node"] = "auto"
    """Where engines listen for ingresses: loopback keeps everything on one node; node is the node's own address;
    auto takes loopback while the cluster has one node."""

    @model_validator(mode="after")
    def _names_differ(self) -> AppConfig:
        names = [model.engine.model.served_name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are named {name!r}; give one of them another model.name")
        return self


def load_app(args: Mapping[str, object], *, source: str) -> AppConfig:
    """Check the `args` of a Serve application, reading the engine files that they name. Raises ConfigError."""
    data = dict(args)
    models = data.get("models")
    if isinstance(models, list):
        data["models"] = [_with_engine(model) for model in models]
    return parse(AppConfig, data, source=source)


def _with_engine(model: object) -> object:
    """Replace the name of an engine file by its checked content, so that errors name that file."""
    if not isinstance(model, dict) or not isinstance(model.get("engine"), str):
        return model
    path = find_config(model["engine"])
    return {**model, "engine": parse(EngineConfig, read_config(path), source=str(path))}
