"""The scheduler and the cache, driven by random histories against a worker that checks every slot."""

from __future__ import annotations

import pytest
from fakes import EOS, VOCAB, FakeExecutor, expected_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raylm.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from raylm.core.kv_cache import KVCacheManager
from raylm.core.sampling import SamplingParams
from raylm.core.scheduler import Scheduler
from raylm.core.step import StepResult
from raylm.engine.engine import Engine
from raylm.errors import ConfigError, EngineDeadError, Overloaded, RequestRejected


def make_engine(
    executor: FakeExecutor, *, window: int = 1, max_num_seqs: int = 8, budget: int = 64, queue: int = 1024
) -> Engine:
    executor.budget = budget
    config = EngineConfig(
        model=ModelConfig(path="fake"),
        cache=CacheConfig(block_size=executor.block_size),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_queued_requests=queue),
    )
    return Engine(config, executor, plans_in_flight=window)


class Collected:
    """Tokens of each request as they come, checked for order and for an end."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    def take(self, deltas) -> None:
        for delta in deltas:
            assert delta.request_id not in self.reasons, "a token after the end"
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.reasons[delta.request_id] = delta.finish_reason


def run_to_end(engine: Engine) -> Collected:
    collected = Collected()
    for _ in range(10_000):
        if not engine.has_work:
            return collected
        collected.take(engine.step())
    raise AssertionError("the engine did not come to an end")


prompts = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=20)


class Histories(RuleBasedStateMachine):
    """Random adds, steps and aborts, with little memory, so that preemption is common."""

    @initialize(
        window=st.integers(1, 2),
        num_blocks=st.integers(8, 20),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 40),
    )
    def build(self, window, num_blocks, block_size, max_num_seqs, budget):
        capacity = (num_blocks - 1) * block_size
        self.max_len = min(capacity, 30)
        self.executor = FakeExecutor(num_blocks=num_blocks, block_size=block_size, max_model_len=self.max_len)
        self.engine = make_engine(self.executor, window=window, max_num_seqs=max_num_seqs, budget=budget)
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.aborted: set[str] = set()
        self.collected = Collected()
        self.count = 0

    @rule(prompt=prompts, max_tokens=st.none() | st.integers(1, 20), ignore_eos=st.booleans(), stop=st.booleans())
    def add(self, prompt, max_tokens, ignore_eos, stop):
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=(7, 9) if stop else ()
        )
        self.count += 1
        request_id = str(self.count)
        too_long = len(prompt) >= self.max_len or (max_tokens is not None and len(prompt) + max_tokens > self.max_len)
        if too_long:
            with pytest.raises(RequestRejected):
                self.engine.add(request_id, prompt, params)
            return
        self.engine.add(request_id, prompt, params)
        self.expected[request_id] = expected_tokens(prompt, params, self.max_len)

    @rule()
    def step(self):
        self.collected.take(self.engine.step())

    @precondition(lambda self: getattr(self, "expected", None))
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        delta = self.engine.abort(request_id)
        ended = request_id in self.collected.reasons or request_id in self.aborted
        assert (delta is None) == ended
        if delta is not None:
            assert delta.finish_reason == "abort"
            self.aborted.add(request_id)

    @invariant()
    def emitted_tokens_are_a_prefix_of_the_reference(self):
        if not hasattr(self, "engine"):
            return
        for request_id, tokens in self.collected.tokens.items():
            assert tokens == self.expected[request_id][0][: len(tokens)]
        stats = self.engine.stats()
        assert 0 <= stats.kv_usage <= 1

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(10_000):
            if not self.engine.has_work:
                break
            self.collected.take(self.engine.step())
        assert not self.engine.has_work
        for request_id, (tokens, reason) in self.expected.items():
            if request_id not in self.aborted:
                assert self.collected.tokens[request_id] == tokens
                assert self.collected.reasons[request_id] == reason
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0), "blocks leaked"


Histories.TestCase.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistories = Histories.TestCase


@settings(max_examples=50, deadline=None)
@given(batch=st.lists(prompts, min_size=1, max_size=12), window=st.integers(1, 2), budget=st.integers(8, 64))
def test_batched_output_equals_each_request_alone(batch, window, budget):
    executor = FakeExecutor(num_blocks=20, block_size=4, max_model_len=40)
    engine = make_engine(executor, window=window, budget=budget)
    params = SamplingParams(temperature=0, max_tokens=12)
    for index, prompt in enumerate(batch):
        engine.add(str(index), prompt, params)
    collected = run_to_end(engine)
    for index, prompt in enumerate(batch):
        assert (collected.tokens[str(index)], collected.reasons[str(index)]) == expected_tokens(prompt, params, 40)


def test_memory_pressure_preempts_the_newest_and_loses_nothing():
    executor = FakeExecutor(num_blocks=9, block_size=2, max_model_len=16)
    engine = make_engine(executor)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for index in range(3):
        engine.add(str(index), [index + 1] * 4, params)
    collected = run_to_end(engine)
    assert engine.stats().num_preemptions > 0
    assert list(collected.reasons) == ["0", "1", "2"], "first come, first served"
    for index in range(3):
        assert collected.tokens[str(index)] == expected_tokens([index + 1] * 4, params, 16)[0]


def test_a_long_prompt_is_prefilled_in_chunks_beside_decodes():
    executor = FakeExecutor(num_blocks=64, block_size=4, max_model_len=64)
    engine = make_engine(executor, budget=8, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.add("short", [1, 2], params)
    engine.step()
    engine.add("long", [3] * 30, params)
    for _ in range(4):
        deltas = engine.step()
        assert [delta.request_id for delta in deltas] == ["short"], "decode goes on while the prompt is computed"
    assert any(delta.request_id == "long" for delta in engine.step())


def test_overlap_never_emits_a_surplus_token():
    executor = FakeExecutor()
    engine = make_engine(executor, window=2)
    prompt = next([a, b] for a in range(1, 50) for b in range(1, 50) if EOS in _first_tokens([a, b], 5))
    params = SamplingParams(temperature=0, max_tokens=30)
    engine.add("a", prompt, params)
    collected = run_to_end(engine)
    assert collected.tokens["a"] == expected_tokens(prompt, params, 64)[0]
    assert collected.tokens["a"][-1] == EOS
    assert collected.reasons["a"] == "stop"


def _first_tokens(prompt, count):
    return expected_tokens(prompt, SamplingParams(max_tokens=count), 64)[0]


def test_a_full_queue_refuses_and_says_when_to_come_back():
    engine = make_engine(FakeExecutor(), queue=2)
    params = SamplingParams(max_tokens=4)
    engine.add("a", [1], params)
    engine.add("b", [1], params)
    with pytest.raises(Overloaded, match="2 requests are waiting, at most 2 may") as caught:
        engine.add("c", [1], params)
    assert caught.value.retry_after > 0
    assert set(run_to_end(engine).reasons) == {"a", "b"}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "the prompt is empty"),
        ([1] * 64, None, "the prompt has 64 tokens, but this model takes 64"),
        ([1] * 60, 5, "the prompt has 60 tokens and max_tokens is 5, together more than the 64"),
        ([VOCAB], 1, f"token id {VOCAB}; this model has 0 to {VOCAB - 1}"),
        ([-1], 1, "token id -1"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(prompt, max_tokens, message):
    engine = make_engine(FakeExecutor())
    with pytest.raises(RequestRejected, match=message):
        engine.add("a", prompt, SamplingParams(max_tokens=max_tokens))
    assert not engine.has_work


def test_a_cache_too_small_for_one_request_is_a_configuration_error():
    cache = KVCacheManager(num_blocks=3, block_size=4)
    with pytest.raises(ConfigError, match="holds 8 tokens, fewer than model.max_model_len 9"):
        Scheduler(SchedulerConfig(), cache, max_model_len=9)


def test_a_result_out_of_order_is_an_error():
    engine = make_engine(FakeExecutor(), window=2)
    engine.add("a", [1, 2], SamplingParams(max_tokens=8))
    engine.step()
    with pytest.raises(RuntimeError, match="does not answer"):
        engine._scheduler.update(StepResult(99, [1]))


def test_a_worker_failure_reaches_the_caller():
    executor = FakeExecutor()
    executor.fail_at = 1
    engine = make_engine(executor)
    engine.add("a", [1], SamplingParams(max_tokens=2))
    with pytest.raises((RuntimeError, EngineDeadError), match="told to fail"):
        engine.step()
