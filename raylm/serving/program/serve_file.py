"""The Serve config file's content for whatever `raylm serve` is given, checked.

Serve itself ignores keys that it does not know, and finds out only in its cluster what cannot be imported.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any, NamedTuple

from raylm.config.application import IngressConfig, ModelDeployment, load_ingress, load_model
from raylm.config.base import load_yaml, parse, parse_foreign
from raylm.config.engine import EngineConfig
from raylm.config.engine_keys import Sections, overridden
from raylm.config.files import INGRESS_PATH, MODEL_PATH, read_config
from raylm.config.tenants import TenantsConfig
from raylm.errors import ConfigError
from raylm.models.check import check_model
from raylm.serving.identity.keys import read_keys
from raylm.serving.program.serve_options import check_deployments
from raylm.text.chat_settings import ChatSettings

_OF_SERVE = {"applications", "http_options", "grpc_options", "proxy_location"}
_OLD_PATH = "raylm.serving.app:build_app"


def is_serve_file(data: object) -> bool:
    """Whether the content of a file is meant for Serve, rather than as an engine's configuration."""
    if not isinstance(data, dict) or "model" in data and "applications" not in data:
        return False
    return bool(_OF_SERVE & data.keys() or difflib.get_close_matches("applications", map(str, data)))


class HttpGiven(NamedTuple):
    """What the command line says of HttpConfig; None: nothing."""

    api_keys_file: str | None = None
    tenants_file: str | None = None
    root_path: str | None = None


NOTHING_GIVEN = HttpGiven()


def serve_config(
    target: str,
    *,
    host: str | None,
    port: int | None,
    given: HttpGiven = NOTHING_GIVEN,
    engine: Sections | None = None,
) -> dict[str, Any]:
    """The Serve config file's content for whatever `raylm serve` was given, checked. What is None is the file's own, or
    a default; `engine` holds for its one model. Raises ConfigError."""
    data = read_config(target) if target.endswith((".yaml", ".yml")) else {"model": {"path": target}}
    if not isinstance(data, dict):
        raise ConfigError(f"{target}: a mapping is expected, not {type(data).__name__}")
    options: dict[str, Any] = {"host": "127.0.0.1", "port": 8000}
    if is_serve_file(data):
        options.update(_check_serve_keys(data, source=target))
        if engine:
            data = {**data, "applications": _with_engine(data["applications"], engine, source=target)}
    else:
        data = _applications_of(parse(EngineConfig, overridden(data, engine or {}), source=target))
    _check_applications(data["applications"], given, source=target)
    options.update({key: value for key, value in (("host", host), ("port", port)) if value is not None})
    return {**data, "http_options": options}


def _with_engine(applications: list[dict[str, Any]], given: Sections, *, source: str) -> list[dict[str, Any]]:
    """The applications with these values in their one model. Raises ConfigError where there are several."""
    models = [application for application in applications if application["import_path"] == MODEL_PATH]
    if len(models) != 1:
        options = ", ".join(f"{section}.{key}" for section, values in given.items() for key in values)
        raise ConfigError(f"{source} has {len(models)} models; options of an engine ({options}) go with one")
    args = models[0].get("args") or {}
    engine = args.get("engine", {})
    if isinstance(engine, str):
        engine = read_config(engine)
    if isinstance(engine, dict):
        models[0]["args"] = {**args, "engine": overridden(engine, given)}
    return applications


def _check_serve_keys(data: dict[str, Any], *, source: str) -> dict[str, Any]:
    """The http_options that the file gives."""
    from ray.serve.schema import ServeDeploySchema

    try:
        schema = parse_foreign(ServeDeploySchema, data, source=source)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{source}: the policy of an autoscaling_config cannot be imported: {error}") from None
    given: dict[str, Any] = schema.http_options.model_dump(exclude_unset=True)
    return given


