"""From a Serve config file's content to applications that run, in the cluster of `raylm serve`.

What `serve run` does, with more of it at once: applications are built in this process, not in one of Serve's for each,
and their replicas start together with Serve's proxies.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve._private import api
from ray.serve._private.application_state import StatusOverview
from ray.serve._private.build_app import BuiltApplication, build_app
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.constants import PROXY_READY_CHECK_TIMEOUT_S
from ray.serve.config import ControllerOptions, ProxyLocation
from ray.serve.context import _set_global_client
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from raylm.config.files import INGRESS_PATH, MODEL_PATH
from raylm.errors import ConfigError, RaylmError
from raylm.log import Laps
from raylm.serving.app import build_ingress, build_model
from raylm.serving.causes import cause
from raylm.serving.front.install import front_failure
from raylm.serving.front.tls import trusting

_POLL_S = 0.1
_FRONT_S = 60.0
_READY_S = 5.0
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_BUILDERS = {INGRESS_PATH: build_ingress, MODEL_PATH: build_model}
_BUILT_HERE = {"name", "route_prefix", "import_path", "args", "deployments"}
"""Keys of an application that need nothing of Serve's own way."""


def deploy(config: dict[str, Any], laps: Laps, certificate: str | None = None) -> None:
    """Start Serve, submit the applications, wait until all run and every model answers, over HTTPS where there is a
    file of the server's `certificate`. Raises RaylmError."""
    schema = ServeDeploySchema.model_validate(config)
    options, location = schema.http_options.model_dump(), ProxyLocation(schema.proxy_location)
    try:
        # The first half of serve_start, which waits for the proxies.
        controller, proxies = api._create_controller_and_proxy_refs(
            options, None, None, None, ControllerOptions(), location
        )
    except (RayError, RuntimeError, TimeoutError) as error:
        raise front_failure(error) from None
    client = ServeControllerClient(controller)
    _set_global_client(client)
    laps.lap("controller")
    _submit(client, schema)
    laps.lap("applications submitted")
    _await_front(client, proxies)
    laps.lap("front")
    wait_until_ready(client, config, certificate)
    laps.lap("models")


def wait_until_ready(client: ServeControllerClient, config: dict[str, Any], certificate: str | None = None) -> None:
    """Return when all applications run and every model answers. Raises RaylmError when one has failed."""
    urls = _ready_urls(config, "http" if certificate is None else "https")
    while not (_all_run(client.list_serve_statuses()) and all(_is_ready(url, certificate) for url in urls)):
        time.sleep(_POLL_S)


def _submit(client: ServeControllerClient, schema: ServeDeploySchema) -> None:
    """Hand the applications over. Raises RaylmError when one cannot be built here."""
    if not all(_is_built_here(application) for application in schema.applications):
        client.deploy_apps(schema, _blocking=False)
        return
    client.deploy_applications(
        [build(application) for application in schema.applications],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def _is_built_here(application: ServeApplicationSchema) -> bool:
    """Whether it is raylm's: what another's needs, a runtime_env may bring along."""
    return application.import_path in _BUILDERS and application.model_fields_set <= _BUILT_HERE


def build(application: ServeApplicationSchema) -> BuiltApplication:
    """What Serve makes of the application in a process of its own. Raises RaylmError."""
    try:
        bound = _BUILDERS[application.import_path](application.args)
    except ConfigError as error:
        raise RaylmError(f"application {application.name!r} did not start: {error}") from None
    built = build_app(bound, name=application.name, route_prefix=application.route_prefix)
    options = {one.name: one.model_dump(exclude_unset=True, exclude={"name"}) for one in application.deployments}
    return replace(built, deployments=[each.options(**options.get(each.name, {})) for each in built.deployments])


def _await_front(client: ServeControllerClient, proxies: Sequence[ray.ObjectRef[Any]]) -> None:
    # The environment may give the proxies more time: `front_failure` says so.
    limit = max(_FRONT_S, PROXY_READY_CHECK_TIMEOUT_S)
    deadline = time.monotonic() + limit
    waiting = list(proxies)
    try:
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_POLL_S)
            ray.get(done)
            _all_run(client.list_serve_statuses())
            if time.monotonic() > deadline:
                raise TimeoutError(f"it was not ready after {limit:g} s")
    except (RayError, RuntimeError, TimeoutError) as error:
        raise front_failure(error) from None


def _all_run(overviews: Sequence[StatusOverview]) -> bool:
    """Whether all applications run. Raises RaylmError with the cause when one has failed."""
    for each in overviews:
        if each.app_status.status.value in _FAILED:
            messages = [one.message for one in each.deployment_statuses if one.status.value in _FAILED]
            raise RaylmError(f"application {each.name!r} did not start: {cause([each.app_status.message, *messages])}")
    return bool(overviews) and all(each.app_status.status.value == "RUNNING" for each in overviews)


def _ready_urls(config: dict[str, Any], scheme: str) -> list[str]:
    """Where raylm's ingresses say whether every model can be asked."""
    options = config["http_options"]
    # A server that listens on all addresses listens on this one.
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options["host"], options["host"])
    address = f"{scheme}://[{host}]" if ":" in host.strip("[]") and not host.startswith("[") else f"{scheme}://{host}"
    prefixes = [
        application.get("route_prefix", "/").rstrip("/")
        for application in config["applications"]
        if application["import_path"] == INGRESS_PATH
    ]
    return [f"{address}:{options['port']}{options.get('root_path', '')}{prefix}/ready" for prefix in prefixes]


def _is_ready(url: str, certificate: str | None) -> bool:
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]  # Not the environment's.
    try:
        if certificate is not None:
            # The certificate is of the name that clients use, not of this address.
            handlers.append(urllib.request.HTTPSHandler(context=trusting(certificate)))
        direct = urllib.request.build_opener(*handlers)
        with direct.open(url, timeout=_READY_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False  # 503 too: no tokenizer yet, or no engine.
