"""vLLM's options whose value is a JSON object, such as --speculative-config: what its fields are here.

docs/from-vllm.md is made of this table too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

Options = dict[str, object]
"""Values by names of options."""


def _drafts_by_a_model(options: Options, value: Mapping[str, object]) -> Options:
    """In vLLM a model without a method is a draft model, and one of the two bounds of n holds for both."""
    if not options:
        return options
    if "speculation_method" not in options:
        if "speculation_model" not in options:
            raise ValueError("needs a method or a model")
        options = {"speculation_method": "draft_model", **options}
    bounds = ("speculation_min_n", "speculation_max_n")
    given = [options[bound] for bound in bounds if bound in options]
    return {**options, **dict.fromkeys(bounds, given[0])} if len(given) == 1 else options


def _published(options: Options, value: Mapping[str, object]) -> Options:
    """In vLLM events are off unless the object switches them on, and their port is 5557."""
    publisher = value.get("publisher", "zmq")
    if publisher not in ("zmq", "null"):
        raise ValueError(f"has the publisher {publisher!r}; allowed: zmq, null")
    if not value.get("enable_kv_cache_events") or publisher == "null":
        return {"kv_events_endpoint": None}
    return {"kv_events_endpoint": "tcp://*:5557", **options}


class ObjectOption(NamedTuple):
    """An option that is a JSON object."""

    fields: dict[str, str]
    """vLLM's field -> the option here."""
    anyway: dict[str, str]
    """Field -> why it changes nothing by itself."""
    complete: Callable[[Options, Mapping[str, object]], Options]
    """Adds vLLM's defaults; it is given the options found and the object."""

    def options(self, value: object) -> Options:
        """What the object sets, by options of here. Raises ValueError, whose text follows the option's name."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ValueError(f"must be a JSON object, got {value!r}")
        given = {field: own for field, own in value.items() if own is not None}
        for field in given:
            if field not in self.fields and field not in self.anyway:
                allowed = ", ".join([*self.fields, *self.anyway])
                raise ValueError(f"has the field {field!r}, which raylm has not; allowed: {allowed}")
        return self.complete({self.fields[key]: own for key, own in given.items() if key in self.fields}, given)


OBJECTS: dict[str, ObjectOption] = {
    "speculative_config": ObjectOption(
        {
            "method": "speculation_method",
            "model": "speculation_model",
            "num_speculative_tokens": "speculation_num_drafts",
            "prompt_lookup_min": "speculation_min_n",
            "prompt_lookup_max": "speculation_max_n",
        },
        {"draft_tensor_parallel_size": "a draft model is split over ranks as the model is"},
        _drafts_by_a_model,
    ),
    "kv_events_config": ObjectOption(
        {
            "endpoint": "kv_events_endpoint",
            "replay_endpoint": "kv_events_replay_endpoint",
            "buffer_steps": "kv_events_buffer_steps",
            "max_queue_size": "kv_events_max_queued",
            "topic": "kv_events_topic",
        },
        {
            "enable_kv_cache_events": "without it, or with false, nothing is published",
            "publisher": "zmq, or null for none",
            "hwm": "max_queue_size bounds what waits",
        },
        _published,
    ),
}
"""vLLM's name -> what it is here."""
OBJECTS["sc"] = OBJECTS["speculative_config"]
