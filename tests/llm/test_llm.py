"""Offline use through the whole engine, against transformers: every family, in batches, with little memory."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from raylm import LLM, EngineConfig, SamplingParams
from raylm.errors import ConfigError, RequestRejected
from tests.support import checkpoints
from tests.support.greedy import assert_greedy, random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def engine_config(path: Path | str, **sections) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"path": str(path), "max_model_len": 64}, **sections})


def small(path: Path | str, *, num_blocks: int = 40) -> EngineConfig:
    """Blocks of 4, chunks of 16 tokens, and memory for about three of the requests below."""
    return engine_config(
        path,
        cache={"block_size": 4, "num_blocks": num_blocks},
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 16},
        runtime={"device": "cpu"},
    )


KINDS_OF_CACHES = {
    "llama",
    "mistral",
    "gemma3",
    "gpt_oss",
    "phi3",
    "starcoder2",
    "bloom",
    "cohere2",
    "mixtral",
    "olmo3",
}
"""Families with groups of layers, windows, sinks, biases and experts among them: what preemption has to do with."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f in KINDS_OF_CACHES else [pytest.mark.nightly]) for f in checkpoints.FAMILIES],
)
def test_each_family_equals_transformers_under_memory_pressure(family, tmp_path):
    folder = checkpoints.FAMILIES[family](tmp_path)
    reference = checkpoints.reference(folder)
    # Blocks that have left the sliding window of all layers are given back, so these need fewer.
    slides = family in ("mistral", "phi3", "starcoder2")
    llm = LLM(small(folder, num_blocks=12 if slides else 40), progress=False)
    prompts = random_prompts(8, llm.info.vocab_size)
    completions = llm.generate(prompts, GREEDY, progress=False)
    assert llm._engine.stats().num_preemptions > 0, "the test is meant to preempt"
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.outputs[0].token_ids) == 24
        assert_greedy(reference, prompt, completion.outputs[0].token_ids)
    llm.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoints.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(folder):
    llm = LLM(engine_config(folder, runtime={"device": "cpu"}), progress=False)
    yield llm
    llm.close()


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_overlap_and_chunks_change_no_token(folder, llm, plans_in_flight):
    tight = small(folder)
    tight = tight.model_copy(update={"runtime": tight.runtime.model_copy(update={"plans_in_flight": plans_in_flight})})
    other = LLM(tight, progress=False)
    prompts = random_prompts(8, llm.info.vocab_size)
    params = [SamplingParams(temperature=0, max_tokens=4 + 2 * index) for index in range(8)]
    expected = [llm.generate([p], own, progress=False)[0] for p, own in zip(prompts, params, strict=True)]
    assert other.generate(prompts, params, progress=False) == expected
    other.close()


def test_a_seed_fixes_the_tokens_whatever_else_runs(llm):
    params = SamplingParams(temperature=1.2, top_p=0.95, seed=7, max_tokens=16, ignore_eos=True)
    alone = llm.generate([[5, 6, 7]], params, progress=False)[0].outputs[0].token_ids
    crowd = llm.generate([[5, 6, 7], [9] * 10, [3]], [params, GREEDY, GREEDY], progress=False)
    assert crowd[0].outputs[0].token_ids == alone
    assert llm.generate([[5, 6, 7]], params, progress=False)[0].outputs[0].token_ids == alone


def test_n_choices_differ_and_repeat(llm):
    params = SamplingParams(temperature=1.5, n=4, seed=1, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate([[5, 6, 7]], params, progress=False)[0].outputs for _ in range(2))
    assert first == second
    assert len({tuple(output.token_ids) for output in first}) == 4
    unseeded = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    outputs = [llm.generate([[5, 6, 7]], unseeded, progress=False)[0].outputs[0].token_ids for _ in range(2)]
    assert outputs[0] != outputs[1]


