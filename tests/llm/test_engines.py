"""LLMEngine and AsyncLLM: what LLM gives, step by step and for many callers at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from raylm import LLM, AsyncLLM, EngineConfig, LLMEngine, SamplingParams
from raylm.core.step import TokenDelta
from raylm.errors import EngineDeadError, RequestRejected
from raylm.llm import Completion, Metric
from tests.support import checkpoints
from tests.support.greedy import random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def config(path: Path) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model": {"path": str(path), "name": "tiny", "max_model_len": 64},
            "scheduler": {"max_num_seqs": 4, "max_queued_requests": 4},
            "cache": {"num_blocks": 60},
            "runtime": {"device": "cpu"},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    return random_prompts(10, 64)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[Completion]:
    llm = LLM(config(folder), progress=False)
    found = llm.generate(prompts, GREEDY, progress=False)
    llm.close()
    return found


@pytest.fixture
def engine(folder: Path) -> Iterator[LLMEngine]:
    engine = LLMEngine(config(folder), progress=False)
    yield engine
    engine.shutdown()


@pytest.fixture
async def llm(folder: Path) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(config(folder), progress=False)
    yield llm
    llm.shutdown()


class Held:
    """Lets an engine's thread make as many steps as a test allows. A thread of a tiny model's engine may otherwise make
    all tokens of a request before the event loop takes the first."""

    def __init__(self, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self._allowed = threading.Semaphore(0)
        self._is_open = False
        self._step = llm._engine.step
        self._engine = llm._engine
        monkeypatch.setattr(llm._engine, "step", self._held)

    def allow(self) -> None:
        """One step."""
        self._allowed.release()

    def open(self) -> None:
        """Every step from now on."""
        self._is_open = True
        self._allowed.release()

    def _held(self) -> list[TokenDelta]:
        if self._engine.has_work and not self._is_open:
            self._allowed.acquire()
        return self._step()


@pytest.fixture
def held(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(llm, monkeypatch)
    yield held
    held.open()


def values(metrics: list[Metric]) -> dict[str, float]:
    return {metric.name: metric.value for metric in metrics}


def test_completions_have_what_vllms_have(expected: list[Completion]) -> None:
    assert [completion.request_id for completion in expected] == [str(index) for index in range(10)]
    for completion in expected:
        metrics = completion.metrics
        assert completion.finished and metrics is not None
        times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time]
        times += [metrics.last_token_time, metrics.finished_time]
        assert None not in times and times == sorted(times), "each comes after the one before"
        assert metrics.time_in_queue == metrics.first_scheduled_time - metrics.arrival_time
        assert [output.index for output in completion.outputs] == [0]


def test_steps_give_what_llm_gives(engine: LLMEngine, prompts: list[list[int]], expected: list[Completion]) -> None:
    for index, prompt in enumerate(prompts):
        engine.add_request(f"r.{index}", prompt, GREEDY)
    assert engine.get_num_unfinished_requests() == 10
    ended: dict[str, Completion] = {}
    lengths: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for completion in engine.step():
            output = completion.outputs[0]
            lengths.setdefault(completion.request_id, []).append(len(output.token_ids))
            assert completion.finished == (output.finish_reason is not None)
            if completion.finished:
                ended[completion.request_id] = completion
    assert [ended[f"r.{index}"] for index in range(10)] == expected
    assert all(each == list(range(1, 13)) for each in lengths.values()), "a request comes with each of its tokens"
    found = values(engine.get_metrics())
    assert found["raylm:num_requests_running"] == 0 and found["raylm:iteration_tokens_total_sum"] > 120
    assert engine.get_metrics()[0].labels == {"model_name": "tiny", "engine": "local"}


def test_texts_grow_and_several_outputs_are_one_completion(engine: LLMEngine) -> None:
    hot = SamplingParams(temperature=1.5, seed=3, n=2, max_tokens=8, ignore_eos=True, logprobs=1)
    engine.add_request("a", [5, 6, 7], hot)
    texts = [""]
    while engine.has_unfinished_requests():
        for completion in engine.step():
            assert [output.index for output in completion.outputs] == [0, 1]
            output = completion.outputs[0]
            assert output.text.startswith(texts[-1])
            listed = zip(output.token_ids, output.logprobs or [], strict=True)
            assert output.cumulative_logprob == sum(each[token].logprob for token, each in listed)
            texts.append(output.text)
    assert len(set(texts)) > 2, "the text is there before its end"


def test_aborted_requests_are_gone_wherever_they_were(engine: LLMEngine) -> None:
    for index in range(10):
        engine.add_request(str(index), [5, 6 + index], ENDLESS)
    engine.step()
    with pytest.raises(RequestRejected, match="request_id '3' is that of an unfinished request"):
        engine.add_request("3", [5], GREEDY)
    engine.abort_request([str(index) for index in range(9)])
    engine.abort_request("unknown")
    seen = set()
    while engine.has_unfinished_requests():
        seen |= {completion.request_id for completion in engine.step()}
    assert seen == {"9"} and engine.engine.stats().kv_usage == 0
    with pytest.raises(RequestRejected, match="64"):
        engine.add_request("long", [5] * 65, GREEDY)
    assert not engine.has_unfinished_requests()


def test_tokenizer(engine: LLMEngine) -> None:
    tokenizer = engine.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("hello", False)) == "hello"


async def last(llm: AsyncLLM, prompt: list[int], params: SamplingParams, request_id: str | None = None) -> Completion:
    found = None
    async for completion in llm.generate(prompt, sampling_params=params, request_id=request_id):
        found = completion
    assert found is not None and found.finished
    return found


async def test_many_callers_at_once(llm: AsyncLLM, prompts: list[list[int]], expected: list[Completion]) -> None:
    # More than run and wait in the engine.
    assert await asyncio.gather(*(last(llm, prompt, GREEDY) for prompt in prompts)) == expected
    with pytest.raises(RequestRejected, match="64"):
        await last(llm, [5] * 65, GREEDY)
    assert llm.is_running


async def test_tokens_come_as_they_are_made(llm: AsyncLLM, held: Held) -> None:
    held.allow()
    lengths = []
    async for completion in llm.generate([5, 6], ENDLESS):
        lengths.append(len(completion.outputs[0].token_ids))
        held.allow()  # The step behind this token: it has come before another one was made.
    assert lengths == list(range(1, 61))


async def test_a_conversation_is_answered_as_llm_answers_it(llm: AsyncLLM, held: Held, folder: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    alone = LLM(config(folder), progress=False)
    (expected,) = alone.chat(messages, GREEDY, progress=False)
    alone.close()
    held.allow()
    texts = []
    async for completion in llm.chat(messages, GREEDY, "a conversation"):
        texts.append(completion.outputs[0].text)
        held.allow()
    assert completion == expected and texts[-1] == expected.outputs[0].text
    assert len(texts) == 12 and len(set(texts)) > 2, "a text comes with each token, before its end"
    with pytest.raises(RequestRejected):
        async for _ in llm.chat([{"role": "nobody"}], GREEDY):
            pass


async def test_tokenizer_and_metrics_of_many_callers(llm: AsyncLLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("the", add_special_tokens=False)) == "the"
    before = values(llm.get_metrics())
    await last(llm, [1, 2, 3], GREEDY)
    after = values(llm.get_metrics())
    name = "raylm:engine_generation_tokens_total"
    assert after[name] - before[name] == 12


async def free(llm: AsyncLLM) -> None:
    """Until nothing runs or waits."""
    while any(values(llm.get_metrics())[f"raylm:num_requests_{state}"] for state in ("running", "waiting")):
        await asyncio.sleep(0.01)


async def test_who_leaves_or_is_cancelled_ends_the_request(llm: AsyncLLM) -> None:
    async with aclosing(llm.generate([5, 6], ENDLESS, "left")) as completions:
        async for _ in completions:
            break
    assert not llm._live
    await free(llm)
    task = asyncio.create_task(last(llm, [5, 6], ENDLESS, "cancelled"))
    while "cancelled" not in llm._live:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not llm._live
    await free(llm)


async def test_abort_ends_with_a_reason(llm: AsyncLLM, held: Held) -> None:
    found: list[Completion] = []
    held.allow()
    async for completion in llm.generate([5, 6], ENDLESS, "a"):
        if not found:
            await llm.abort("a")
            with pytest.raises(RequestRejected, match="request_id 'a' is that of an unfinished request"):
                await last(llm, [5], GREEDY, "a")
        found.append(completion)
    assert found[-1].outputs[0].finish_reason == "abort" and len(found[-1].outputs[0].token_ids) == 1
    await llm.abort("a")


async def test_after_shutdown_callers_get_a_reason(folder: Path) -> None:
    llm = AsyncLLM(config(folder), progress=False)
    await llm.check_health()
    llm.shutdown()
    llm.shutdown()
    assert not llm.is_running
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        await llm.check_health()
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        await last(llm, [5], GREEDY)
