"""The Ray cluster that a batch runs on."""

from __future__ import annotations

import os

from raylm.executor.local_ray import start_local_ray


def is_local(address: str | None) -> bool:
    """Whether `connect` starts a cluster, on this machine alone."""
    # Ray's own variable: `ray job submit` sets it for the job's process.
    return address is None and "RAY_ADDRESS" not in os.environ


def connect(address: str | None) -> None:
    """Join the cluster at `address`, or the one whose job this is, or start a small one on this machine."""
    if is_local(address):
        start_local_ray()
        return
    import ray

    ray.init(address, log_to_driver=True)


def disconnect() -> None:
    import ray

    ray.shutdown()
