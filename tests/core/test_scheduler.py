"""The scheduler in cases small enough to say what must happen: an engine with a worker that checks every slot."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.config.resolve import ResolvedScheduler
from raylm.config.sampling import GenerationConfig
from raylm.core.kv_cache import KVCacheManager
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.scheduler import Scheduler
from raylm.core.step import CacheLayout, Sampled
from raylm.errors import ConfigError, EngineDeadError, Overloaded, RequestRejected
from tests.support.engines import Collected, audit, make_engine, run_to_end
from tests.support.fakes import EOS, VOCAB, FakeExecutor, expected_beams, expected_tokens, logprobs_of
from tests.support.prompts import prompts


@settings(max_examples=50, deadline=None)
@given(batch=st.lists(prompts, min_size=1, max_size=12), window=st.integers(1, 2), budget=st.integers(8, 64))
def test_batched_output_equals_each_request_alone(batch, window, budget):
    executor = FakeExecutor(num_blocks=20, block_size=4, max_model_len=40)
    engine = make_engine(executor, window=window, budget=budget)
    params = SamplingParams(temperature=0, max_tokens=12)
    for index, prompt in enumerate(batch):
        engine.add([str(index)], prompt, params)
    collected = run_to_end(engine)
    for index, prompt in enumerate(batch):
        assert (collected.tokens[str(index)], collected.reasons[str(index)]) == expected_tokens(prompt, params, 40)


def test_memory_pressure_preempts_the_newest_and_loses_nothing():
    executor = FakeExecutor(num_blocks=9, block_size=2, max_model_len=16)
    engine = make_engine(executor)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for index in range(3):
        engine.add([str(index)], [index + 1] * 4, params)
    collected = run_to_end(engine)
    assert engine.stats().num_preemptions > 0
    assert list(collected.reasons) == ["0", "1", "2"], "first come, first served"
    for index in range(3):
        assert collected.tokens[str(index)] == expected_tokens([index + 1] * 4, params, 16)[0]


def test_a_long_prompt_is_prefilled_in_chunks_beside_decodes():
    executor = FakeExecutor(num_blocks=64, block_size=4, max_model_len=64)
    engine = make_engine(executor, budget=8, max_num_seqs=4, prefill_chunk=16)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.add(["short"], [1, 2], params)
    engine.step()
    engine.add(["long"], [3] * 30, params)
    for _ in range(4):
        deltas = engine.step()
        assert [delta.request_id for delta in deltas] == ["short"], "decode goes on while the prompt is computed"
    assert any(delta.request_id == "long" for delta in engine.step())


@pytest.mark.parametrize(
    ("prompts", "rows", "tokens"),
    [
        pytest.param(1, 8, [1 + 40, 1 + 40, 1 + 20], id="a long prompt"),
        # Seven wait, then five: two have begun, each with at most a chunk a step. Whose prompt is complete decodes.
        pytest.param(7, 8, [1 + 70, 1 + 50, 1 + 50, 2 + 50], id="requests pile up"),
        pytest.param(7, 4, [1 + 40, 1 + 40, 1 + 40], id="most of them find no row"),
    ],
)
def test_prompts_beside_a_running_request_get_a_chunk_or_a_quarter_for_each_that_waits(prompts, rows, tokens):
    executor = FakeExecutor(num_blocks=1000, max_model_len=200)
    engine = make_engine(executor, budget=400, max_num_seqs=rows, prefill_chunk=40)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.add(["runs"], [1, 2], params)
    engine.step()
    for index in range(prompts):
        engine.add([str(index)], [index + 3] * 100, params)
    assert [_computed(engine, executor) for _ in tokens] == tokens


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=1), SamplingParams(max_tokens=9, ignore_eos=True)])
@pytest.mark.parametrize("window", [1, 2])
def test_a_prompt_behind_requests_that_have_ended_takes_the_whole_step(params, window):
    executor = FakeExecutor(num_blocks=1000, max_model_len=200)
    engine = make_engine(executor, budget=150, max_num_seqs=8, prefill_chunk=40, window=window)
    engine.add(["before"], [1] * 50, params)
    if params.max_tokens > 1:
        run_to_end(engine)
    else:
        _computed(engine, executor)
    engine.add(["long"], [2] * 190, params)
    assert _computed(engine, executor) == 150


@pytest.mark.parametrize(
    ("stages", "params"),
    [(2, SamplingParams(max_tokens=50, ignore_eos=True)), (1, SamplingParams(max_tokens=50, beam_width=2))],
)
def test_requests_that_sampled_nothing_in_the_last_plan_are_protected_too(stages, params):
    """One request on two stages decodes in every second plan; beams report candidates, and the host samples."""
    executor = FakeExecutor(num_blocks=1000, max_model_len=200)
    engine = make_engine(
        executor, budget=150, max_num_seqs=8, prefill_chunk=40, window=2, num_stages=stages, prefix_caching=False
    )
    engine.add(["runs"], [1, 2], params)
    for _ in range(4):
        engine.step()
    engine.add(["long"], [2] * 190, SamplingParams(max_tokens=2, ignore_eos=True))
    assert max(_computed(engine, executor) for _ in range(4)) <= 40 + 2


def test_the_last_token_of_a_chunk_is_for_one_prompt_alone():
    executor = FakeExecutor(num_blocks=1000, max_model_len=200)
    engine = make_engine(executor, budget=150, max_num_seqs=8, prefill_chunk=40)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.add(["runs"], [1, 2], params)
    engine.step()
    for index, length in enumerate([39, 50, 50, 50]):
        engine.add([str(index)], [index + 3] * length, params)
    assert _computed(engine, executor) == 1 + 40
    assert engine.stats().running == 3, "the first two of them"


def _computed(engine, executor):
    before = executor.num_computed
    engine.step()
    return executor.num_computed - before


def test_overlap_never_emits_a_surplus_token():
    executor = FakeExecutor()
    engine = make_engine(executor, window=2)
    prompt = next([a, b] for a in range(1, 50) for b in range(1, 50) if EOS in _first_tokens([a, b], 5))
    params = SamplingParams(temperature=0, max_tokens=30)
    engine.add(["a"], prompt, params)
    collected = run_to_end(engine)
    assert collected.tokens["a"] == expected_tokens(prompt, params, 64)[0]
    assert collected.tokens["a"][-1] == EOS
    assert collected.reasons["a"] == "stop"


def _first_tokens(prompt, count):
    return expected_tokens(prompt, SamplingParams(max_tokens=count), 64)[0]


def test_a_first_delta_says_how_long_its_request_waited_and_was_prefilled():
    now = [10.0]
    engine = make_engine(FakeExecutor(num_blocks=64, block_size=4), budget=8, max_num_seqs=2, clock=lambda: now[0])
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.add(["both-0", "both-1"], [1] * 16, replace(params, n=2))
    engine.add(["late"], [2] * 3, params)
    collected = Collected()
    while engine.has_work:
        collected.take(engine.step())
        now[0] += 1.0
    assert list(collected.waited["both-0"]) == [0, 1], "its prompt takes two steps"
    assert list(collected.waited["both-1"]) == [0, 2], "it shares the steps of its prompt, and adds one"
    assert list(collected.waited["late"]) == [4, 0], "rows are free when the others have ended"


def test_sequences_of_a_beam_search_say_how_long_it_waited():
    now = [0.0]
    engine = make_engine(FakeExecutor(num_blocks=64, block_size=4), budget=8, clock=lambda: now[0])
    engine.add(["a", "b"], [1] * 15, SamplingParams(beam_width=2, n=2, max_tokens=4))
    collected = Collected()
    while engine.has_work:
        now[0] += 1.0
        collected.take(engine.step())
    assert {name: list(waited) for name, waited in collected.waited.items()} == {"a": [1, 1], "b": [1, 1]}


def test_a_full_queue_refuses_and_says_when_to_come_back():
    engine = make_engine(FakeExecutor(), queue=2)
    params = SamplingParams(max_tokens=4)
    engine.add(["a"], [1], params)
    engine.add(["b"], [1], params)
    with pytest.raises(Overloaded, match="2 requests are waiting, at most 2 may") as caught:
        engine.add(["c"], [1], params)
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
        engine.add(["a"], prompt, SamplingParams(max_tokens=max_tokens))
    assert not engine.has_work


def test_a_cache_too_small_for_one_request_is_a_configuration_error():
    cache = KVCacheManager(CacheLayout(4, [0]), num_blocks=3)
    with pytest.raises(ConfigError, match="has 2 blocks of 4 tokens, but one request of model.max_model_len 9 needs 3"):
        Scheduler(ResolvedScheduler(max_num_seqs=4, max_num_batched_tokens=64), cache, max_model_len=9)


def test_a_result_out_of_order_is_an_error():
    engine = make_engine(FakeExecutor(), window=2)
    engine.add(["a"], [1, 2], SamplingParams(max_tokens=8))
    engine.step()
    with pytest.raises(RuntimeError, match="does not answer"):
        engine._scheduler.update(Sampled(99, [1]), 0.0)


def test_a_worker_failure_reaches_the_caller():
    executor = FakeExecutor()
    executor.fail_at = 1
    engine = make_engine(executor)
    engine.add(["a"], [1], SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="told to fail"):
        engine.step()
    with pytest.raises(EngineDeadError, match="a step failed: RuntimeError: the fake worker was told to fail"):
        engine.step()


def test_samples_of_one_prompt_compute_it_once():
    executor = FakeExecutor(block_size=4)
    engine = make_engine(executor)
    prompt = list(range(1, 31))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add(["a", "b", "c", "d"], prompt, params)
    collected = run_to_end(engine)
    assert {id: tokens for id, tokens in collected.tokens.items()} == dict.fromkeys(
        "abcd", expected_tokens(prompt, params, 64)[0]
    )
    # The prompt, once more its last token for each of three forks, and three steps of decode for all.
    assert executor.num_computed == 30 + 3 + 4 * 3
    assert sum(collected.cached.values()) == 0, "a fork is no hit of the cache"


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 3, 16])
def test_beam_search_equals_the_naive_one(width, length_penalty, early_stopping):
    params = SamplingParams(
        max_tokens=12,
        n=width,
        beam_width=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        stop_token_ids=tuple(range(12)),
    )
    engine = make_engine(FakeExecutor(num_blocks=400), max_num_seqs=16, window=2)
    ids = [str(index) for index in range(width)]
    engine.add(ids, [20, 21, 22], params)
    collected = run_to_end(engine)
    results = [(collected.tokens[id], collected.reasons[id]) for id in ids]
    assert results == expected_beams([20, 21, 22], params, 64)


@pytest.mark.parametrize("num_top", [0, 2, 9, -1])
@pytest.mark.parametrize("num_blocks", [400, 14])
def test_beams_report_log_probabilities_of_their_tokens_and_of_the_prompt(num_top, num_blocks):
    """Also where beams are preempted and compute their tokens again."""
    prompt = [20, 21, 22, 23, 24]
    params = SamplingParams(max_tokens=8, n=3, beam_width=3, ignore_eos=True, logprobs=num_top, prompt_logprobs=1)
    engine = make_engine(
        FakeExecutor(num_blocks=num_blocks, block_size=2, max_model_len=16), window=2, budget=5, max_num_seqs=5
    )
    engine._generation = GenerationConfig(max_logprobs=VOCAB)
    engine.add(["0", "1", "2"], prompt, params)
    if num_blocks < 20:
        engine.add(["other"], [1], SamplingParams(max_tokens=12, ignore_eos=True))
    found = {delta.request_id: delta for delta in all_deltas(engine) if delta.request_id != "other"}
    assert (engine.stats().num_preemptions > 0) == (num_blocks < 20)
    assert [(found[id].token_ids, found[id].finish_reason) for id in "012"] == expected_beams(prompt, params, 16)
    for id in "012":
        whole = [*prompt, *found[id].token_ids]
        count = VOCAB if num_top == -1 else num_top
        assert found[id].logprobs == logprobs_of(whole, range(len(prompt), len(whole)), count)
    assert found["0"].prompt_logprobs == logprobs_of(prompt, range(1, len(prompt)), 1)
    assert found["1"].prompt_logprobs is None


@pytest.mark.parametrize("early_stopping", [False, True])
def test_beams_end_where_their_text_does(early_stopping):
    """Here a text ends with any token below 20; the sequence is said to have its length, so that its last token is part
    of the text."""
    params = SamplingParams(
        max_tokens=12, n=3, beam_width=3, ignore_eos=True, stop=("x",), early_stopping=early_stopping, length_penalty=0
    )
    asked = []

    def ends(output):
        return output[-1] < 20

    def text_ends(given):
        asked.append(given)
        return ends

    engine = make_engine(FakeExecutor(num_blocks=400), window=2, text_ends=text_ends)
    engine.add(["0", "1", "2"], [20, 21, 22], params)
    engine.add(["plain"], [20, 21, 22], replace(params, beam_width=0, n=1))
    found = run_to_end(engine)
    assert [(found.tokens[id], found.reasons[id]) for id in "012"] == expected_beams([20, 21, 22], params, 64, ends)
    assert any(len(found.tokens[id]) < 12 for id in "012")
    assert asked == [params], "who samples one sequence looks for stop strings in its text"


def test_a_search_that_is_to_generate_nothing_reports_the_prompt_alone():
    engine = make_engine(FakeExecutor())
    engine.add(["0", "1"], [5, 6], SamplingParams(max_tokens=0, n=2, beam_width=2, prompt_logprobs=0))
    first, second = all_deltas(engine)
    assert (first.token_ids, first.finish_reason, second.token_ids) == ([], "length", [])
    assert first.prompt_logprobs == logprobs_of([5, 6], range(1, 2), 0)


def all_deltas(engine):
    found = []
    while engine.has_work:
        found += engine.step()
    return found


def test_beams_share_the_prompt():
    executor = FakeExecutor(num_blocks=400)
    engine = make_engine(executor, max_num_seqs=4)
    params = SamplingParams(max_tokens=5, beam_width=4, n=1, ignore_eos=True)
    engine.add(["a"], list(range(1, 41)), params)
    run_to_end(engine)
    assert executor.num_computed == 40 + 4 * 4


def test_a_second_request_of_the_same_prompt_says_what_it_found():
    executor = FakeExecutor(block_size=4)
    engine = make_engine(executor)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for id in "ab":
        engine.add([id], list(range(1, 31)), params)
        collected = run_to_end(engine)
    assert collected.cached["b"] == 28
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (60, 28)
    assert executor.num_computed == (30 + 2) + (2 + 2)


def test_blocks_are_shared_within_the_step_that_computes_them():
    executor = FakeExecutor(block_size=4)
    engine = make_engine(executor)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.add(["a"], list(range(1, 31)), params)
    engine.add(["b"], list(range(1, 31)), params)
    collected = Collected()
    collected.take(engine.step())
    assert collected.cached == {"a": 0, "b": 28}
    assert executor.num_computed == 30 + 2


def test_swapped_requests_compute_nothing_twice():
    computed = []
    for num_host_blocks in (0, 100):
        executor = FakeExecutor(num_blocks=9, block_size=2, max_model_len=16, num_host_blocks=num_host_blocks)
        engine = make_engine(executor, prefix_caching=False)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        for index in range(3):
            engine.add([str(index)], [index + 1] * 4, params)
        collected = run_to_end(engine)
        for index in range(3):
            assert collected.tokens[str(index)] == expected_tokens([index + 1] * 4, params, 16)[0]
        assert engine.stats().num_preemptions > 0
        assert engine.stats().num_swaps == (engine.stats().num_preemptions if num_host_blocks else 0)
        computed.append(executor.num_computed)
    assert computed[1] == 3 * 15 < computed[0]


def test_a_host_block_is_given_again_before_anything_was_copied_into_it():
    """No plan follows when "a" gives way: its copy to the host still waits when it ends and a search gets the block."""
    executor = FakeExecutor(num_blocks=6, block_size=2, max_model_len=10, num_host_blocks=2)
    engine = make_engine(executor, window=2, prefix_caching=False)
    search = SamplingParams(max_tokens=4, beam_width=1, ignore_eos=True)
    for id in ("first", "second"):
        engine.add([id], [len(id)] * 4, search)
    engine.add(["a"], [1, 2], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.step()
    assert engine.stats().num_swaps == 1
    engine.abort("a")
    collected = run_to_end(engine)
    assert engine.stats().num_swaps == 2, "the second search takes the host blocks of the request that ended"
    for id in ("first", "second"):
        assert (collected.tokens[id], collected.reasons[id]) == expected_beams([len(id)] * 4, search, 10)[0]


def test_a_deadline_ends_a_running_request_and_says_so():
    times = iter(range(1000))
    engine = make_engine(FakeExecutor(), clock=lambda: float(next(times)))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.add(["a"], [1, 2], params, RequestOptions(deadline_s=10.0))
    engine.add(["b"], [1, 2], params)
    deltas = []
    while engine.has_work:
        deltas += [delta for delta in engine.step() if delta.finish_reason is not None]
    assert [(delta.request_id, delta.finish_reason) for delta in deltas] == [("a", "deadline"), ("b", "length")]
    assert "deadline_s 10" in deltas[0].message


def test_a_request_that_waits_too_long_ends_without_a_token():
    times = iter(range(1000))
    engine = make_engine(FakeExecutor(), max_num_seqs=1, clock=lambda: float(next(times)))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.add(["a"], [1, 2], params)
    engine.step()
    engine.add(["b"], [1, 2], params, RequestOptions(queue_timeout_s=5.0))
    collected = run_to_end(engine)
    assert collected.reasons == {"a": "length", "b": "deadline"}
    assert collected.tokens["b"] == []


def test_priority_goes_first_and_the_lowest_gives_way():
    executor = FakeExecutor(num_blocks=9, block_size=2, max_model_len=16)
    engine = make_engine(executor, policy="priority", max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    for id, priority in (("low", 5), ("high", -5), ("mid", 0)):
        engine.add([id], [len(id)] * 4, params, RequestOptions(priority=priority))
    assert list(run_to_end(engine).reasons) == ["high", "mid", "low"]


def test_with_stages_each_request_decodes_in_every_so_manyth_plan():
    executor = FakeExecutor()
    engine = make_engine(executor, window=4, num_stages=3)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for index in range(6):
        engine.add([str(index)], [index + 1] * 4, params)
    rows = []
    submit = executor.submit

    def noting(plan):
        rows.append(sorted(plan.rows))
        submit(plan)

    executor.submit = noting
    for _ in range(10):
        engine.step()
    assert rows[0] == [0, 1, 2, 3, 4, 5], "the prompts"
    for turn in range(1, 10, 3):
        assert sorted(rows[turn] + rows[turn + 1] + rows[turn + 2]) == rows[0]
        assert rows[turn : turn + 3] == rows[1:4], "everybody's turn comes after equally many plans"


def test_a_long_prompt_takes_only_its_share_of_a_step():
    executor = FakeExecutor(num_blocks=200, max_model_len=200)
    engine = make_engine(executor, budget=40, max_num_seqs=4, max_prompt_share=0.5)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add(["long"], [3] * 150, params)
    engine.add(["short"], [1, 2], params)
    assert [delta.request_id for delta in engine.step()] == ["short"]
    assert executor.num_computed == 20 + 2


def test_too_wide_a_beam_is_refused():
    engine = make_engine(FakeExecutor())
    engine.info = engine.info._replace(vocab_size=20)
    with pytest.raises(RequestRejected, match="beam_width is 16, but half of this model's 20 tokens"):
        engine.add(["a"], [1], SamplingParams(beam_width=16, max_tokens=2))


def test_a_deadline_ends_a_whole_beam_search():
    times = iter(range(1000))
    engine = make_engine(FakeExecutor(), clock=lambda: float(next(times)))
    params = SamplingParams(max_tokens=40, beam_width=3, n=2)
    engine.add(["a", "b"], [1, 2], params, RequestOptions(deadline_s=20.0))
    collected = run_to_end(engine)
    assert collected.reasons == {"a": "deadline", "b": "deadline"}
    audit(engine)


def test_a_search_that_has_begun_is_not_ended_by_its_time_in_the_queue():
    times = iter(range(1000))
    engine = make_engine(FakeExecutor(num_blocks=100), max_num_seqs=2, clock=lambda: float(next(times)))
    params = SamplingParams(max_tokens=10, beam_width=4, ignore_eos=True)
    engine.add(["a"], [20, 21], params, RequestOptions(queue_timeout_s=5.0))
    assert run_to_end(engine).reasons == {"a": "length"}


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(beam_width=3)], ids=["plain", "beams"]
)
def test_fair_charges_a_prompt_once_and_every_output_token(params, prefix_caching):
    """Also what preemptions compute again, and what beams report."""
    params = replace(params, max_tokens=10, ignore_eos=True)
    executor = FakeExecutor(num_blocks=17, block_size=2, max_model_len=24)
    engine = make_engine(executor, policy="fair", budget=8, max_num_seqs=3, prefix_caching=prefix_caching)
    served = Counter()
    policy = engine._scheduler._policy
    count = policy.served

    def counting(request, prompt_tokens, output_tokens):
        served[request.options.tenant, "in"] += prompt_tokens
        served[request.options.tenant, "out"] += output_tokens
        count(request, prompt_tokens, output_tokens)

    policy.served = counting
    for index, tenant in enumerate("abc"):
        engine.add([tenant], [30 + index] * 10, params, RequestOptions(tenant=tenant))
    collected = run_to_end(engine)
    assert engine.stats().num_preemptions > 0, "the test is meant to preempt"
    assert sum(collected.cached.values()) == 0, "what a request finds of its own is no hit"
    for tenant in "abc":
        assert served[tenant, "in"] == 10
        assert served[tenant, "out"] >= 10
        if not params.beam_width:
            assert served[tenant, "out"] == 10


def test_forks_of_a_running_prompt_do_not_fill_the_queue():
    engine = make_engine(FakeExecutor(num_blocks=200), max_num_seqs=2, queue=2, max_queued_tokens=20)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    engine.add([f"a{index}" for index in range(10)], [5] * 30, params)
    for _ in range(3):
        engine.step()
    assert engine.stats().waiting >= 7
    assert engine.stats().waiting_tokens == 0
    engine.add(["b"], [1, 2], params)
    assert len(run_to_end(engine).reasons) == 11


def test_idle_beams_give_their_rows_to_those_who_wait():
    engine = make_engine(FakeExecutor(num_blocks=400), max_num_seqs=3, max_prompt_share=0.3)
    plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine.add(["long"], [1, 2], plain)
    engine.add(["search"], [3, 4], SamplingParams(max_tokens=20, beam_width=8, ignore_eos=True))
    for index in range(4):
        engine.add([f"short{index}"], [5, 6 + index], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    collected = run_to_end(engine)
    assert list(collected.reasons)[-1] in ("long", "search")


def test_a_deadline_is_predicted_without_what_is_cached():
    executor = FakeExecutor(num_blocks=100)
    engine = make_engine(executor, clock=lambda: executor.num_computed * 0.05, budget=30)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for index in range(4):
        engine.add([f"warm{index}"], [index + 1] * 50, params)
    run_to_end(engine)
    engine.add(["busy"], [60] * 4, replace(params, max_tokens=50))
    engine.step()
    in_time = RequestOptions(deadline_s=3.0)
    with pytest.raises(Overloaded, match=r"deadline_s is 3, .* for 50 prompt tokens"):
        engine.add(["new"], [50] * 50, params, in_time)
    engine.add(["known"], [1] * 50, params, in_time)


def test_after_a_reset_nothing_computed_before_is_found():
    engine = make_engine(FakeExecutor(num_blocks=100), budget=8)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add(["a"], list(range(1, 41)), params)
    engine.step()
    engine.reset_prefix_cache()
    run_to_end(engine)
    engine.add(["b"], list(range(1, 41)), params)
    assert run_to_end(engine).cached["b"] == 0
