"""Several workers give what one gives: every family, tensor and pipeline parallel, with all that a scheduler does."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

import raylm.llm.offline
from raylm import LLM, EngineConfig, SamplingParams
from raylm.config.resolve import resolve
from raylm.core.step import StepPlan
from raylm.engine.engine import Engine
from raylm.errors import ConfigError, EngineDeadError
from raylm.executor.local import LocalExecutor
from raylm.llm import Completion, Logprob
from raylm.parallel.peer_reduce import SplitLimits
from tests.support import checkpoints
from tests.support.drafting import METHODS, Fixed, Models
from tests.support.engines import run_to_end
from tests.support.ranks import ProcessExecutor, RankPool, rank_pool

SHAPES = [(2, 1), (1, 2), (2, 2), (1, 3), (4, 1)]
"""The last one has more ranks than key/value heads."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FEW = dataclasses.replace(GREEDY, max_tokens=8)
PROMPTS = [[3 + i, 5, 7, 9 + i] * (2 + i) for i in range(6)]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            changes = {} if family == "gemma3" else {"num_hidden_layers": 4}
            made[family] = checkpoints.FAMILIES[family](tmp_path_factory.mktemp(family), **changes)
        return made[family]

    return folder


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there are no two CUDA devices")
    return str(request.param)


@pytest.fixture
def load(pool: RankPool, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """An LLM over ranks of the pool; over this process with one."""
    opened: list[LLM] = []

    def engine(config: EngineConfig, *, progress: bool) -> Engine:
        if config.parallel.num_workers == 1:
            return local(config, progress=progress)
        if device == "cuda" and torch.cuda.device_count() < config.parallel.num_workers:
            pytest.skip(f"there are no {config.parallel.num_workers} CUDA devices")
        resolved = resolve(config, "cuda" if device == "cuda" else "cpu")
        return Engine(resolved, ProcessExecutor(pool, resolved), plans_in_flight=config.parallel.pipeline + 1)

    local = raylm.llm.offline.offline_engine
    monkeypatch.setattr(raylm.llm.offline, "offline_engine", engine)

    def make(folder: Path, shape: tuple[int, int] = (1, 1), **sections: dict[str, object]) -> LLM:
        data: dict[str, dict[str, object]] = {
            "cache": {"block_size": 16 if device == "cuda" else 4, "num_blocks": 200},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
            "runtime": {"device": device, "num_threads": 1},
        }
        for name, section in sections.items():
            data[name] = {**data.get(name, {}), **section}
        data["model"] = {"path": str(folder), "max_model_len": 64, "dtype": "float32", **data.get("model", {})}
        data["parallel"] = {"tensor": shape[0], "pipeline": shape[1], **data.get("parallel", {})}
        opened.append(LLM(EngineConfig.model_validate(data), progress=False))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[list[int]]]:
    found = llm.generate(prompts, params, progress=False)
    return [[output.token_ids for output in completion.outputs] for completion in found]


def _some(*chosen: tuple[int, int]) -> list[object]:
    """All shapes; those that are not chosen are nightly. Every shape is chosen by several tests."""
    return [pytest.param(shape, marks=[] if shape in chosen else [pytest.mark.nightly]) for shape in SHAPES]


def _pairs() -> Iterator[object]:
    """One shape a family, each shape as often as the others; the rest is nightly."""
    for number, family in enumerate(sorted(checkpoints.FAMILIES)):
        for index, shape in enumerate(SHAPES):
            is_chosen = (index - number) % len(SHAPES) == 0
            yield pytest.param(family, shape, marks=[] if is_chosen else [pytest.mark.nightly])


@pytest.mark.parametrize(("family", "shape"), list(_pairs()))
def test_every_family_gives_the_same_tokens(family, shape, folders, load):
    folder = folders(family)
    assert tokens(load(folder, shape), PROMPTS, FEW) == tokens(load(folder), PROMPTS, FEW)


def _pairs_of_16_bits() -> Iterator[object]:
    """Two ranks a family, split by heads and by layers in turns; six families run always, the rest is nightly."""
    for number, family in enumerate(sorted(checkpoints.FAMILIES)):
        shape = SHAPES[number % 2]
        yield pytest.param(family, shape, marks=[] if number % 7 == 0 else [pytest.mark.nightly])


