"""Linear layers in 8-bit floats with a scale a row: quantised while they are loaded, or as the checkpoint has them."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raylm import LLM, EngineConfig, SamplingParams, ops
from raylm.errors import ConfigError
from raylm.layers.attention import LayerInput
from raylm.layers.weight import Columns, Part, PlainWeight, ScaledWeight, make_weight
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.check import check_model, with_mtp
from raylm.models.decoder import DecoderModel
from raylm.models.few_rows import FewRows
from raylm.models.from_peer import WeightSender, receive_weights
from raylm.models.load import load_model
from raylm.models.scheme import stored_forms
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, PagedRun, generate, load
from tests.models.test_through_transformers import CASES
from tests.models.test_weight_loading import NormReducer, SplitReducer
from tests.models.test_weights_from_peer import LIMIT_S, Cable, ThreadPeer
from tests.support import checkpoints
from tests.support.quantised import FILE, KINDS, Kind, change_config, fp8, write_both
from tests.support.threaded_ranks import ThreadedRanks

PROMPTS = {"a": [(5 * i + 3) % 300 + 3 for i in range(20)], "b": [3, 1, 4]}
FORM = "float8_e4m3fn with a scale a row"
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {},
    "gemma3": {},  # norms behind attention and MLP too
    "glm4": {},
    "cohere": {},  # attention and MLP side by side, behind one norm by mean and variance
    "gpt_neox": {},  # the same behind a norm each
    "olmo2": {},  # norms behind attention and MLP alone
    "gpt2": {},  # stored by columns, no gate
    "nemotron": {},
    "phi3": {},  # queries, keys and values in one tensor
    "bloom": {},
    "qwen2_moe": {},  # experts stay as they are
}


class RoundedInputs(nn.Module):
    """Stands for a weight: the product of rounded numbers, by the definition of the rounding."""

    takes_scaled_rows = False
    plain = None

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
        return F.linear((x * (1 / scale)).to(torch.float8_e4m3fn).float() * scale, self.values, bias)

    def gated_matmul(self, x: Tensor, activation: str, bias: Tensor | None = None, *, scales: bool = False) -> Tensor:
        assert not scales  # the twin's products take rows as they are
        gate, up = self.matmul(x, bias).chunk(2, -1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def read(weight: ScaledWeight) -> Tensor:
    return weight.codes.float() * weight.scales.unsqueeze(-1)


def weights(model: nn.Module) -> dict[str, ScaledWeight]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ScaledWeight)}


def twin(model: DecoderModel, plain: DecoderModel) -> DecoderModel:
    """The plain model with the weights and the rounding of the other, whose parts say nothing of either."""
    for name, weight in weights(model).items():
        assert isinstance(plain.get_submodule(name), PlainWeight)
        plain.set_submodule(name, RoundedInputs(read(weight)))
    return plain


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], *, most: float) -> None:
    """`most`: of the difference, beside the size of what is expected."""
    for name in PROMPTS:
        assert float((found[name] - expected[name]).norm() / expected[name].norm()) < most, name


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Of most tokens. A number that lies between two codes may be rounded either way, and is felt in its row."""
    for name in PROMPTS:
        errors = (found[name] - expected[name]).norm(dim=-1) / expected[name].norm(dim=-1)
        assert float(errors.median()) < 1e-3 and float(errors.max()) < 0.2, (name, errors)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_model_is_that_of_its_rounded_weights(family: str, tmp_path: Path) -> None:
    path = checkpoints.FAMILIES[family](tmp_path, **FAMILIES[family])
    model, plain = load(path, quantise=True), load(path)
    linears = 2 if family == "qwen2_moe" else 4
    assert stored_forms(model)[FORM] >= linears * model.arch.num_layers
    _, unrounded = generate(PagedRun(plain), PROMPTS, num_tokens=1)
    _, loosely = generate(PagedRun(model), PROMPTS, num_tokens=1)
    assert_near(loosely, unrounded, most=0.3)
    texts, logits = generate(PagedRun(model), PROMPTS, num_tokens=6)
    expected_texts, expected = generate(PagedRun(twin(model, plain)), PROMPTS, num_tokens=6)
    assert texts == expected_texts
    assert_same(logits, expected)