def _check_applications(applications: list[dict[str, Any]], given: HttpGiven, *, source: str) -> None:
    """Check each application, and all of raylm's together. Ingresses get what is `given`."""
    ingresses: dict[str, IngressConfig] = {}
    models: dict[str, ModelDeployment] = {}
    for application in applications:
        name, path = application.get("name", "default"), application["import_path"]
        place = f"{source}: application {name!r}"
        if path == INGRESS_PATH:
            ingresses[name] = _check_ingress(application, given, source=place)
        elif path == MODEL_PATH:
            models[name] = _check_model(application, source=place)
        elif path == _OLD_PATH:
            raise ConfigError(
                f"{place}: import_path {path!r} is no more: write an application with import_path {INGRESS_PATH!r} "
                f"(its args are http), and one for each model with import_path {MODEL_PATH!r} and route_prefix null "
                "(its args are engine, drain_timeout_s); deployments/multi-model.yaml shows both"
            )
        else:
            _check_import(application, source=place)
    _check_endpoints(ingresses, models, source=source)


def _check_ingress(application: dict[str, Any], given: HttpGiven, *, source: str) -> IngressConfig:
    if values := {name: path for name, path in given._asdict().items() if path is not None}:
        args = application.get("args") or {}
        application["args"] = {**args, "http": {**args.get("http", {}), **values}}
    config = load_ingress(application.get("args") or {}, source=source)
    check_deployments(application, "OpenAIIngress", source=source)
    if application.get("route_prefix", "/") is None:
        raise ConfigError(f"{source}: route_prefix is null; an ingress needs one, such as /")
    if config.http.api_keys_file is not None:
        read_keys(config.http.api_keys_file)
    if config.http.tenants_file is not None:
        load_yaml(TenantsConfig, config.http.tenants_file)
    return config


def _check_model(application: dict[str, Any], *, source: str) -> ModelDeployment:
    config = load_model(application.get("args") or {}, source=source)
    check_deployments(application, "ModelReplica", source=source)
    if (prefix := application.get("route_prefix", "/")) is not None:
        raise ConfigError(
            f"{source}: route_prefix is {prefix!r}; a model has none (route_prefix: null), "
            f"an application with import_path {INGRESS_PATH!r} serves it"
        )
    check_model(config.engine)
    ChatSettings.of(config.engine)
    return config


def _check_endpoints(ingresses: dict[str, IngressConfig], models: dict[str, ModelDeployment], *, source: str) -> None:
    """Every model of an endpoint has names of its own, and an ingress."""
    served = {config.endpoint for config in ingresses.values()}
    seen: dict[tuple[str, str], str] = {}
    for application, config in models.items():
        if config.endpoint not in served:
            raise ConfigError(
                f"{source}: application {application!r}: no application with import_path {INGRESS_PATH!r} is of its "
                f"endpoint {config.endpoint!r}"
            )
        for name in config.engine.model.served_names:
            other = seen.setdefault((config.endpoint, name), application)
            if other != application:
                raise ConfigError(
                    f"{source}: applications {other!r} and {application!r}: two models of endpoint "
                    f"{config.endpoint!r} are named {name!r}; give one of them another model.name, or other "
                    "model.aliases"
                )


def _check_import(application: dict[str, Any], *, source: str) -> None:
    """Raises ConfigError when there is nothing at an application's import path; of one with a runtime_env, which may
    bring it along, nothing is known here."""
    if application.get("runtime_env"):
        return
    path = application["import_path"]
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    try:
        found = _import(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{source}: import_path {path!r} cannot be imported: {reason}") from None
    if not hasattr(found, name):
        close = difflib.get_close_matches(name, dir(found), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(f"{source}: import_path {path!r}: {module_name} has no {name!r}{hint}")


def _import(module: str) -> object:
    # Ray's workers look in the working directory too.
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(os.getcwd())


def _applications_of(engine: EngineConfig) -> dict[str, Any]:
    """The file for one model."""
    face = {"name": "llm", "route_prefix": "/", "import_path": INGRESS_PATH}
    name = f"model-{engine.model.served_name}"
    model = {"name": name, "route_prefix": None, "import_path": MODEL_PATH, "args": {"engine": engine.model_dump()}}
    return {"proxy_location": "HeadOnly", "applications": [face, model]}
