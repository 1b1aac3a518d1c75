"""raylm bench speculation on the demo model: a few requests of each kind."""

from __future__ import annotations

import pytest

from raylm.bench.speculation import INSTRUCTIONS, Settings, _Window, measure_speculation, read_set
from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError


def config(method: str = "ngram") -> EngineConfig:
    sections = {
        "model": {"path": "smollm2-135m", "max_model_len": 512},
        "cache": {"num_blocks": 200},
        "speculation": {"method": method, "num_drafts": 3},
        "runtime": {"device": "cpu", "num_threads": 1},
    }
    return parse(EngineConfig, sections, source="test")


def test_the_set_has_thirty_texts_and_thirty_questions():
    kinds = [entry["kind"] for entry in read_set()]
    assert (kinds.count("text"), kinds.count("chat"), len(kinds)) == (30, 30, 60)
    assert all("{text}" in instruction for instruction in INSTRUCTIONS.values())


@pytest.mark.usefixtures("demo")
def test_outputs_are_the_same_and_copies_are_drafted():
    settings = Settings(["copy", "chat"], [1, 2], requests=2, max_tokens=24, replay=None)
    results = list(measure_speculation(config(), settings))
    assert [(result.kind, result.streams) for result in results] == [("copy", 1), ("copy", 2), ("chat", 1), ("chat", 2)]
    assert all(result.same_outputs == 1 and result.output_tokens == 48 for result in results)
    assert results[0].drafted > 0 and results[0].acceptance is not None


@pytest.mark.usefixtures("demo")
def test_replayed_drafts_are_accepted_as_often_as_they_are_right():
    settings = Settings(["random"], [2], requests=4, max_tokens=40, replay=1.0)
    (result,) = measure_speculation(config(), settings)
    assert result.method == "replay 1" and result.same_outputs == 1
    assert result.drafted > 0 and result.acceptance == 1
    assert result.decode_ratio is not None and result.decode_ratio > 0


def test_the_window_in_which_all_decode():
    window = _Window(2)
    for now, tokens, begun, ended in [(1, 1, 1, False), (2, 3, 2, False), (3, 7, 2, False), (4, 9, 2, True)]:
        window.step(float(now), tokens, begun, ended=ended)
    window.step(5.0, 20, 3, ended=False)
    assert window.counts == (1.0, 4)
    never = _Window(2)
    never.step(1.0, 5, 1, ended=True)
    never.step(2.0, 6, 2, ended=False)
    assert never.counts == (0.0, 0)


def test_no_method_is_refused():
    with pytest.raises(ConfigError, match="ngram, suffix or --replay, not none"):
        list(measure_speculation(config("none"), Settings(["copy"], [1], 1, 8, None)))
