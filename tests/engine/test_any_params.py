"""No SamplingParams whatever ends an engine: a request is refused, or it runs to its end and others run on."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm import LLM, EngineConfig
from raylm.core.sampling import MAX_SEED, SamplingParams
from raylm.core.step import Sampled, StepPlan
from raylm.core.structure import StructuredOutput
from raylm.core.thinking import ThinkingSection
from raylm.engine.engine import Engine
from raylm.errors import RequestRejected
from tests.support import checkpoints, fakes
from tests.support.engines import make_engine, run_to_end
from tests.support.fakes import FakeExecutor

VOCAB = fakes.VOCAB
MODEL_VOCAB = checkpoints.VOCAB_SIZE
tokens = st.one_of(
    st.integers(0, VOCAB - 1),
    st.sampled_from([VOCAB, MODEL_VOCAB - 1, MODEL_VOCAB, 2**31 - 1]),
)
few_tokens = st.lists(tokens, max_size=4)
words = st.lists(st.text("ab", max_size=3), max_size=3)


def numbers(low: float, high: float, *special: float) -> st.SearchStrategy[float]:
    """From far inside the range to its very ends, and a little beyond."""
    ends = [low, high, *special, 5e-324, 1e-30, 1e-6, low - 1, high + 1]
    return st.one_of(st.sampled_from(ends), st.floats(low, high), st.integers(int(low), int(high)))


STRATEGIES: dict[str, st.SearchStrategy[object]] = {
    "temperature": numbers(0, 100),
    "top_p": numbers(0, 1),
    "top_k": st.sampled_from([0, 1, 2, VOCAB, VOCAB + 1, 2**31 - 1]),
    "min_p": numbers(0, 1),
    "typical_p": numbers(0, 1),
    "presence_penalty": numbers(-2, 2),
    "frequency_penalty": numbers(-2, 2),
    "repetition_penalty": numbers(0, 2),
    "logit_bias": st.dictionaries(tokens, numbers(-100, 100), max_size=4),
    "allowed_token_ids": few_tokens,
    "bad_words": words,
    "structure": st.one_of(
        st.none(),
        st.builds(
            StructuredOutput,
            st.just("grammar"),
            st.sampled_from(['root ::= "a"', "root ::= [ab]+", 'root ::= ""', "root ::= root", "root ::= ("]),
            st.lists(st.integers(0, 5), max_size=2).map(tuple),
        ),
        st.just(StructuredOutput("regex", "a")),
        st.just(StructuredOutput("structural_tag", "nonsense")),
        st.just("json"),
    ),
    "bad_token_ids": st.lists(few_tokens, max_size=3),
    "min_tokens": st.integers(0, 9),
    "logits_processors": st.lists(st.sampled_from(["", "unknown"]), max_size=1),
    "seed": st.one_of(st.none(), st.integers(-MAX_SEED - 1, MAX_SEED)),
    "max_tokens": st.integers(0, 8),
    "n": st.integers(1, 4),
    "logprobs": st.sampled_from([None, -1, 0, 1, 5, 20, 21]),
    "prompt_logprobs": st.sampled_from([None, -1, 0, 1, 5, 20]),
    "logprob_token_ids": few_tokens,
    "beam_width": st.sampled_from([0, 0, 0, 1, 2, 4, 16]),
    "length_penalty": numbers(-10, 10),
    "early_stopping": st.booleans(),
    "stop": words,
    "stop_token_ids": few_tokens,
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "thinking_token_budget": st.integers(-2, 4),
    "thinking": st.one_of(
        st.none(),
        st.just("<think>"),
        st.builds(
            ThinkingSection,
            st.lists(tokens, min_size=1, max_size=2).map(tuple),
            st.lists(tokens, min_size=1, max_size=3).map(tuple),
            st.booleans(),
        ),
    ),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
}
ALWAYS = {"max_tokens": STRATEGIES["max_tokens"]}
anything = st.fixed_dictionaries(ALWAYS, optional={k: v for k, v in STRATEGIES.items() if k not in ALWAYS})
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
PLAIN = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_every_field_is_tried():
    assert set(STRATEGIES) == {field.name for field in fields(SamplingParams)}


def ask(engine: Engine, requests: list[tuple[list[int], dict[str, object]]]) -> None:
    """All at once, with a plain request among them, which must get all of its tokens."""
    engine.add(["plain"], [1, 2, 3], PLAIN)
    expected = {"plain"}
    unproved: set[str] = set()
    """Of structures that no GrammarCompiler has seen: one that does not compile ends its own request."""
    for number, (prompt, given_fields) in enumerate(requests):
        try:
            params = SamplingParams(**given_fields)
            ids = [f"{number}.{choice}" for choice in range(params.n)]
            engine.add(ids, prompt, params)
        except RequestRejected as refusal:
            assert refusal.param in {*STRATEGIES, "prompt"}
        else:
            expected.update(ids)
            unproved.update(ids if params.structure is not None else [])
    found = run_to_end(engine)
    assert set(found.reasons) == expected
    for name, reason in found.reasons.items():
        assert reason in {"stop", "length"} or (reason == "error" and name in unproved)
    assert len(found.tokens["plain"]) == 4


several = st.lists(st.tuples(prompts, anything), min_size=1, max_size=4)


class FarExecutor(FakeExecutor):
    """A worker in another process: plans and results come as msgpack of the very types."""

    def submit(self, plan):
        super().submit(msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan))

    def result(self):
        return msgspec.msgpack.decode(msgspec.msgpack.encode(super().result()), type=Sampled)


@settings(max_examples=120, deadline=None)
@given(several, st.sampled_from([1, 2]))
def test_the_scheduler_and_its_worker_go_on(requests, window):
    ask(make_engine(FarExecutor(), window=window), requests)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = checkpoints.llama(tmp_path_factory.mktemp("llama"))
    config = {
        "model": {"path": str(folder), "max_model_len": 64},
        "cache": {"block_size": 4, "num_blocks": 64},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
        "runtime": {"device": "cpu"},
    }
    llm = LLM(EngineConfig.model_validate(config), progress=False)
    yield llm._engine
    llm.close()


@settings(max_examples=120, deadline=None)
@given(several)
def test_a_model_goes_on(engine, requests):
    ask(engine, requests)


@pytest.mark.parametrize(
    "text", ['root ::= "a"', 'root ::= ""', "root ::= root", "root ::= (", "no grammar", "root ::= x"]
)
@pytest.mark.parametrize("begin_after", [(), (5,)], ids=str)
def test_a_grammar_that_was_not_compiled_fails_alone(engine, text, begin_after):
    """The text side compiles grammars, and refuses wrong ones; an engine that gets one all the same goes on."""
    engine.add(["plain"], [1, 2, 3], PLAIN)
    params = SamplingParams(max_tokens=4, structure=StructuredOutput("grammar", text, begin_after))
    engine.add(["other"], [1, 2], params)
    found = run_to_end(engine)
    assert found.reasons["plain"] == "length" and set(found.reasons) == {"plain", "other"}