@pytest.mark.parametrize(("family", "shape"), list(_pairs_of_16_bits()))
def test_tokens_in_16_bits_differ_by_rounding_alone(family, shape, folders, load):
    """Ranks sum in another order: the first token that differs is among the five likeliest of one worker, or the twenty
    of a mixture, whose router may choose another expert."""
    folder, model = folders(family), {"dtype": "bfloat16"}
    likeliest = 20 if "experts" in (folder / "config.json").read_text() else 5
    found = tokens(load(folder, shape, model=model), PROMPTS, FEW)
    one = load(folder, model=model).generate(PROMPTS, dataclasses.replace(FEW, logprobs=likeliest), progress=False)
    for (token_ids,), completion in zip(found, one, strict=True):
        output = completion.outputs[0]
        pairs = zip(token_ids, output.token_ids, output.logprobs, strict=True)
        differing = next(((token, listed) for token, own, listed in pairs if token != own), None)
        assert differing is None or differing[0] in differing[1]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=[] if (index + number) % 2 else [pytest.mark.nightly])
        for number, name in enumerate(("ArceeForCausalLM", "Ernie4_5_MoeForCausalLM"))
        for index, shape in enumerate(SHAPES)
    ],
)
def test_a_model_of_transformers_gives_the_same_tokens(name, shape, tmp_path, load):
    folder = checkpoints.of_transformers(
        name,
        tmp_path,
        num_hidden_layers=4,
        num_key_value_heads=4,
        tie_word_embeddings=shape[1] > 1,
        **(checkpoints.ERNIE_EXPERTS if "Moe" in name else {}),
    )
    assert tokens(load(folder, shape), PROMPTS, FEW) == tokens(load(folder), PROMPTS, FEW)


def test_experts_in_blocks_give_the_same_tokens(tmp_path, load):
    """A file's, which a CPU with the extension keeps so."""
    hf = checkpoints.FAMILIES["qwen3_moe"](tmp_path / "hf", num_hidden_layers=2, moe_intermediate_size=128)
    kinds = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), GGMLQuantizationType.Q8_0)
    file = checkpoints.write_gguf(hf, tmp_path / "model.gguf", kinds)
    assert tokens(load(file, (2, 1)), PROMPTS, GREEDY) == tokens(load(file), PROMPTS, GREEDY)


