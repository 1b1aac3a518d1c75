"""What `raylm serve` is given, as the content of a Serve config file, checked.

Serve itself ignores keys that it does not know, and finds out only in its cluster what cannot be imported.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

from raylm.config.application import load_app
from raylm.config.base import parse, parse_foreign
from raylm.config.engine import EngineConfig
from raylm.config.files import IMPORT_PATH, read_config
from raylm.errors import ConfigError
from raylm.models.check import check_model
from raylm.serving.keys import read_keys

_OF_SERVE = {"applications", "http_options", "grpc_options", "proxy_location"}


def is_serve_file(data: object) -> bool:
    """Whether the content of a file is meant for Serve, rather than as an engine's configuration."""
    if not isinstance(data, dict) or "model" in data and "applications" not in data:
        return False
    return bool(_OF_SERVE & data.keys() or difflib.get_close_matches("applications", map(str, data)))


def serve_config(
    target: str, *, host: str | None, port: int | None, api_keys_file: str | None = None
) -> dict[str, Any]:
    """The Serve config file's content for whatever `raylm serve` was given, checked. What is None is the file's own, or
    a default. Raises ConfigError."""
    data = read_config(target) if target.endswith((".yaml", ".yml")) else {"model": {"path": target}}
    if not isinstance(data, dict):
        raise ConfigError(f"{target}: a mapping is expected, not {type(data).__name__}")
    options: dict[str, Any] = {"host": "127.0.0.1", "port": 8000}
    if is_serve_file(data):
        options.update(_check_serve_keys(data, source=target))
    else:
        engine = parse(EngineConfig, data, source=target)
        data = _single_application({"models": [{"engine": engine.model_dump()}]})
    for application in data["applications"]:
        source = f"{target}: application {application.get('name')!r}"
        if application["import_path"] == IMPORT_PATH:
            _check_application(application, api_keys_file, source=source)
        else:
            _check_import(application, source=source)
    options.update({key: value for key, value in (("host", host), ("port", port)) if value is not None})
    return {**data, "http_options": options}


def _check_serve_keys(data: dict[str, Any], *, source: str) -> dict[str, Any]:
    """The http_options that the file gives."""
    from ray.serve.schema import ServeDeploySchema

    given: dict[str, Any] = parse_foreign(ServeDeploySchema, data, source=source).http_options.model_dump(
        exclude_unset=True
    )
    return given


def _check_application(application: dict[str, Any], api_keys_file: str | None, *, source: str) -> None:
    """Check the `args` of raylm's application, and give it the keys' file where it is to have another."""
    app = load_app(application.get("args") or {}, source=source)
    for model in app.models:
        check_model(model.engine)
    if (keys := api_keys_file or app.ingress.http.api_keys_file) is not None:
        read_keys(keys)
        application["args"] = _with_keys(application["args"], keys)


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


def _single_application(args: dict[str, Any]) -> dict[str, Any]:
    application = {"name": "llm", "route_prefix": "/", "import_path": IMPORT_PATH, "args": args}
    return {"proxy_location": "HeadOnly", "applications": [application]}


def _with_keys(args: dict[str, Any], path: str) -> dict[str, Any]:
    ingress = args.get("ingress", {})
    return {**args, "ingress": {**ingress, "http": {**ingress.get("http", {}), "api_keys_file": path}}}
