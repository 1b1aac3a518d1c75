"""The scheduler and the cache, driven by random histories against a worker that checks every slot."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.step import CacheLayout
from raylm.core.structure import StructuredOutput
from raylm.errors import Overloaded, RequestRejected
from tests.support.drafters import RandomDrafter
from tests.support.engines import Collected, audit, make_engine
from tests.support.fakes import BREAKS_AT, BROKEN, FakeExecutor, expected_beams, expected_tokens, logprobs_of
from tests.support.prompts import prompts


class Histories(RuleBasedStateMachine):
    """Random adds of every kind, steps and aborts, with little memory, so that preemption is common."""

    @initialize(
        num_stages=st.integers(1, 3),
        overlaps=st.booleans(),
        num_blocks=st.integers(8, 20),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 40),
        windows=st.sampled_from([(0,), (0,), (5,), (0, 5), (3, 0, 7)]),
        num_host_blocks=st.sampled_from([0, 3, 30]),
        prefix_caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        max_queued_tokens=st.sampled_from([None, 40]),
        max_prompt_share=st.sampled_from([1.0, 0.3]),
        target_itl_ms=st.sampled_from([None, 1.0]),
        prefill_chunk=st.sampled_from([None, 16]),
        drafts=st.sampled_from([None, 1, 5]),
        seed=st.integers(0, 2**16),
    )
    def build(
        self, num_stages, overlaps, num_blocks, block_size, budget, windows, num_host_blocks, drafts, seed, **settings
    ):
        layout = CacheLayout(block_size, list(windows))
        num_blocks = num_blocks * len(windows)
        self.max_len = layout.longest(num_blocks - 1, chunk=budget, limit=30)
        if self.max_len < 2:
            num_blocks, self.max_len = 200, 30
        self.executor = FakeExecutor(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=self.max_len,
            windows=windows,
            num_host_blocks=num_host_blocks,
        )
        self.time = 0.0
        self.engine = make_engine(
            self.executor,
            window=num_stages + overlaps,
            num_stages=num_stages,
            budget=budget,
            clock=self.clock,
            drafter=RandomDrafter(Random(seed), most=drafts) if drafts else None,
            **settings,
        )
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.together: dict[str, list[str]] = {}
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.tells_prompt: set[str] = set()
        self.aborted: set[str] = set()
        self.collected = Collected()
        self.events = Counter()
        self.next_event = 0
        self.count = 0

    def clock(self) -> float:
        self.time += 0.001
        return self.time

    @rule(
        prompt=prompts,
        max_tokens=st.none() | st.integers(1, 20),
        ignore_eos=st.booleans(),
        stop=st.booleans(),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        logprobs=st.sampled_from([None, None, 0, 3]),
        prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
        grammar=st.sampled_from(["", "", "", "g", "go", "gone", BROKEN]),
        cache_salt=st.sampled_from(["", "", "salt"]),
        priority=st.integers(-2, 2),
        tenant=st.sampled_from(["", "a", "b"]),
        deadline_s=st.sampled_from([None, None, 0.02, 0.1]),
        queue_timeout_s=st.sampled_from([None, None, 0.02]),
    )
    def add(self, prompt, max_tokens, ignore_eos, stop, n, logprobs, prompt_logprobs, grammar, **options):
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos and (stop or not grammar),
            stop_token_ids=(7, 9) if stop else (),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structure=StructuredOutput("grammar", grammar) if grammar else None,
        )
        ids = self.submit(prompt, params, RequestOptions(**options), n)
        for id in ids:
            self.expected[id] = expected_tokens(prompt, params, self.max_len)
            self.asked[id] = prompt, params
        if ids and prompt_logprobs is not None:
            self.tells_prompt.add(ids[0])

    @rule(
        prompt=prompts,
        max_tokens=st.none() | st.integers(1, 12),
        width=st.integers(1, 4),
        length_penalty=st.sampled_from([1.0, 0.0, 2.0]),
        early_stopping=st.booleans(),
        data=st.data(),
    )
    def search(self, prompt, max_tokens, width, length_penalty, early_stopping, data):
        n = data.draw(st.integers(1, width))
        params = SamplingParams(
            max_tokens=max_tokens,
            n=n,
            beam_width=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            stop_token_ids=(1, 2, 3, 4, 5, 6),
        )
        ids = self.submit(prompt, params, RequestOptions(), n)
        if ids:
            self.expected |= dict(zip(ids, expected_beams(prompt, params, self.max_len), strict=True))
            self.together |= dict.fromkeys(ids, ids)

    def submit(self, prompt, params, options, n):
        self.count += 1
        ids = [f"{self.count}.{index}" for index in range(n)]
        max_tokens = params.max_tokens
        too_long = len(prompt) >= self.max_len or (max_tokens is not None and len(prompt) + max_tokens > self.max_len)
        if too_long:
            with pytest.raises(RequestRejected):
                self.engine.add(ids, prompt, params, options)
            return []
        try:
            self.engine.add(ids, prompt, params, options)
        except Overloaded:
            return []
        return ids

    @rule()
    def reset(self):
        self.engine.reset_prefix_cache()

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
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
            self.aborted.update(self.together.get(request_id, [request_id]))

    @invariant()
    def emitted_tokens_are_a_prefix_of_the_reference(self):
        if not hasattr(self, "engine"):
            return
        for request_id, tokens in self.collected.tokens.items():
            assert tokens == self.expected[request_id][0][: len(tokens)]
        stats = self.engine.stats()
        assert 0 <= stats.kv_usage <= 1
        audit(self.engine)
        self.follow_events()

    def check_logprobs(self, request_id, tokens):
        if request_id not in self.asked:
            return
        prompt, params = self.asked[request_id]
        text, told = prompt + tokens, self.collected.logprobs[request_id]
        if params.logprobs is None:
            assert told is None
        else:
            assert told == logprobs_of(text, range(len(prompt), len(text)), params.logprobs)
        told = self.collected.prompts.get(request_id)
        if told is not None:
            assert told == logprobs_of(prompt, range(1, len(prompt)), params.prompt_logprobs)
        elif len(prompt) > 1:
            assert request_id not in self.tells_prompt

    def follow_events(self):
        batch = self.engine.take_events()
        if batch is not None:
            assert batch.first == self.next_event
            self.next_event += len(batch.events)
            for event in batch.events:
                if event.kind == "cleared":
                    self.events.clear()
                else:
                    self.events[event.block_hash, event.group] += 1 if event.kind == "stored" else -1
        snapshot = self.engine.event_snapshot()
        assert snapshot.next == self.next_event
        assert {key for key, count in self.events.items() if count} == {
            (event.block_hash, event.group) for event in snapshot.stored
        }
        assert set(self.events.values()) <= {0, 1}

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(10_000):
            if not self.engine.has_work:
                break
            self.collected.take(self.engine.step())
            audit(self.engine)
        assert not self.engine.has_work
        for request_id, (tokens, reason) in self.expected.items():
            if request_id in self.aborted:
                continue
            if self.collected.reasons[request_id] == "error":
                params = self.asked[request_id][1]
                assert params.structure is not None and params.structure.value == BROKEN
                assert len(self.collected.tokens[request_id]) >= BREAKS_AT
            elif self.collected.reasons[request_id] != "deadline":
                assert self.collected.tokens[request_id] == tokens
                assert self.collected.reasons[request_id] == reason
                self.check_logprobs(request_id, tokens)
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0), "blocks leaked"
        assert stats.waiting_tokens == 0


# 10,000 runs: pytest tests/core/test_histories.py --hypothesis-profile=nightly
Histories.TestCase.settings = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck))
TestHistories = Histories.TestCase