@pytest.mark.parametrize("shape", _some((2, 2), (4, 1)))
def test_measured_scales_of_a_cache_are_one_ranks(shape, folders, load, tmp_path):
    """Of two heads, the first one's keys are so much larger that the other's become 0 by the scale of both: a rank with
    a scale of its own would keep them."""
    folder = tmp_path / "uneven"
    shutil.copytree(folders("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("k_proj.weight"):
            tensors[name][: len(tensors[name]) // 2] *= 2.0**20
        if name.endswith("q_proj.weight"):
            tensors[name][: len(tensors[name]) // 2] *= 2.0**-20
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    cache = {"dtype": "fp8", "scales": "measured"}
    alone = tokens(load(folder, cache=cache), PROMPTS, GREEDY)
    assert tokens(load(folder, shape, cache=cache), PROMPTS, GREEDY) == alone
    assert tokens(load(folder), PROMPTS, GREEDY) != alone


@pytest.mark.parametrize("shape", _some((2, 2), (1, 3)))
def test_preempted_and_swapped_requests_go_on(shape, folders, load, device):
    """Memory for about two of six requests: they give way to each other, by both ways of doing so."""
    folder = folders("llama")
    expected = tokens(load(folder), PROMPTS, GREEDY)
    for swap in (0, 0.01):
        blocks = 18 if device == "cpu" else 6
        llm = load(folder, shape, cache={"num_blocks": blocks, "swap_gib": swap}, model={"max_model_len": 48})
        assert tokens(llm, PROMPTS, GREEDY) == expected
        assert llm._engine.stats().num_preemptions
        llm.close()


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_a_cache_of_8_bits(shape, folders, load, device):
    """Ranks add in another order, which may give a number another code: what was taken is near the top of the other's
    choices until texts part."""
    folder, blocks = folders("llama"), 18 if device == "cpu" else 6
    params = dataclasses.replace(GREEDY, logprobs=5)
    cache = {"dtype": "fp8"}
    alone = load(folder, cache=cache).generate(PROMPTS, params, progress=False)
    tight = {"num_blocks": blocks, "swap_gib": 0.01, **cache}
    llm = load(folder, shape, cache=tight, model={"max_model_len": 48})
    for expected, found in zip(alone, llm.generate(PROMPTS, params, progress=False), strict=True):
        [mine], [other] = found.outputs, expected.outputs
        for place, own in enumerate(mine.token_ids):
            taken = other.token_ids[place]
            listed, others = mine.logprobs[place], other.logprobs[place]
            assert own in others and taken in listed
            assert abs(listed[own].logprob - others[own].logprob) < 0.2
            if own != taken:
                break
        else:
            assert len(mine.token_ids) == len(other.token_ids)
    assert llm._engine.stats().num_preemptions


@pytest.mark.parametrize("shape", _some((2, 1), (1, 3)))
def test_samples_beams_and_logprobs(shape, folders, load):
    folder = folders("qwen3")
    one, several = load(folder), load(folder, shape)
    sampled = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=10, n=3, ignore_eos=True)
    assert tokens(several, PROMPTS, sampled) == tokens(one, PROMPTS, sampled)
    beams = SamplingParams(
        temperature=0, beam_width=3, n=2, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=0
    )
    wanted = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, max_tokens=6)
    for params, prompts in ((beams, PROMPTS[:3]), (wanted, PROMPTS)):
        both = (llm.generate(prompts, params, progress=False) for llm in (one, several))
        for expected, found in zip(*both, strict=True):
            assert_alike(expected, found)


def assert_alike(expected: Completion, found: Completion) -> None:
    """The same tokens, with the same log probabilities: their own, the likeliest's, and those of the prompt."""
    assert [one.token_ids for one in found.outputs] == [one.token_ids for one in expected.outputs]
    for mine, other in zip(found.outputs, expected.outputs, strict=True):
        for listed, others in zip(mine.logprobs, other.logprobs, strict=True):
            assert_near(listed, others)
    for listed, others in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert_near(listed, others)


def assert_near(mine: dict[int, Logprob], other: dict[int, Logprob]) -> None:
    assert [one.logprob for one in mine.values()] == pytest.approx([one.logprob for one in other.values()], abs=1e-4)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_penalties_count_alike(shape, folders, load, device):
    """Also of requests that come back with what they have generated: by no stage but the last are tokens sampled."""
    folder = folders("llama")
    paying = dataclasses.replace(GREEDY, repetition_penalty=0.7, frequency_penalty=0.5, presence_penalty=1)
    params = [paying, GREEDY] * 3
    blocks = 18 if device == "cpu" else 6
    llm = load(folder, shape, cache={"num_blocks": blocks}, model={"max_model_len": 48})
    found = [completion.outputs[0].token_ids for completion in llm.generate(PROMPTS, params, progress=False)]
    plain, expected = (tokens(load(folder), PROMPTS, each) for each in (GREEDY, paying))
    assert [[one] for one in found] == [(expected, plain)[i % 2][i] for i in range(6)]
    assert all(plain[i] != expected[i] for i in (0, 2, 4))
    rows = [
        new for plan in llm._engine._executor.plans for new in plan.new_rows if new.sampling.params.presence_penalty
    ]
    back = max(len(new.token_ids) - new.sampling.num_prompt for new in rows)
    assert back > 3 or device == "cuda", "the test is meant to preempt one that has generated several tokens"


@pytest.mark.parametrize(
    ("family", "shape"),
    [("llama", (2, 1)), ("llama", (4, 1)), ("llama", (2, 2)), ("qwen2", (2, 1)), ("gemma3", (2, 1))],
)
def test_steps_of_many_rows(family, shape, folders, load, device):
    """So many that GPUs split the norms between them, unless stages hand on a residual."""
    limits = {"scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 700}, "cache": {"num_blocks": 400}}
    limits["model"] = {"max_model_len": 144}
    prompts = [[3 + i, 5, 7, 9 + i] * 33 for i in range(8)]
    folder = folders(family)
    llm = load(folder, shape, **limits)
    assert tokens(llm, prompts, GREEDY) == tokens(load(folder, **limits), prompts, GREEDY)
    assert max(plan.total_tokens for plan in llm._engine._executor.plans) >= SplitLimits(0, 0).least_rows


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (1, 3)])
def test_rows_are_used_again_while_tokens_are_on_their_way(shape, folders, load):
    """Two rows for many short requests: a row's next request comes while the last one's surplus tokens travel."""
    folder = folders("llama")
    limits = {"scheduler": {"max_num_seqs": 2}}
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 4, ignore_eos=True) for i in range(12)]
    prompts = [PROMPTS[i % 6][: 3 + i] for i in range(12)]
    expected = [c.outputs[0].token_ids for c in load(folder, **limits).generate(prompts, params, progress=False)]
    found = [c.outputs[0].token_ids for c in load(folder, shape, **limits).generate(prompts, params, progress=False)]
    assert found == expected


