"""Configuration of KV events for routers that are not raylm's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raylm.config.base import FrozenConfig


class KVEventsConfig(FrozenConfig):
    """What happens to the cached blocks, published in vLLM's form over ZeroMQ, for llm-d, Dynamo and the like."""

    endpoint: str | None = Field(default=None, pattern=r"^(tcp|ipc)://\S+$")
    """Where an engine publishes, such as tcp://*:5557; one with a *, or of ipc, is listened at, any other connected to.
    Each engine of a node needs a port of its own, so replicas on one node connect. Without one nothing is published.
    Nothing is encrypted, and the events hold every prompt's tokens."""
    replay_endpoint: str | None = Field(default=None, pattern=r"^(tcp|ipc)://\S+$")
    """Where those who missed something may ask for it again, such as tcp://*:5558."""
    topic: str = Field(default="", max_length=256)
    """The first part of each message, which subscribers choose by: llm-d wants kv@POD@MODEL."""
    form: Literal["array", "map"] = "array"
    """How msgpack writes the events: as arrays, which readers of vLLM's events expect, or as maps with the names of
    their fields, which its latest versions write."""
    buffer_steps: int = Field(default=10_000, ge=1)
    """Messages that are kept for replay."""
    max_queued: int = Field(default=100_000, ge=1)
    """Batches that may wait to be published; one more is dropped, and its number with it, so that subscribers see the
    gap. No replay has it."""
