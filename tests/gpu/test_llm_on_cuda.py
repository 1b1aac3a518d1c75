"""The whole engine on a GPU, with CUDA graphs and without: against transformers, under memory pressure, and in what it
must not do: wait for the device in a step, or grow."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from raylm import LLM, EngineConfig, SamplingParams
from raylm.config.resolve import resolve
from raylm.core.step import NewBlocks, NewRow, RowSampling, Sampled, StepPlan
from raylm.core.thinking import ThinkingSection
from raylm.errors import ConfigError
from raylm.executor.local import LocalExecutor
from raylm.executor.step_channel import PlanReceiver, PlanSender, serve
from raylm.layers.linear import MIN_ROWS_TO_ADD
from raylm.worker.pending import Outputs, PendingStep
from raylm.worker.worker import Worker
from tests.support import checkpoints
from tests.support.greedy import assert_greedy, random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TIGHT = {
    "cache": {"block_size": 16, "num_blocks": 13},
    "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
}
"""Chunks of 16 tokens, and memory for about four of the requests below."""
ROOMY = {"cache": {"block_size": 16, "num_blocks": 200}, "scheduler": {"max_num_seqs": 8}}


def load(folder: Path, *, graphs: bool = True, dtype: str = "float32", **sections: dict[str, object]) -> LLM:
    data = {**ROOMY, **sections}
    data["model"] = {"path": str(folder), "max_model_len": 64, "dtype": dtype, **data.get("model", {})}
    data["runtime"] = {"device": "cuda", "cuda_graphs": graphs, **data.get("runtime", {})}
    return LLM(EngineConfig.model_validate(data), progress=False)


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    completions = llm.generate(prompts, params, progress=False)
    return [[output.token_ids for output in completion.outputs] for completion in completions]


def assert_most_greedy(
    reference: PreTrainedModel, prompts: list[list[int]], found: list[list[list[int]]], *, dtype: str
) -> None:
    """As assert_greedy for each prompt. Experts whose scores are as good as equal are chosen by rounding, and random
    ones give something else altogether: in 16 bits up to half of the prompts may go another way, as transformers' own
    do."""
    astray = 0
    for prompt, [tokens] in zip(prompts, found, strict=True):
        try:
            assert_greedy(reference, prompt, tokens)
        except AssertionError:
            astray += 1
    has_experts = any("router" in name or name.endswith("gate.weight") for name, _ in reference.named_parameters())
    assert astray <= (len(prompts) // 2 if has_experts and dtype == "bfloat16" else 0)


def equals_transformers(folder: Path, graphs: bool, dtype: str) -> None:
    reference = checkpoints.reference(folder)
    if dtype == "bfloat16":
        # Weights rounded as ours are: what is compared is the arithmetic.
        for parameter in reference.parameters():
            parameter.data = parameter.data.bfloat16().float()
    llm = load(folder, graphs=graphs, dtype=dtype, **TIGHT)
    prompts = random_prompts(8, llm.info.vocab_size)
    for _ in range(3):  # Graphs are there from the second time on.
        found = run(llm, prompts)
        assert all(len(tokens) == 24 for [tokens] in found)
        assert_most_greedy(reference, prompts, found, dtype=dtype)
    assert llm._engine.stats().num_preemptions > 0, "the test is meant to preempt"
    llm.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = load(folder)
    yield llm
    llm.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_each_family_equals_transformers_under_memory_pressure(
    family: str, graphs: bool, dtype: str, tmp_path: Path
) -> None:
    equals_transformers(checkpoints.FAMILIES[family](tmp_path), graphs, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["ArceeForCausalLM", "VaultGemmaForCausalLM", "Ernie4_5_MoeForCausalLM"])
def test_a_model_of_transformers_does_too(name: str, graphs: bool, dtype: str, tmp_path: Path) -> None:
    changes = checkpoints.ERNIE_EXPERTS if "Moe" in name else {"sliding_window": 8} if "Gemma" in name else {}
    equals_transformers(checkpoints.of_transformers(name, tmp_path, **changes), graphs, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_each_family_equals_transformers_in_steps_of_many_rows(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other kernels take these: sums within products, gated products."""
    folder = checkpoints.FAMILIES[family](tmp_path, intermediate_size=128)
    reference = checkpoints.reference(folder)
    if dtype == "bfloat16":
        for parameter in reference.parameters():
            parameter.data = parameter.data.bfloat16().float()
    cache = {"block_size": 16, "num_blocks": 800}
    llm = load(folder, dtype=dtype, scheduler={"max_num_seqs": 48, "max_num_batched_tokens": 2048}, cache=cache)
    prompts = [[(7 * n + position) % llm.info.vocab_size for position in range(40)] for n in range(48)]
    params = dataclasses.replace(GREEDY, max_tokens=4)
    rows, submit = [], LocalExecutor.submit

    def counted(executor: LocalExecutor, plan: StepPlan) -> None:
        rows.append(plan.total_tokens)
        submit(executor, plan)

    monkeypatch.setattr(LocalExecutor, "submit", counted)
    assert_most_greedy(reference, prompts, run(llm, prompts, params), dtype=dtype)
    assert max(rows) >= MIN_ROWS_TO_ADD
    llm.close()


