"""raylm bench speculation on the demo model: a few requests of each kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raylm.bench import speculation as bench
from raylm.bench.speculation import INSTRUCTIONS, Settings, _sharing, _Window, measure_speculation, read_set
from raylm.cli.__main__ import main
from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from raylm.core.drafting import DraftCounters
from raylm.engine.factory import local_engine
from raylm.errors import ConfigError
from tests.support.drafting import METHODS, Fixed, Models, steps_in_a_millisecond


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
@pytest.mark.parametrize(
    ("kinds", "streams"), [(["copy"], [2]), pytest.param(["copy", "chat"], [1, 2], marks=pytest.mark.nightly)], ids=str
)
def test_outputs_are_the_same_and_copies_are_drafted(kinds, streams, monkeypatch):
    steps_in_a_millisecond(monkeypatch)
    settings = Settings(kinds, streams, requests=2, max_tokens=24, replay=None)
    results = list(measure_speculation(config(), settings))
    assert [(result.kind, result.streams) for result in results] == [(kind, n) for kind in kinds for n in streams]
    assert all(result.same_outputs == 1 and result.output_tokens == 48 for result in results)
    assert results[0].drafted > 0 and results[0].acceptance is not None


@pytest.mark.usefixtures("demo")
def test_replayed_drafts_are_accepted_as_often_as_they_are_right(monkeypatch):
    steps_in_a_millisecond(monkeypatch)
    settings = Settings(["random"], [2], requests=2, max_tokens=24, replay=1.0)
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


@pytest.mark.parametrize("method", ["none", "grammar"])
def test_what_drafts_nothing_here_is_refused(method):
    with pytest.raises(ConfigError, match=f"ngram, suffix, draft_model, eagle3, mtp or --replay, not {method}"):
        list(measure_speculation(config(method), Settings(["copy"], [1], 1, 8, None)))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models.make(tmp_path_factory.mktemp("models"))


def device_config(target: Path, speculation: dict[str, object], **cache: object) -> EngineConfig:
    sections = {
        "model": {"path": str(target), "max_model_len": 256},
        "cache": cache or {"cpu_memory_gib": 0.01},
        "scheduler": {"max_num_seqs": 2},
        "speculation": speculation,
        "runtime": {"device": "cpu", "num_threads": 1},
    }
    return parse(EngineConfig, sections, source="test")


@pytest.fixture
def engines(monkeypatch):
    """The configurations of the engines that are made, in order, each with the requests that it got; and how many of
    the engines are still up."""
    made, up = [], []

    def make(config, **options):
        engine = local_engine(config, **options)
        got = []
        made.append((config, got))
        up.append(engine)
        add, shutdown = engine.add, engine.shutdown
        engine.add = lambda ids, prompt, params: (got.append(tuple(prompt)), add(ids, prompt, params))
        engine.shutdown = lambda: (up.remove(engine), shutdown())
        return engine

    monkeypatch.setattr(bench, "local_engine", make)
    return made, up


class Counting(Fixed):
    """Drafts whatever it costs, so that no time decides what is drafted."""

    @property
    def counters(self) -> DraftCounters:
        drafted, accepted = (sum(part) for part in zip((0, 0), *self.accepted, strict=True))
        return DraftCounters(len(self.accepted), drafted, accepted)


@pytest.mark.parametrize("method", METHODS)
def test_drafts_of_the_device_are_compared_with_an_engine_that_has_none(models, engines, method, monkeypatch):
    monkeypatch.setattr(bench, "make_drafter", lambda speculation: Counting(3))
    speculation = models.speculation(method)
    if method == "draft_model":
        # It drafts for itself, so it is right but behind an end.
        speculation["model"] = str(models.target(method))
    settings = Settings(["chat"], [2], requests=4, max_tokens=24, replay=None)
    (result,) = measure_speculation(device_config(models.target(method), speculation), settings)
    assert (result.method, result.kind, result.streams, result.requests) == (method, "chat", 2, 4)
    assert result.same_outputs == 1 and result.drafted > 0
    assert (result.acceptance > 0.7) == (method == "draft_model")
    assert result.ratio == pytest.approx(result.tokens_per_s / result.plain_tokens_per_s)
    made, up = engines
    (plain, asked), (drafting, verified) = made
    assert (plain.speculation.method, drafting.speculation.method) == ("none", method)
    assert plain.cache.cpu_memory_gib == drafting.cache.cpu_memory_gib == 0.005
    # Two to warm up, then all in turns.
    assert asked == verified and len(asked) == 6
    assert not up


def test_an_engine_that_cannot_be_made_leaves_none_behind(models, engines):
    speculation = {"method": "draft_model", "model": "/nowhere"}
    with pytest.raises(ConfigError, match="speculation.model '/nowhere'"):
        list(measure_speculation(device_config(models.llama, speculation), Settings(["chat"], [1], 1, 8, None)))
    made, up = engines
    assert [one.speculation.method for one, _ in made] == ["none"] and not up


def test_the_shares_of_a_gpu(models):
    """The second engine's share counts what the first has taken, so it is the whole."""
    plain, drafting = _sharing(device_config(models.mimo, models.speculation("mtp"), gpu_memory_utilization=0.8))
    assert (plain.cache.gpu_memory_utilization, drafting.cache.gpu_memory_utilization) == (0.4, 0.8)


def test_replay_goes_with_no_model_that_drafts(models):
    config = device_config(models.mimo, models.speculation("mtp"))
    with pytest.raises(ConfigError, match="--replay gives the drafts by itself; it does not go with --method mtp"):
        list(measure_speculation(config, Settings(["random"], [1], 1, 8, 0.5)))


def test_the_program_takes_a_draft_model(models, capsys):
    options = ["--method", "draft_model", "--draft-model", str(models.draft), "--num-drafts", "3"]
    sizes = ["--kind", "random", "--streams", "1", "--requests", "1", "--max-tokens", "12", "--max-model-len", "256"]
    assert main(["bench", "speculation", str(models.llama), *options, *sizes, "--device", "cpu"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (row["method"], row["same_outputs"], row["output_tokens"]) == ("draft_model", 1, 12)


def test_a_draft_model_that_is_missing_is_named(models, capsys):
    assert main(["bench", "speculation", str(models.llama), "--method", "draft_model", "--device", "cpu"]) == 2
    assert "model is missing: method draft_model needs the path of what drafts" in capsys.readouterr().err
