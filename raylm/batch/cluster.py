"""The Ray cluster that a batch runs on."""

from __future__ import annotations

import os

from raylm.executor.local_ray import start_local_ray


def connect(address: str | None) -> None:
    """Join the cluster at `address`, or the one whose job this is, or start a small one on this machine."""
    # Ray's own variable: `ray job submit` sets it for the job's process.
    if address is None and "RAY_ADDRESS" not in os.environ:
        start_local_ray()
        return
    import ray

    ray.init(address, log_to_driver=True)


def disconnect() -> None:
    import ray

    ray.shutdown()