def test_stages_of_given_sizes(folders, load):
    folder = folders("llama")
    uneven = load(folder, (1, 2), parallel={"stage_layers": [3, 1]})
    assert tokens(uneven, PROMPTS, GREEDY) == tokens(load(folder), PROMPTS, GREEDY)
    uneven.close()
    with pytest.raises(ConfigError, match=r"parallel.stage_layers \[3, 2\] has 5 layers in all, the model 4"):
        load(folder, (1, 2), parallel={"stage_layers": [3, 2]})


def test_what_ranks_cannot_share_is_refused_by_name(folders, load):
    with pytest.raises(ConfigError, match="num_attention_heads is 4, which parallel.tensor 3 cannot divide"):
        load(folders("llama"), (3, 1))


def test_running_requests_take_turns(folders, load):
    """Two stages: each plan decodes half of the requests, and no request is in two plans in a row."""
    llm = load(folders("llama"), (1, 2), scheduler={"max_num_batched_tokens": 64})
    tokens(llm, [prompt[:5] for prompt in PROMPTS], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    plans = list(llm._engine._executor.plans)[4:-6]
    assert {len(plan.rows) for plan in plans} == {3}
    for before, after in zip(plans, plans[1:], strict=False):
        assert not set(before.rows) & set(after.rows)


@pytest.mark.parametrize("shape", _some((2, 1), (1, 2), (2, 2)))
def test_checked_ranks_agree(shape, folders, load):
    folder = folders("llama")
    llm = load(folder, shape, cache={"num_blocks": 18}, parallel={"check_ranks": True}, model={"max_model_len": 48})
    assert tokens(llm, PROMPTS, GREEDY) == tokens(load(folder), PROMPTS, GREEDY)


def test_a_rank_that_is_given_another_plan_is_found(folders, load, monkeypatch):
    llm = load(folders("llama"), (2, 1), parallel={"check_ranks": True})
    executor = llm._engine._executor

    def submit(plan: StepPlan) -> None:
        other = plan._replace(num_tokens=[2]) if plan.step == 5 else plan
        for socket, given in zip(executor._sender._sockets, (plan, other), strict=True):
            # Plans behind step 5 are not waited for: the ranks may have failed and gone before.
            with contextlib.suppress(zmq.Again):
                socket.send(msgspec.msgpack.encode(given), zmq.NOBLOCK if plan.step > 5 else 0)

    monkeypatch.setattr(executor, "submit", submit)
    with pytest.raises(EngineDeadError, match="different plans in step 5: rank 0 and rank 1 differ"):
        tokens(llm, PROMPTS[:1], GREEDY)


@pytest.mark.parametrize("method", METHODS)
def test_models_that_draft_are_split_like_their_target(method, pool, tmp_path, device):
    """Tokens are a plain engine's, ranks have the same drafts, and as many are accepted as of one rank's."""
    models = Models.make(tmp_path)
    found, accepted = [], []
    for tensor, speculation in ((1, {}), (1, models.speculation(method)), (2, models.speculation(method))):
        config = EngineConfig.model_validate(
            {
                "model": {"path": str(models.target(method)), "max_model_len": 64, "dtype": "float32"},
                "cache": {"block_size": 16 if device == "cuda" else 4, "num_blocks": 200},
                "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
                "runtime": {"device": device, "num_threads": 1},
                "parallel": {"tensor": tensor, "check_ranks": True},
                "speculation": speculation,
            }
        )
        resolved = resolve(config, device)
        executor = ProcessExecutor(pool, resolved) if tensor > 1 else LocalExecutor(resolved, progress=False)
        drafter = Fixed(3) if speculation else None
        engine = Engine(resolved, executor, plans_in_flight=2, drafter=drafter)
        for index, prompt in enumerate(PROMPTS):
            engine.add([str(index)], prompt, GREEDY)
            engine.add([f"sampled {index}"], prompt, SamplingParams(temperature=0.8, seed=index, max_tokens=9))
        found.append(run_to_end(engine).tokens)
        accepted.append(drafter.accepted if drafter is not None else [])
        engine.shutdown()
    assert found[1] == found[0] and found[2] == found[0]
    assert accepted[2] == accepted[1] != []