def test_a_drawn_seed_is_another_for_each_request_and_repeats_it(llm, monkeypatch):
    seeds = {}
    executor = llm._engine._executor
    submit = executor.submit

    def note(plan):
        seeds.update((tuple(new.token_ids), new.sampling.seed) for new in plan.new_rows)
        submit(plan)

    monkeypatch.setattr(executor, "submit", note)
    unseeded = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], [5, 6, 8]]
    outputs = [one.outputs[0].token_ids for one in llm.generate(prompts, unseeded, progress=False)]
    drawn = [seeds[tuple(prompt)] for prompt in prompts]
    assert len(set(drawn)) == 2
    again = [dataclasses.replace(unseeded, seed=seed) for seed in drawn]
    assert [one.outputs[0].token_ids for one in llm.generate(prompts, again, progress=False)] == outputs
    assert [seeds[tuple(prompt)] for prompt in prompts] == drawn
    list(llm.stream([5], unseeded))
    assert seeds[5,] not in (*drawn, 0)


def test_what_ends_an_output_is_told(llm):
    plain = llm.generate([[5, 6, 7]], GREEDY, progress=False)[0].outputs[0]
    assert plain.stop_reason is None
    token = plain.token_ids[2]
    stopped = dataclasses.replace(GREEDY, stop_token_ids=(token,))
    output = llm.generate([[5, 6, 7]], stopped, progress=False)[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", token)
    assert output.token_ids == plain.token_ids[: plain.token_ids.index(token) + 1]


def test_prompts_are_cut_to_their_last_tokens(llm):
    prompt = list(range(5, 60))
    params = dataclasses.replace(GREEDY, max_tokens=20)
    cut = llm.generate([prompt], params, truncate_prompt_tokens=3, progress=False)[0]
    assert cut == llm.generate([prompt[-3:]], params, progress=False)[0]
    fitting = llm.generate([prompt], params, truncate_prompt_tokens=-1, progress=False)[0]
    assert fitting.prompt_token_ids == prompt[-44:], "20 of 64 tokens are the output's"
    with pytest.raises(RequestRejected, match="must be -1 or at least 1, got 0"):
        llm.generate([prompt], params, truncate_prompt_tokens=0)


def test_special_tokens_around_a_prompt_are_a_choice(llm):
    texts = ["one two"]
    plain = llm.generate(texts, GREEDY, add_special_tokens=False, progress=False)[0].prompt_token_ids
    assert plain == llm.text.encode("one two", add_special_tokens=False)
    chat = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, progress=False)[0].prompt_token_ids
    assert chat == llm.text.chat([{"role": "user", "content": "Hi"}])


def test_log_probabilities_are_the_models_own(folder, llm):
    params = SamplingParams(temperature=1.3, n=2, seed=3, max_tokens=6, ignore_eos=True, logprobs=0)
    prompt = [5, 6, 7]
    outputs = llm.generate([prompt], params, progress=False)[0].outputs
    model = checkpoints.reference(folder)
    for output in outputs:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        own = [each[token].logprob for token, each in zip(output.token_ids, output.logprobs, strict=True)]
        torch.testing.assert_close(torch.tensor(own), expected, rtol=1e-3, atol=1e-3)
        assert output.cumulative_logprob == pytest.approx(sum(own))
    plain = llm.generate([prompt], GREEDY, progress=False)[0].outputs[0]
    assert plain.logprobs is None and plain.cumulative_logprob is None


def test_beams_come_best_first_and_no_worse_than_greedy(folder, llm):
    prompt = [5, 6, 7]
    model = checkpoints.reference(folder)

    @torch.inference_mode()
    def likelihood(tokens: list[int]) -> float:
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum().item()

    params = SamplingParams(beam_width=4, n=3, max_tokens=5, ignore_eos=True)
    beams = [output.token_ids for output in llm.generate([prompt], params, progress=False)[0].outputs]
    greedy = llm.generate([prompt], dataclasses.replace(GREEDY, max_tokens=5), progress=False)[0].outputs[0]
    scores = [likelihood(tokens) for tokens in beams]
    assert all(better > worse - 1e-3 for better, worse in pairwise(scores)), scores
    assert scores[0] > likelihood(greedy.token_ids) - 1e-3
    assert len({tuple(tokens) for tokens in beams}) == 3
    assert llm._engine.stats().kv_usage == 0