FEATURES = {
    "overlap off": {"runtime": {"plans_in_flight": 1}},
    "tight": TIGHT,
    "swap": {**TIGHT, "cache": {**TIGHT["cache"], "swap_gib": 0.05}},
    "no prefix cache": {**TIGHT, "cache": {**TIGHT["cache"], "prefix_caching": False}},
    "eager": {"runtime": {"cuda_graphs": False}},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_no_feature_changes_a_token(feature: str, folder: Path, llm: LLM) -> None:
    prompts = random_prompts(8, llm.info.vocab_size)
    other = load(folder, **FEATURES[feature])
    samples = SamplingParams(temperature=1.1, top_p=0.95, seed=5, n=2, max_tokens=12, ignore_eos=True)
    paying = dataclasses.replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    for params in (GREEDY, samples, paying):
        expected = run(llm, prompts, params)
        for _ in range(2):
            assert run(other, prompts, params) == expected
    other.close()


def test_a_prefix_that_came_before_is_found_and_changes_no_token(folder: Path) -> None:
    llm = load(folder)
    prompt = [9] * 35
    first, second = (llm.generate([prompt], GREEDY, progress=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.outputs == second.outputs
    llm.close()


def test_log_probabilities_and_beams_are_those_of_the_cpu(folder: Path, llm: LLM) -> None:
    cpu = load(folder, runtime={"device": "cpu"})
    wishes = [
        SamplingParams(temperature=1.3, n=2, seed=3, max_tokens=6, ignore_eos=True, logprobs=0),
        SamplingParams(beam_width=4, n=3, max_tokens=6, ignore_eos=True),
    ]
    for params in wishes:
        for _ in range(3):
            ours, theirs = (one.generate([[5, 6, 7]], params, progress=False)[0].outputs for one in (llm, cpu))
            assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]
            if params.logprobs is not None:
                for mine, other in zip(ours, theirs, strict=True):
                    assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=6e-3)
    assert llm._engine.stats().kv_usage == 0
    cpu.close()


def test_mixed_wishes_share_a_batch(folder: Path, llm: LLM) -> None:
    wishes = [
        GREEDY,
        dataclasses.replace(GREEDY, logprobs=0),
        SamplingParams(temperature=0.9, top_k=7, seed=2, max_tokens=24, ignore_eos=True),
        SamplingParams(beam_width=2, n=2, max_tokens=8, ignore_eos=True),
    ]
    prompts = random_prompts(4, llm.info.vocab_size)
    together = llm.generate(prompts, wishes, progress=False)
    alone = [llm.generate([prompt], own, progress=False)[0] for prompt, own in zip(prompts, wishes, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert [output.token_ids for output in one.outputs] == [output.token_ids for output in other.outputs]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_no_step_waits_for_the_device(folder: Path, graphs: bool) -> None:
    llm = load(folder, graphs=graphs, cache={"block_size": 16, "num_blocks": 13, "swap_gib": 0.05})
    prompts = random_prompts(8, llm.info.vocab_size)
    expected = run(llm, prompts)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [run(llm, prompts) for _ in range(2)]
        wanted = dataclasses.replace(GREEDY, logprobs=0, repetition_penalty=1.3, frequency_penalty=0.4)
        assert llm.generate(prompts[:2], wanted, progress=False)[0].outputs[0].logprobs
        llm.generate(prompts[:1], SamplingParams(beam_width=3, max_tokens=8), progress=False)
        section = ThinkingSection(begin=(4,), end=(17, 18), begun=True)
        thinks = dataclasses.replace(GREEDY, thinking=section, thinking_token_budget=3)
        assert all(tokens[3:5] == [17, 18] for one in run(llm, prompts, thinks) for tokens in one)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found == [expected] * 2
    llm.close()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("name", ["ArceeForCausalLM", "Ernie4_5_MoeForCausalLM"])
def test_no_step_through_transformers_waits_for_the_device(name: str, tmp_path: Path) -> None:
    changes = {**checkpoints.ERNIE_EXPERTS, "head_dim": 64, "moe_intermediate_size": 64} if "Moe" in name else {}
    llm = load(checkpoints.of_transformers(name, tmp_path, **changes), dtype="bfloat16")
    prompts = random_prompts(8, llm.info.vocab_size)
    run(llm, prompts)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(llm, prompts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    llm.close()


def test_ten_thousand_steps_take_no_more_memory(folder: Path) -> None:
    llm = load(folder, **TIGHT)
    prompts = random_prompts(8, llm.info.vocab_size)
    for _ in range(4):
        run(llm, prompts)
    gc.collect()
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    first = llm._engine._scheduler._step
    while llm._engine._scheduler._step < first + 10_000:
        run(llm, prompts)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() == reserved
    llm.close()


def test_a_closed_model_gives_its_memory_back(folder: Path) -> None:
    def use() -> int:
        llm = load(folder)
        run(llm, [[5, 6, 7]] * 4)
        llm.close()
        gc.collect()
        return torch.cuda.memory_allocated()

    use()  # cuBLAS keeps what it once took.
    assert use() == use()


def test_memory_that_does_not_suffice_is_refused_with_numbers(folder: Path) -> None:
    gpu = {"gpu_memory_utilization": 1e-4, "num_blocks": None}
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization 0.0001 of \d+\.\d GiB .* hold the weights"):
        load(folder, cache=gpu)
    with pytest.raises(
        ConfigError, match=r"free when a KV cache of 1000000000 blocks \(cache.num_blocks\) did not fit"
    ):
        load(folder, cache={"num_blocks": 10**9})
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-4)
    try:
        with pytest.raises(ConfigError, match=r"the GPU has \d+\.\d GiB of memory"):
            load(folder, model={"load_format": "dummy", "path": str(folder), "max_model_len": 64}, cache={})
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_cache_takes_what_the_largest_step_leaves(folder: Path) -> None:
    llm = load(folder, cache={"gpu_memory_utilization": 0.1})
    free, total = torch.cuda.mem_get_info()
    assert llm.info.num_blocks * llm.info.block_bytes > 0.05 * total
    run(llm, random_prompts(8, llm.info.vocab_size))
    assert torch.cuda.memory_reserved() < 0.1 * total
    assert set(llm.info.phases) == {"device", "weights", "memory", "warm_up", "graphs"}
    llm.close()


def test_a_worker_takes_the_next_plan_while_its_gpu_computes(folder: Path) -> None:
    config = EngineConfig.model_validate(
        {"model": {"path": str(folder), "max_model_len": 64}, "runtime": {"device": "cuda"}, "cache": {"num_blocks": 9}}
    )
    worker = Worker(resolve(config, "cuda"), progress=False)
    worker.start()
    sender = PlanSender()
    prompt = [5, 6, 7]
    sampling = RowSampling(SamplingParams(temperature=0.0))
    first = StepPlan(1, [NewRow(0, prompt, 0, sampling)], [NewBlocks(0, 0, 0, [1])], [0], [3])
    plans = [first, *(StepPlan(number, [], [], [0], [1]) for number in range(2, 10))]

    def work() -> None:
        channel = PlanReceiver(sender.addresses[0])
        serve(channel, worker.submit, worker.control)
        channel.close()

    thread = threading.Thread(target=work)
    thread.start()
    for plan in plans:
        sender.send(plan)
    results = [sender.receive(10_000) for _ in plans]
    sender.close()
    thread.join(10)
    assert not thread.is_alive()
    found = [token for result in results if result is not None for token in result.token_ids]
    assert [result.step for result in results if result is not None] == [plan.step for plan in plans]
    assert_greedy(checkpoints.reference(folder), prompt, found)


def test_a_step_that_samples_nothing_is_not_done_before_its_device_is():
    torch.cuda._sleep(200_000_000)
    step = PendingStep(1, Outputs(), torch.device("cuda"))
    assert not step.done
    assert step.result() == Sampled(1, [])
    assert step.done


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_model_gives_the_tokens_that_it_gives_on_a_cpu(dtype):
    reference = checkpoints.smollm2_reference()
    config = {"model": {"path": "smollm2-135m", "max_model_len": 128, "dtype": dtype}, "runtime": {"device": "cuda"}}
    llm = LLM(EngineConfig.model_validate(config), progress=False)
    prompts = [llm.text.encode(text) for text in ("The capital of France is", "Water boils at", "Once upon a time")]
    for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY, progress=False), strict=True):
        assert_greedy(reference, prompt, completion.outputs[0].token_ids)
    llm.close()