def test_rows_are_those_of_the_checkpoint_rounded(tmp_path: Path) -> None:
    path = checkpoints.llama(tmp_path)
    stored = load_file(path / FILE)
    model = load(path, quantise=True, dtype=torch.bfloat16)
    assert model.layers["1"].mlp.gate_up_proj.weight.codes.dtype == torch.float8_e4m3fn
    parts = [stored[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    exact, found = torch.cat(parts), read(model.layers["1"].mlp.gate_up_proj.weight)
    assert ((found - exact).abs() <= exact.abs() / 16 + exact.abs().amax(-1, keepdim=True) * 2.0**-17).all()
    size = sum(x.nbytes for x in weights(model)["layers.0.mlp.down_proj.weight"].parameters())
    assert size == 64 * 96 + 4 * 64


@pytest.mark.parametrize("reducer_class", [None, NormReducer, SplitReducer])
@pytest.mark.parametrize("family", ["llama", "bloom", "cohere"])
def test_two_ranks_have_scales_of_their_own_columns(
    family: str, reducer_class: type[NormReducer] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.FAMILIES[family](tmp_path)
    ranks = ThreadedRanks(2)
    monkeypatch.setattr(collectives, "all_reduce", ranks.all_reduce)
    monkeypatch.setattr(collectives, "all_gather", ranks.all_gather)
    whole = load(path, quantise=True)

    def run(rank: int) -> list[Any]:
        reducer = None if reducer_class is None else reducer_class(ranks, rank)
        context = ParallelContext(rank, rank, 2, 0, 1, CPU, reducer=reducer)
        model = load(path, context=context, quantise=True)
        down = model.layers["0"].mlp.down_proj.weight
        columns = load(path, context=context).layers["0"].mlp.down_proj.weight.values
        torch.testing.assert_close(down.scales, columns.abs().amax(-1) / 448)
        assert not torch.equal(down.scales, whole.layers["0"].mlp.down_proj.weight.scales)
        plain = twin(model, load(path, context=context))
        return [generate(PagedRun(each), PROMPTS, num_tokens=4) for each in (model, plain)]

    with ThreadPoolExecutor(2) as pool:
        for (texts, logits), (expected_texts, expected) in pool.map(run, range(2)):
            assert texts == expected_texts
            assert_same(logits, expected)


@dataclass
class TwoStages:
    """A model of two stages, as one."""

    stages: list[DecoderModel]

    def __post_init__(self) -> None:
        self.arch, self.context = self.stages[0].arch, ParallelContext.single(CPU)
        self.logits = self.stages[1].logits

    def __call__(self, tokens: Tensor, step: list[LayerInput]) -> Tensor:
        first = len(self.stages[0].layer_numbers)
        return self.stages[1](self.stages[0](tokens, step[:first]), step[first:])


def test_two_stages_are_one_model(tmp_path: Path) -> None:
    path = checkpoints.llama(tmp_path)
    stages = [load(path, context=ParallelContext(rank, 0, 1, rank, 2, CPU), quantise=True) for rank in range(2)]
    texts, logits = generate(PagedRun(TwoStages(stages)), PROMPTS, num_tokens=4)  # type: ignore[arg-type]
    expected_texts, expected = generate(PagedRun(load(path, quantise=True)), PROMPTS, num_tokens=4)
    assert texts == expected_texts
    for name in PROMPTS:
        torch.testing.assert_close(logits[name], expected[name], atol=1e-4, rtol=1e-4)


def test_pytorchs_files_and_gguf_files_too(tmp_path: Path) -> None:
    path = checkpoints.llama(tmp_path / "hf")
    gguf = checkpoints.write_gguf(path, tmp_path / "model.gguf")
    (tmp_path / "pt").mkdir()
    (tmp_path / "pt" / "config.json").write_text((path / "config.json").read_text())
    torch.save(load_file(path / FILE), tmp_path / "pt" / "pytorch_model.bin")
    for other in (gguf, tmp_path / "pt"):
        found, plain = weights(load(other, quantise=True)), load(other)
        assert len(found) == 4 * plain.arch.num_layers
        for name, weight in found.items():
            expected = ops.scale_rows(plain.get_submodule(name).values)
            assert torch.equal(weight.codes.float(), expected.codes.float()), name
            assert torch.equal(weight.scales, expected.scales), name


def test_dummy_weights_are_the_same_random_ones_rounded(tmp_path: Path) -> None:
    path = checkpoints.llama(tmp_path)
    (path / FILE).unlink()
    model, plain = load(path, "dummy", quantise=True, seed=3), load(path, "dummy", seed=3)
    for name, weight in weights(model).items():
        exact = plain.get_submodule(name).values
        assert float((read(weight) - exact).norm() / exact.norm()) < 0.04
        assert not torch.equal(read(weight), exact)


def test_all_parameters_arrive_from_a_peer(tmp_path: Path) -> None:
    path = checkpoints.llama(tmp_path)
    lent, model = load(path, quantise=True), load(path, "dummy", quantise=True)
    cable = Cable()
    peer = ThreadPeer(WeightSender(lent, "same", wires=cable.wires()))
    receive_weights(model, "same", peer, limit_s=LIMIT_S, wires=cable.wires())
    for (name, own), theirs in zip(model.named_parameters(), lent.parameters(), strict=True):
        assert own.dtype == theirs.dtype and torch.equal(own.view(torch.uint8), theirs.view(torch.uint8)), name


def test_the_kernel_of_all_layers_is_not_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(checkpoints.llama(tmp_path), quantise=True)
    with caplog.at_level(logging.INFO, logger="raylm"):
        few_rows = FewRows(model._build, list(model.layers.values()), block_size=16, cache_dtype=torch.float32)
    assert few_rows.most_rows == 0
    assert "some weights are kept in a form that it does not read" in caplog.text


@pytest.mark.parametrize("case", ["an MLP without a gate", "experts, one tensor a projection"])
def test_models_through_transformers(case: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    path = checkpoints.of_transformers(name, tmp_path, **changes)
    model, plain = load(path, quantise=True), load(path)
    assert stored_forms(model)[FORM] >= 6 * model.arch.num_layers
    assert not any(path.endswith((".gate.weight", "lm_head.weight")) for path in weights(model))
    _, unrounded = generate(PagedRun(plain), PROMPTS, num_tokens=1)
    _, logits = generate(PagedRun(model), PROMPTS, num_tokens=1)
    assert_near(logits, unrounded, most=0.3)
    _, expected = generate(PagedRun(twin(model, plain)), PROMPTS, num_tokens=1)
    # A number between two codes is rounded the other way in an early row, which all rows behind it read.
    assert_near(logits, expected, most=0.03)


@pytest.mark.parametrize(("family", "alone"), [("llama", 1), ("gemma3", 1), ("cohere", 1), ("gpt2", 2), ("olmo2", 3)])
def test_rows_are_quantised_where_they_are_made(
    family: str, alone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`alone`: a layer's quantisations by themselves: what attention gives, GPT-2's activation, OLMo 2's inputs."""
    model = load(checkpoints.FAMILIES[family](tmp_path), quantise=True)
    if model.arch.norm == "layer":
        alone += 1 if model.arch.shared_norm else 2  # norms by mean and variance quantise in a second step
    scaled: list[int] = []
    scale_rows = ops.scale_rows
    monkeypatch.setattr(ops, "scale_rows", lambda x: scaled.append(len(x)) or scale_rows(x))
    PagedRun(model).step({"a": [1, 2, 3]})
    assert scaled == [3] * alone * model.arch.num_layers


def test_a_layer_that_drafts_stays_plain(tmp_path: Path) -> None:
    source = locate(str(checkpoints.mimo(tmp_path)))
    arch = with_mtp(ArchConfig.from_source(source))
    context = ParallelContext.single(CPU)
    model = load_model(source, arch, context, torch.float32, "auto", quantise=True, progress=False)
    assert len(weights(model)) == 4 * arch.num_layers and not weights(model.mtp)


def test_a_table_gives_its_rows() -> None:
    weight = make_weight([Part(None, 5, 4, 0, padding=2)], Columns.whole(8), {None: ops.CODES}, dtype=torch.float32,
                         device=CPU)  # fmt: skip
    assert isinstance(weight, ScaledWeight)
    table = torch.randn(4, 8)
    weight.named_slots("weight")["weight", None].put(0, table)
    numbers = torch.tensor([3, 0, 3, 5])
    assert torch.equal(weight.rows(numbers), read(weight)[numbers])
    assert torch.equal(weight.rows(numbers)[3], torch.zeros(8))
    torch.testing.assert_close(weight.rows(numbers)[:3], table[numbers[:3]], rtol=0.07, atol=0.01)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU had kernels for such weights."""
    monkeypatch.setattr(ops, "takes_scaled", lambda rows, columns, device: True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("family", "kind", "size"),
    [
        ("llama", "fp8", 2),
        ("llama", "ct_fp8_channel", 2),
        ("qwen3", "modelopt_channel", 1),
        ("phi3", "ct_fp8", 2),  # queries, keys and values in one tensor
        ("gpt_neox", "fbgemm", 2),  # and by heads
        ("cohere", "quark_channel", 1),  # rotary dimensions in pairs
        ("gemma3", "quark_fp8", 1),
        ("glm4_moe", "modelopt_fp8", 2),
    ],
)
def test_codes_and_scales_of_a_checkpoint_stay(family: str, kind: str, size: int, tmp_path: Path) -> None:
    plain = checkpoints.FAMILIES[family](tmp_path / "plain")
    packed, dense = write_both(plain, tmp_path, KINDS[kind])
    for rank in range(size):
        context = ParallelContext(rank, rank, size, 0, 1, CPU)
        stored = weights(load(packed, context=context, as_stored=True))
        expected = load(dense, context=context)
        assert len(stored) >= 2 * expected.arch.num_layers
        for name, weight in stored.items():
            values = expected.get_submodule(name).values
            torch.testing.assert_close(read(weight), values, rtol=3e-7, atol=0, msg=lambda text, n=name: f"{n}: {text}")
    if size == 1:
        model = load(packed, as_stored=True)
        texts, logits = generate(PagedRun(model), PROMPTS, num_tokens=4)
        expected_texts, expected_logits = generate(PagedRun(twin(model, load(dense))), PROMPTS, num_tokens=4)
        assert texts == expected_texts
        assert_same(logits, expected_logits)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["fp8_blocks", "ct_fp8_weights", "ct_int8", "ct_mxfp8", "gptq_4"])
def test_other_formats_are_not_kept_so(kind: str, tmp_path: Path) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", num_hidden_layers=1), tmp_path, KINDS[kind])
    assert FORM not in stored_forms(load(packed, as_stored=True))


def test_without_kernels_they_are_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", num_hidden_layers=1), tmp_path, KINDS["fp8"])
    with caplog.at_level(logging.INFO, logger="raylm"):
        assert stored_forms(load(packed, as_stored=True)) == {}
    assert "weights: stored as fp8 (floats of 8 bits, a scale a tensor), decoded to float32" in caplog.text


@pytest.mark.usefixtures("kernels")
def test_the_log_says_what_is_computed_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", num_hidden_layers=1), tmp_path, KINDS["fp8"])
    with caplog.at_level(logging.INFO, logger="raylm"):
        load(packed, as_stored=True)
        load(packed, "dummy", as_stored=True)
        load(tmp_path / "plain", quantise=True)
    lines = [message for message in caplog.messages if FORM in message]
    rest = f"4 in {FORM}; activations and all other weights are float32"
    assert lines == [
        f"weights: computed with as they are stored: {rest}",
        f"weights: computed with as they are stored: {rest}",
        f"weights: quantised while they were loaded: {rest}",
    ]
    assert "decoded to" not in caplog.text


@pytest.mark.usefixtures("kernels")
def test_one_plain_part_makes_the_matrix_plain(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    packed, dense = write_both(plain, tmp_path, KINDS["ct_fp8"])
    stored = load_file(packed / FILE)
    name = "model.layers.0.self_attn.k_proj.weight"
    del stored[f"{name}_scale"]
    save_file(stored | {name: load_file(dense / FILE)[name]}, packed / FILE)
    attention = load(packed, as_stored=True).layers["0"].self_attn
    assert isinstance(attention.qkv_proj.weight, PlainWeight) and isinstance(attention.o_proj.weight, ScaledWeight)
    expected = load(dense).layers["0"].self_attn.qkv_proj.weight.values
    torch.testing.assert_close(attention.qkv_proj.weight.values, expected, rtol=3e-7, atol=0)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (0.0, "holds scales of 0; allowed: numbers above 0"),
        (-1.0, "holds negative scales; allowed: 0 and above"),
        (float("nan"), "holds scales that are no finite numbers"),
        (float("inf"), "holds scales that are no finite numbers"),
        (None, "down_proj.weight is there, but model.layers.0.mlp.down_proj.weight_scale or .* is missing"),
        ("short", r"has shape \(63, 1\); allowed: \(64, 1\)"),
    ],
)
def test_scales_that_cannot_be(scale: float | str | None, message: str, tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    packed, _ = write_both(plain, tmp_path, Kind(KINDS["ct_fp8_channel"].config, fp8(1, 0)))
    name = "model.layers.0.mlp.down_proj.weight_scale"
    stored = load_file(packed / FILE)
    found = stored.pop(name)
    if scale == "short":
        stored[name] = found[:-1].contiguous()
    elif isinstance(scale, float):
        found[5] = scale
        stored[name] = found
    save_file(stored, packed / FILE)
    with pytest.raises(ConfigError, match=message) as refused:
        load(packed, as_stored=True)
    assert "model.layers.0.mlp.down_proj.weight" in str(refused.value)


def checked(path: Path, **model: object) -> ArchConfig:
    return check_model(EngineConfig.model_validate({"model": {"path": str(path), **model}}))


def test_what_does_not_go_together(tmp_path: Path) -> None:
    path = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    checked(path, quantization="fp8")
    with pytest.raises(ConfigError, match="model.weights is decoded, but model.quantization is fp8, .*: stored"):
        checked(path, quantization="fp8", weights="decoded")
    packed, _ = write_both(path, tmp_path, KINDS["fp8"])
    for value in ("stored", "decoded"):
        assert checked(packed, quantization="fp8", weights=value).quantisation is not None


def test_a_gpu_without_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = locate(str(checkpoints.llama(tmp_path, num_hidden_layers=1)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    context = ParallelContext.single(torch.device("cuda:0"))
    with pytest.raises(ConfigError, match=r"quantization is fp8, but NVIDIA L4 \(cuda:0\) has no kernels .*: none"):
        load(source.path, context=context, quantise=True, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="but model.dtype is float32; allowed with it on GPUs: bfloat16, float16"):
        load(source.path, context=context, quantise=True)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_an_engine_answers(load_format: str, tmp_path: Path) -> None:
    path = checkpoints.llama(tmp_path / "plain", tie_word_embeddings=True)
    model = {"path": str(path), "load_format": load_format, "quantization": "fp8", "dtype": "float32"}
    sections = {"model": {**model, "max_model_len": 64}, "cache": {"num_blocks": 64}, "runtime": {"device": "cpu"}}
    llm = LLM(EngineConfig.model_validate(sections), progress=False)
    try:
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (answer,) = llm.generate([PROMPTS["a"]], greedy, progress=False)
    finally:
        llm.close()
    texts, _ = generate(PagedRun(load(path, load_format, quantise=True)), {"a": PROMPTS["a"]}, num_tokens=6)
    assert answer.outputs[0].token_ids == texts["a"][20:]


def test_the_configuration_of_a_checkpoint_says_whether_rows_have_a_scale(tmp_path: Path) -> None:
    path = checkpoints.llama(tmp_path, num_hidden_layers=1)
    for name, expected in {"fp8": True, "ct_fp8_channel": True, "fp8_blocks": False, "ct_int8": False}.items():
        change_config(path, quantization_config=KINDS[name].config)
        quantisation = ArchConfig.from_source(locate(str(path))).quantisation
        assert quantisation is not None and quantisation.scales_rows is expected
    assert json.loads((path / "config.json").read_text())["quantization_config"]
