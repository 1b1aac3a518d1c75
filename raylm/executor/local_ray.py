"""A small Ray cluster on this machine alone, for who has none. Ray is imported late: it reads its settings then."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

LOCAL_DEFAULTS = {
    "RAY_AUTH_MODE": "token",
    # Ray's own ports stay on loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray's 15 leaves a server next to nothing beside whatever else runs on the machine.
    "RAY_worker_niceness": "0",
}
"""What such a cluster is told, unless a user says otherwise."""


def set_local_defaults() -> None:
    """Have Ray told so when it is imported."""
    for key, value in LOCAL_DEFAULTS.items():
        os.environ.setdefault(key, value)


def start_local_ray(*, meanwhile: Callable[[], None] = lambda: None, **options: str) -> None:
    """Start it on loopback, without a dashboard; `options` are more of ray.init's. `meanwhile` is done while its
    processes start."""
    if "ray" not in sys.modules:  # Else it has read them: its processes must not be told anything else.
        set_local_defaults()
    import ray

    from raylm.executor.local_head import local_heads

    with local_heads(meanwhile):
        ray.init("local", include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=True, **options)


def connect_to_ray() -> bool:
    """Use the cluster that this process is connected to, or start one. True when it was started, and is ours to end."""
    if "ray" in sys.modules:
        import ray

        if ray.is_initialized():
            return False
    start_local_ray()
    return True
