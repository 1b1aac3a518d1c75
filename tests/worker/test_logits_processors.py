"""Logits processors of users are found by their entry points' names."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from raylm.errors import ConfigError
from raylm.worker.sampling import processors
from raylm.worker.sampling.processors import GROUP, load_processors


class OnlyToken:
    """A processor that leaves one token."""

    def __call__(self, logits, token_ids, num_tokens):
        return torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor([3]), 0)


def no_callable():
    return 5


def broken():
    raise OSError("no such file")


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    points = [
        importlib.metadata.EntryPoint(name, f"{__name__}:{target}", GROUP)
        for name, target in (
            ("only", "OnlyToken"),
            ("number", "no_callable"),
            ("broken", "broken"),
            ("missing", "nothing"),
        )
    ]
    monkeypatch.setattr(processors, "entry_points", lambda *, group: points if group == GROUP else [])


def test_a_configured_processor_is_made():
    found = load_processors(["only", "only"])
    assert list(found) == ["only"]
    assert found["only"](torch.zeros(2, 5), None, None).argmax(-1).tolist() == [3, 3]


def test_without_a_name_no_package_is_looked_at(monkeypatch):
    monkeypatch.setattr(processors, "entry_points", None)
    assert load_processors([]) == {}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("other", "names 'other', but the installed packages have broken, missing, number, only in the entry point"),
        ("number", "number could not be made: TypeError: 5 is not callable"),
        ("broken", "broken could not be made: OSError: no such file"),
        ("missing", "missing could not be made: AttributeError"),
    ],
)
def test_what_cannot_be_loaded_is_a_fault_of_the_configuration(name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_processors([name])