def test_a_prompt_that_came_before_is_cached(folder, llm):
    prompt = [9] * 40
    assert llm.generate([prompt], GREEDY, progress=False)[0].num_cached_tokens == 0
    again = dataclasses.replace(GREEDY, n=2)
    assert llm.generate([prompt], again, progress=False)[0].num_cached_tokens == 32, "two whole blocks of 16"
    other = LLM(str(folder), max_model_len=64, device="cpu", prefix_caching=False, progress=False)
    for _ in range(2):
        assert other.generate([prompt], GREEDY, progress=False)[0].num_cached_tokens == 0
    other.close()


def test_strings_chat_and_streams_give_the_same_text(llm):
    messages = [{"role": "user", "content": "hello"}]
    chat = llm.chat(messages, GREEDY, progress=False)
    assert llm.chat([messages, messages], GREEDY, progress=False) == chat * 2
    prompt_ids = llm.text.chat(messages)
    assert chat[0].prompt_token_ids == prompt_ids
    pieces = list(llm.stream(prompt_ids, GREEDY))
    assert "".join(piece.text for piece in pieces) == chat[0].outputs[0].text
    assert pieces[-1].finish_reason == "length"
    text = llm.generate("hello", GREEDY, progress=False)[0]
    assert (text.prompt, text.prompt_token_ids) == ("hello", llm.text.encode("hello"))


def test_leaving_a_stream_ends_its_request(llm):
    for _ in llm.stream([5, 6], GREEDY):
        break
    assert llm._engine.stats().running == 0
    assert llm._engine.stats().kv_usage == 0


def test_stop_tokens_and_stop_strings(llm):
    tokens = llm.generate([[5, 6, 7]], GREEDY, progress=False)[0].outputs[0].token_ids
    stop = next(token for index, token in enumerate(tokens) if index > 2 and token not in tokens[:index])
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=(stop,))
    output = llm.generate([[5, 6, 7]], params, progress=False)[0].outputs[0]
    assert (output.finish_reason, output.token_ids) == ("stop", tokens[: tokens.index(stop) + 1])
    text = llm.generate([[5, 6, 7]], GREEDY, progress=False)[0].outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(text[4:6],))
    output = llm.generate([[5, 6, 7]], params, progress=False)[0].outputs[0]
    assert output.finish_reason == "stop"
    assert output.text == text[: text.index(text[4:6])]
    assert len(output.token_ids) < 24
    assert llm._engine.stats().kv_usage == 0


def test_more_prompts_than_the_queue_holds(folder):
    config = engine_config(folder, scheduler={"max_queued_requests": 2, "max_num_seqs": 2}, runtime={"device": "cpu"})
    llm = LLM(config, progress=False)
    completions = llm.generate([[3, index + 3] for index in range(9)], GREEDY, progress=False)
    assert all(len(completion.outputs[0].token_ids) == 24 for completion in completions)
    llm.close()


def test_more_tokens_than_the_queue_holds(folder):
    scheduler = {"max_queued_tokens": 12, "max_num_seqs": 2}
    llm = LLM(engine_config(folder, scheduler=scheduler, runtime={"device": "cpu"}), progress=False)
    params = dataclasses.replace(GREEDY, n=3, max_tokens=4)
    completions = llm.generate([[3] * (index + 1) for index in range(9)], params, progress=False)
    assert all(len(output.token_ids) == 4 for completion in completions for output in completion.outputs)
    # A prompt longer than the whole limit gets in when nobody waits.
    assert llm.generate([[3] * 13], params, progress=False)
    llm.close()


