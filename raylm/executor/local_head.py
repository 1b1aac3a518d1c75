"""The head node of a Ray cluster that is one machine's own: without what only others need, and what nobody waits for.

ray.init starts a dashboard's process also where none is wanted, and waits for it; an autoscaler that has nothing to
scale; and it asks once a second whether its node is there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray._private.node
from ray._private.node import Node

_POLL_S = 0.02
_WAIT_S = 5.0
"""After it Ray asks by itself, and says what is wrong when there is no node."""
_OF_DASHBOARD = "ray.dashboard.optional_deps"
"""With it the node's agent would serve metrics and jobs to a dashboard, and import what that takes."""


class LocalHead(Node):  # type: ignore[misc]  # Ray's has no types
    """A head node without dashboard and autoscaler. `meanwhile` is done while its processes start."""

    def __init__(self, meanwhile: Callable[[], None], *args: Any, **options: Any) -> None:
        self._meanwhile = meanwhile
        super().__init__(*args, **options)

    def start_monitor(self) -> None:
        pass

    def start_api_server(self, **options: Any) -> None:
        pass

    def start_ray_processes(self) -> None:
        with _missing(_OF_DASHBOARD):
            super().start_ray_processes()
        self._meanwhile()
        deadline = time.monotonic() + _WAIT_S
        while not self.get_gcs_client().get_all_node_info() and time.monotonic() < deadline:
            time.sleep(_POLL_S)


@contextmanager
def local_heads(meanwhile: Callable[[], None]) -> Iterator[None]:
    """Within, ray.init starts a LocalHead: it has no option for either."""
    module, whole = ray._private.node, ray._private.node.Node
    module.Node = partial(LocalHead, meanwhile)
    try:
        yield
    finally:
        module.Node = whole


@contextmanager
def _missing(module: str) -> Iterator[None]:
    """Within, the module is as if it were not installed."""
    loaded = sys.modules.get(module)
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
        if loaded is not None:
            sys.modules[module] = loaded
