"""The Ray cluster that a batch runs on."""

from __future__ import annotations

import os

from raylm.executor.placement import Bundle


def connect(address: str | None) -> None:
    """Join the cluster at `address`, or the one whose job this is, or start a small one on this machine."""
    # Ray's own variable: `ray job submit` sets it for the job's process.
    if address is None and "RAY_ADDRESS" not in os.environ:
        _start()
        return
    import ray

    ray.init(address, log_to_driver=True)


def _start() -> None:
    # Ray reads these once, when it is imported and when its processes start; a user's own win.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    ray.init("local", include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=True)


def nodes() -> list[Bundle]:
    """What each node that is up has in all."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def disconnect() -> None:
    import ray

    ray.shutdown()