def test_an_engine_without_followers_collects_no_events(folder):
    llm = LLM(engine_config(folder, cache={"events": True}, runtime={"device": "cpu"}), progress=False)
    llm.generate([[3] * 40], GREEDY, progress=False)
    assert llm._engine.take_events() is None
    llm.close()


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[3] * 64], GREEDY, "the prompt has 64 tokens, but this model takes 64"),
        ([[3] * 50], GREEDY, "the prompt has 50 tokens and max_tokens is 24"),
        ([[3], []], GREEDY, r"prompts\[1\]: the prompt is empty"),
        ([[3], [4]], [GREEDY], "params has 1 entries for 2 prompts"),
        ([[10**6]], GREEDY, "token id 1000000"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm, prompts, params, message):
    with pytest.raises(RequestRejected, match=message):
        llm.generate(prompts, params, progress=False)
    assert not llm._engine.has_work


HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("conversations", "message"),
    [
        (
            "hello",
            "^a conversation must be a list of messages such as .*, got 'hello'; a text",
        ),
        ([[HI], "hello"], r"^conversations\[1\]: a conversation must be a list"),
        ([{"role": "user"}], r"^messages\[0\]\.content must be a string"),
        (
            [[HI], [{"role": "user"}]],
            r"^conversations\[1\]: messages\[0\]\.content must",
        ),
        (
            [[HI], [HI | {"content": "w" * 999}]],
            r"^conversations\[1\]: the pro",
        ),
    ],
)
def test_a_bad_conversation_is_refused_by_its_place(llm, conversations, message):
    with pytest.raises(RequestRejected, match=message) as error:
        llm.chat(conversations, GREEDY, progress=False)
    assert error.value.param is not None
    assert not llm._engine.has_work


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"max_model_len": 10**6}}, "max_model_len 1000000 is over the model's own limit"),
        ({"cache": {"num_blocks": 3, "block_size": 4}}, "max_model_len 64 does not fit in the KV cache of 8 tokens"),
        ({"cache": {"cpu_memory_gib": 1e-6}}, "cache.cpu_memory_gib 1e-06 leaves 0.00 GiB"),
    ],
)
def test_a_model_that_does_not_fit_says_so(folder, sections, message):
    data = {"model": {"max_model_len": 64}, "runtime": {"device": "cpu"}, **sections}
    data["model"]["path"] = str(folder)
    with pytest.raises(ConfigError, match=message):
        LLM(EngineConfig.model_validate(data), progress=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_gpu_is_a_configuration_error(folder):
    with pytest.raises(ConfigError, match=r"runtime\.device 'cuda' was asked for, but torch sees no CUDA device"):
        LLM(str(folder), device="cuda", progress=False)


def test_prompts_as_vllm_wraps_them(tmp_path):
    llm = LLM(str(checkpoints.llama(tmp_path)), device="cpu", progress=False)
    plain = llm.generate(["The quick", [5, 6, 7]], GREEDY, progress=False)
    assert llm.generate([{"prompt": "The quick"}, {"prompt_token_ids": [5, 6, 7]}], GREEDY, progress=False) == plain
    assert llm.generate({"prompt": "The quick"}, GREEDY, progress=False) == plain[:1]
    assert llm.generate(["The quick", [5, 6, 7]], sampling_params=GREEDY, use_tqdm=False) == plain
    with pytest.raises(RequestRejected, match="params and sampling_params are two names of one argument"):
        llm.generate([[5, 6, 7]], GREEDY, sampling_params=GREEDY, progress=False)
    for wrong in ({}, {"prompt": "a", "prompt_token_ids": [1]}, {"prompt": "a", "multi_modal_data": {}}):
        with pytest.raises(RequestRejected, match="allowed: prompt or prompt_token_ids, one of them"):
            llm.generate([wrong], GREEDY, progress=False)
    llm.close()
