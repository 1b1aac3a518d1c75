"""A local cluster's head: what starts, and in which order."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import ray._private.node
from ray._private.node import Node

from raylm.executor.local_head import LocalHead, local_heads

OPTIONAL = "ray.dashboard.optional_deps"


class FakeGcs:
    def __init__(self, events):
        self.events = events
        self.answers = [{}, {}, {"node": "alive"}]

    def get_all_node_info(self):
        self.events.append("asked")
        return self.answers.pop(0)


def make_head(events, monkeypatch, *, fails=None) -> LocalHead:
    def meanwhile():
        events.append("meanwhile")

    def start(self):
        events.append("processes")
        with pytest.raises(ImportError):
            __import__(OPTIONAL)
        if fails:
            raise fails

    monkeypatch.setattr(Node, "start_ray_processes", start)
    monkeypatch.setattr(Node, "__init__", lambda self, *args, **options: None)
    gcs = FakeGcs(events)
    monkeypatch.setattr(Node, "get_gcs_client", lambda self: gcs)
    return LocalHead(meanwhile)


def test_imports_happen_between_the_start_of_the_processes_and_the_wait_for_them(monkeypatch):
    events = []
    make_head(events, monkeypatch).start_ray_processes()
    assert events == ["processes", "meanwhile", "asked", "asked", "asked"]
    assert sys.modules.get(OPTIONAL, "") is not None and importlib.util.find_spec(OPTIONAL)


def test_what_is_hidden_from_ray_is_there_again_after_a_failure(monkeypatch):
    events = []
    with pytest.raises(OSError, match="no raylet"):
        make_head(events, monkeypatch, fails=OSError("no raylet")).start_ray_processes()
    assert events == ["processes"]
    assert sys.modules.get(OPTIONAL, "") is not None


def test_ray_starts_such_a_head_within_and_its_own_before_and_after():
    assert ray._private.node.Node is Node
    with pytest.raises(RuntimeError), local_heads(lambda: None):
        assert ray._private.node.Node.func is LocalHead
        raise RuntimeError
    assert ray._private.node.Node is Node


@pytest.mark.parametrize("name", ["start_monitor", "start_api_server", "start_ray_processes", "get_gcs_client"])
def test_ray_still_has_the_steps_that_are_left_out_or_waited_for(name):
    assert callable(getattr(Node, name))
