"""Engines that draft on the device give the tokens of a plain one, whatever the scheduler does meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from raylm.core.drafting import Drafter
from raylm.core.sampling import SamplingParams
from raylm.engine.engine import Engine
from raylm.engine.factory import local_engine
from tests.support import checkpoints
from tests.support.drafting import METHODS, Fixed, Models
from tests.support.engines import audit, run_to_end
from tests.support.greedy import random_prompts
from tests.support.huge_keys import with_huge_keys

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, top_k=60, seed=5, max_tokens=17, ignore_eos=True),
    "penalized": SamplingParams(temperature=0.7, presence_penalty=0.8, seed=9, max_tokens=14, ignore_eos=True),
    "until the end": SamplingParams(temperature=1.0, seed=11, max_tokens=30),
}
FEATURES = {
    "room": {"cache": {"num_blocks": 200}},
    "recompute": {},
    "torch's attention": {"runtime": {"attention": "torch"}},
    "swap": {"cache": {"swap_gib": 0.1}},
    "prefixes, two plans": {"cache": {"prefix_caching": True}, "runtime": {"plans_in_flight": 2}},
    "swap, prefixes, two plans": {
        "cache": {"swap_gib": 0.1, "prefix_caching": True},
        "runtime": {"plans_in_flight": 2},
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models.make(tmp_path_factory.mktemp("models"))


def engine_of(target: Path, *, drafter: Drafter | None = None, **sections: dict[str, object]) -> Engine:
    settings: dict[str, dict[str, object]] = {
        "model": {"path": str(target), "max_model_len": 72},
        "cache": {"num_blocks": 24, "block_size": 4, "prefix_caching": False},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 32},
        "runtime": {"device": "cpu", "plans_in_flight": 1, "num_threads": 1},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return local_engine(parse(EngineConfig, settings, source="test"), progress=False, drafter=drafter)


def answers(engine: Engine) -> dict[str, list[int]]:
    """The tokens of requests of all kinds, two of which share most of their prompt."""
    prompts = random_prompts(6, checkpoints.VOCAB_SIZE)
    prompts.append([*prompts[0], 7, 8])
    for name, params in PARAMS.items():
        for index, prompt in enumerate(prompts):
            engine.add([f"{name} {index}"], prompt, params)
    engine.add(["fork 0", "fork 1"], prompts[1], SamplingParams(temperature=0.8, seed=3, max_tokens=9, n=2))
    engine.add(["beam 0", "beam 1"], prompts[2], SamplingParams(beam_width=2, max_tokens=6, n=2))
    collected = run_to_end(engine)
    audit(engine)
    return collected.tokens


@pytest.fixture(scope="module")
def plain(models: Models) -> Iterator[dict[Path, dict[str, list[int]]]]:
    found = {}
    for target in (models.llama, models.mimo):
        engine = engine_of(target, cache={"num_blocks": 200})
        found[target] = answers(engine)
        engine.shutdown()
    yield found


def pairs() -> Iterator[object]:
    """Every method with two of the features, every feature with a method; the rest is nightly."""
    for i, method in enumerate(METHODS):
        for j, features in enumerate(FEATURES):
            is_chosen = j % len(METHODS) == i
            yield pytest.param(method, features, marks=[] if is_chosen else [pytest.mark.nightly])


@pytest.mark.parametrize(("method", "features"), [*pairs()])
def test_every_token_is_the_plain_engines(method: str, features: str, models: Models, plain: dict) -> None:
    drafter = Fixed(3)
    target, sections = models.target(method), FEATURES[features]
    engine = engine_of(target, drafter=drafter, speculation=models.speculation(method), **sections)
    assert answers(engine) == plain[target]
    stats = engine.stats()
    # Idle beams give way even where there is room.
    assert (stats.num_preemptions > 4) == (features != "room")
    assert (stats.num_swaps > 0) == ("swap" in features)
    assert drafter.accepted
    engine.shutdown()


@pytest.mark.parametrize("method", METHODS)
def test_with_the_drafter_of_the_configuration(method: str, models: Models, plain: dict) -> None:
    target = models.target(method)
    engine = engine_of(target, speculation=models.speculation(method))
    assert answers(engine) == plain[target]
    engine.shutdown()


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_of_8_bits_is_the_drafts_too(method: str, models: Models) -> None:
    """Greedy alone: rows of several drafts sum in another order, which may move a probability past a random number."""
    target, found = models.target(method), []
    for speculation in ({}, models.speculation(method)):
        engine = engine_of(target, speculation=speculation, cache={"num_blocks": 200, "dtype": "fp8"})
        for index, prompt in enumerate(random_prompts(4, checkpoints.VOCAB_SIZE)):
            engine.add([f"greedy {index}"], prompt, PARAMS["greedy"])
        found.append(run_to_end(engine).tokens)
        engine.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("method", METHODS)
def test_measured_scales_of_a_draft_models_cache(
    method: str, models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A draft model has scales of its own: as the target itself with huge keys, it drafts what is accepted. EAGLE-3
    heads and MTP layers have scales of 1, and the log says so."""
    target, drafter, cache = models.target(method), Fixed(3), {"num_blocks": 200, "dtype": "fp8", "scales": "measured"}
    speculation = models.speculation(method)
    if method == "draft_model":
        target = with_huge_keys(models.llama, tmp_path / "huge")
        speculation = {"method": method, "model": str(target), "num_drafts": 3}
    found = []
    for drafts in ({}, speculation):
        with caplog.at_level(logging.INFO, logger="raylm"):
            engine = engine_of(target, drafter=drafter if drafts else None, speculation=drafts, cache=cache)
        for index, prompt in enumerate(random_prompts(4, checkpoints.VOCAB_SIZE)):
            engine.add([f"greedy {index}"], prompt, PARAMS["greedy"])
        found.append(run_to_end(engine).tokens)
        engine.shutdown()
    assert found[0] == found[1]
    unmeasured = [message for message in caplog.messages if "scales of 1 in the layer that drafts" in message]
    assert len(unmeasured) == (method != "draft_model")
    if method == "draft_model":
        drafted, accepted = (sum(counts) for counts in zip(*drafter.accepted, strict=True))
        assert accepted > 0.95 * drafted > 0


@pytest.mark.parametrize("features", ["room", "recompute", "swap, prefixes, two plans"])
def test_the_target_itself_drafts_what_is_accepted(features: str, models: Models, plain: dict) -> None:
    """Every greedy draft is right, and so is each token that penalties leave the likeliest; of drafts that are not
    greedy some are."""
    drafter, target = Fixed(3), models.llama
    speculation = {"method": "draft_model", "model": str(target), "num_drafts": 3}
    engine = engine_of(target, drafter=drafter, speculation=speculation, **FEATURES[features])
    for index, prompt in enumerate(random_prompts(8, checkpoints.VOCAB_SIZE)):
        engine.add([f"greedy {index}"], prompt, PARAMS["greedy"])
    found = run_to_end(engine).tokens
    assert all(found[f"greedy {index}"] == plain[target][f"greedy {index}"] for index in range(6))
    assert drafter.accepted
    if features == "room":
        assert all(drafted == accepted for drafted, accepted in drafter.accepted)
    else:
        drafted, accepted = (sum(counts) for counts in zip(*drafter.accepted, strict=True))
        assert accepted > 0.95 * drafted
    engine.shutdown()
