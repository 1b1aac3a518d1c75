"""What `serve deploy` does with a Serve config file, without Ray's dashboard in between."""

from __future__ import annotations

from typing import Any


def deploy(config: dict[str, Any]) -> None:
    """Start Serve where it does not run yet, apply the file, return when every application runs and every model
    answers."""
    from ray.serve._private import api
    from ray.serve.config import ProxyLocation
    from ray.serve.schema import ServeDeploySchema

    from raylm.serving.program.deploy import wait_until_ready

    schema = ServeDeploySchema.model_validate(config)
    client = api.serve_start(
        http_options=schema.http_options.model_dump(), proxy_location=ProxyLocation(schema.proxy_location)
    )
    client.deploy_apps(schema, _blocking=False)
    wait_until_ready(client, config)
