"""Experts that stay in blocks on a CPU: a GGUF file's own, repacked integers, GPT-OSS's MXFP4. The right numbers in the
right places, and the same model."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType
from safetensors.torch import load_file, save_file
from torch import Tensor

from raylm import ops
from raylm.cli import main
from raylm.errors import ConfigError
from raylm.layers.expert_weights import BlockExperts, PlainExperts
from raylm.layers.experts import ParallelExperts
from raylm.layers.slots import BlockForm
from raylm.models.decoder import DecoderModel
from raylm.models.scheme import Scheme, stored_forms
from raylm.parallel.context import ParallelContext
from tests.models import test_mxfp4
from tests.models.paged import CPU, PagedRun, generate, load
from tests.models.test_gguf_layouts import Apart, Joining
from tests.support import checkpoints
from tests.support.quantised import FILE, KINDS, write_both

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
SIZES = {"hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 1}
OWN_SIZES = {
    "mixtral": {"intermediate_size": 512},
    "gpt_oss": {"intermediate_size": 512, "layer_types": ["full_attention"]},
    "olmoe": {"intermediate_size": 512},
}
INTEGERS = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}
"""Sizes of checkpoints of integers."""
PROMPTS = {"a": [(5 * i + 3) % 300 + 3 for i in range(20)], "b": [3, 1, 4]}
MANY = "weights: matrices that are float32 all the same: {}; ranks cut their blocks"


@pytest.fixture
def exact_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were kernels for every kind, with the products of the fallback, which are exact."""
    monkeypatch.setattr(ops, "block_kernels", lambda like, kind: True)
    monkeypatch.setattr("raylm.ops.blocks._has_kernels", lambda device, kind: False)


def written(folder: Path, family: str, *kinds: GGMLType, **changes: object) -> Path:
    """A GGUF file whose experts' gates, ups and downs are of these types."""
    hf = checkpoints.FAMILIES[family](folder / "hf", **{**SIZES, **OWN_SIZES.get(family, {}), **changes})
    return checkpoints.write_gguf(hf, folder / "model.gguf", dict(zip(EXPERTS, kinds, strict=True)))


def rank_of(rank: int, size: int) -> ParallelContext:
    return ParallelContext(rank, rank, size, 0, 1, CPU)


def experts_of(model: DecoderModel) -> list[ParallelExperts]:
    return [module for module in model.modules() if isinstance(module, ParallelExperts)]


def forms_of(experts: ParallelExperts) -> list[str] | None:
    return [form.name for form in experts.matrices.form] if isinstance(experts.matrices, BlockExperts) else None


def numbers(experts: ParallelExperts) -> list[Tensor]:
    """Of gates, ups and downs: [E, rows, columns]."""
    found = experts.matrices
    if isinstance(found, BlockExperts):
        parts = zip((found.gate_proj, found.up_proj, found.down_proj), found.form, strict=True)
        return [ops.decode_blocks(part.flatten(0, 1), form.kind).unflatten(0, (len(part), -1)) for part, form in parts]
    assert isinstance(found, PlainExperts)
    return [*found.gate_up_proj.chunk(2, dim=1), found.down_proj]


def assert_equal(stored: Path, decoded: Path | None = None, *, forms: list[str] | None, size: int = 1) -> None:
    """The numbers of experts, kept in blocks of these forms and decoded; of all ranks together, which share blocks by
    whole ones and numbers evenly."""
    contexts = [rank_of(rank, size) for rank in range(size)]
    kept = [experts_of(load(stored, context=context, as_stored=True)) for context in contexts]
    plain = [experts_of(load(decoded or stored, context=context)) for context in contexts]
    assert all(forms_of(experts) == forms for ranks in kept for experts in ranks)
    assert all(forms_of(experts) is None for ranks in plain for experts in ranks)
    for layer in range(len(kept[0])):
        found, expected = (list(zip(*(numbers(ranks[layer]) for ranks in each), strict=True)) for each in (kept, plain))
        for parts, decoded_parts, dim in zip(found, expected, (1, 1, 2), strict=True):
            assert torch.equal(torch.cat(parts, dim), torch.cat(decoded_parts, dim))


def assert_same_model(stored: Path, decoded: Path | None = None) -> None:
    texts, logits = generate(PagedRun(load(stored, as_stored=True)), PROMPTS, num_tokens=4)
    expected_texts, expected = generate(PagedRun(load(decoded or stored)), PROMPTS, num_tokens=4)
    assert texts == expected_texts
    for name in PROMPTS:
        assert (logits[name] - expected[name]).norm() < 1e-3 * expected[name].norm()


@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize(
    ("family", "kinds", "writer", "size"),
    [
        ("mixtral", ("Q8_0", "Q8_0", "Q8_0"), Apart, 2),
        ("qwen3_moe", ("Q4_K", "Q4_K", "Q6_K"), gguf.GGUFWriter, 2),  # as Q4_K_M has them
        ("qwen2_moe", ("Q5_1", "Q5_1", "IQ4_NL"), Joining, 1),
        ("olmoe", ("Q4_0", "Q2_K", "Q5_K"), gguf.GGUFWriter, 1),
        ("gpt_oss", ("MXFP4", "MXFP4", "MXFP4"), gguf.GGUFWriter, 4),
    ],
)
def test_a_files_experts_stay(
    family: str,
    kinds: tuple[str, ...],
    writer: type,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gguf, "GGUFWriter", writer)
    path = written(tmp_path, family, *(GGMLType[kind] for kind in kinds))
    assert_equal(path, forms=list(kinds), size=size)
    assert_same_model(path)


def test_the_same_model_with_kernels(tmp_path: Path) -> None:
    """Those of the extension, where there is one."""
    assert_same_model(written(tmp_path, "qwen3_moe", GGMLType.Q4_K, GGMLType.Q4_K, GGMLType.Q6_K))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_ranks_shares_are_the_whole(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of two ranks in blocks, whose results are added, beside decoded ones of one rank. One of GPT-OSS's
    ranks has the bias of down."""
    monkeypatch.setattr(ops, "block_kernels", lambda like, kind: True)
    path = written(tmp_path, family, *[GGMLType.Q8_0] * 3)
    (whole,), *ranks = (
        experts_of(load(path, context=rank_of(rank, size), as_stored=size > 1))
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    x, chosen = (
        torch.randn(7, 256, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[0, 3]] * 4 + [[1, 0]] * 3),
    )
    weights = torch.full((7, 2), 0.5)
    expected = whole(x, weights, chosen)
    found = sum(experts(x, weights, chosen) for (experts,) in ranks)
    assert all(forms_of(experts) == ["Q8_0"] * 3 for (experts,) in ranks)
    assert (found - expected).norm() < 3e-4 * expected.norm()


@pytest.mark.usefixtures("exact_kernels")
def test_what_ranks_would_cut_is_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a down in blocks of 256 numbers each of four ranks has 128 columns: then gate and up are decoded too."""
    path = written(tmp_path, "qwen3_moe", GGMLType.Q4_0, GGMLType.Q4_0, GGMLType.Q6_K)
    assert_equal(path, forms=["Q4_0", "Q4_0", "Q6_K"], size=2)
    with caplog.at_level(logging.INFO, logger="raylm"):
        assert_equal(path, forms=None, size=4)
    (count,) = {experts.num_experts for experts in experts_of(load(path))}
    assert sum(message.startswith(MANY.format(3 * count)) for message in caplog.messages) == 4


@pytest.mark.usefixtures("exact_kernels")
def test_the_log_and_the_memory_are_of_blocks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, "qwen3_moe", GGMLType.Q4_K, GGMLType.Q4_K, GGMLType.Q6_K)
    with caplog.at_level(logging.INFO, logger="raylm"):
        model = load(path, as_stored=True)
    (experts,) = experts_of(model)
    count = experts.num_experts
    assert stored_forms(model)["Q4_K"] == 2 * count and stored_forms(model)["Q6_K"] == count
    assert f"{2 * count} in Q4_K, {count} in Q6_K" in caplog.text
    assert sum(matrix.nbytes for matrix in experts.parameters()) == count * 256 * 512 * (2 * 144 + 210) // 256
    assert experts.num_values == 3 * count * 256 * 512


def test_other_types_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One such matrix has a layer's experts decoded."""
    monkeypatch.setattr(ops, "block_kernels", lambda like, kind: kind != GGMLType.Q6_K)
    path = written(tmp_path, "qwen3_moe", GGMLType.Q4_K, GGMLType.Q4_K, GGMLType.Q6_K)
    assert_equal(path, forms=None)


@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize(
    ("family", "kind", "form", "size"),
    [
        ("mixtral", "ct_w4a16", "Q4_0", 2),
        ("qwen3_moe", "awq", "Q5_0", 2),
        ("qwen2_moe", "gptq_128", "Q4_0", 1),
        ("olmoe", "ct_int8", "Q8_0", 2),
        ("qwen3_moe", "gptq_ordered", None, 1),
        ("qwen3_moe", "fp8_blocks", None, 1),
    ],
)
def test_integers_of_a_checkpoint_stay(family: str, kind: str, form: str | None, size: int, tmp_path: Path) -> None:
    changes = INTEGERS | ({"intermediate_size": 128} if family in OWN_SIZES else {})
    packed, _ = write_both(checkpoints.FAMILIES[family](tmp_path / "plain", **changes), tmp_path, KINDS[kind])
    assert_equal(packed, forms=None if form is None else [form] * 3, size=size)
    if size == 1:
        assert_same_model(packed)


def test_an_int4_checkpoint_with_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the extension, where there is one: weights are equal, activations have 16 bits."""
    monkeypatch.setattr(ops, "block_kernels", lambda like, kind: True)
    packed, _ = write_both(checkpoints.FAMILIES["qwen3_moe"](tmp_path / "plain", **INTEGERS), tmp_path, KINDS["awq"])
    assert set(stored_forms(load(packed, as_stored=True))) == {"Q5_0"}
    assert_same_model(packed)


def _changed(folder: Path, name: str, value: float) -> None:
    """One element of a tensor is this one."""
    tensors = load_file(folder / FILE)
    tensors[name].view(-1)[3] = value
    save_file(tensors, folder / FILE)


@pytest.mark.usefixtures("exact_kernels")
def test_all_experts_have_the_blocks_that_one_needs(tmp_path: Path) -> None:
    """One expert's zero points are not the middle ones: its differences have 5 bits, and so have all experts' ups."""
    packed, _ = write_both(
        checkpoints.FAMILIES["qwen3_moe"](tmp_path / "plain", **INTEGERS), tmp_path, KINDS["gptq_128"]
    )
    _changed(packed, "model.layers.0.mlp.experts.2.up_proj.qzeros", 0x66666666)
    assert_equal(packed, forms=["Q4_0", "Q5_0", "Q4_0"])


@pytest.mark.usefixtures("exact_kernels")
def test_one_expert_that_blocks_do_not_hold_has_all_decoded(tmp_path: Path) -> None:
    packed, _ = write_both(
        checkpoints.FAMILIES["qwen3_moe"](tmp_path / "plain", **INTEGERS), tmp_path, KINDS["ct_w4a16"]
    )
    name = "model.layers.0.mlp.experts.1.down_proj.weight_scale"
    tensors = load_file(packed / FILE)
    save_file(tensors | {name: tensors[name].float()}, packed / FILE)
    assert_equal(packed, forms=["Q4_0"] * 3)  # float16 holds them
    _changed(packed, name, 0.1)
    assert_equal(packed, forms=None)


@pytest.mark.usefixtures("exact_kernels")
def test_gpt_oss_stays_in_mxfp4(tmp_path: Path) -> None:
    packed, twin = test_mxfp4.write_both(tmp_path)
    assert_equal(packed, twin, forms=["MXFP4"] * 3)
    assert_equal(packed, twin, forms=["MXFP4"] * 3, size=2)  # 64 columns of 96, and 32
    assert_equal(packed, twin, forms=None, size=4)
    assert_same_model(packed, twin)


@pytest.mark.usefixtures("exact_kernels")
def test_scales_of_mxfp4_that_kernels_do_not_take_are_refused(tmp_path: Path) -> None:
    packed, _ = test_mxfp4.write_both(tmp_path)
    _changed(packed, test_mxfp4.SCALES, 255)
    with pytest.raises(ConfigError, match="down_proj_scales holds scales that are no finite numbers, or above 2"):
        load(packed, as_stored=True)


def test_the_doctor_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = test_mxfp4.write_both(tmp_path)
    for has_kernels in (True, False):
        monkeypatch.setattr(ops, "block_kernels", lambda like, kind, found=has_kernels: found)
        assert main(["doctor", str(packed), "--json"]) == 0
        choices = json.loads(capsys.readouterr().out)["choices"]
        (reason,) = [each["reason"] for each in choices if each["name"] == "stored weights"]
        assert ("matrices stay where blocks" in reason) is has_kernels


def test_which_experts_have_blocks() -> None:
    """Those that have the same ones where an expert has them; gate, up and down may differ."""
    q4, q8 = BlockForm(2, "Q4_0", 32, 18), BlockForm(8, "Q8_0", 32, 34)
    path = "layers.0.mlp.experts."
    whole = {f"{path}gate_up_proj.weight": {"gate": q4, "up": q8}, f"{path}down_proj.weight": {None: q4}}
    assert Scheme(whole).of_experts(path, 3) == (q4, q8, q4)
    assert Scheme(whole | {f"{path}1.down_proj.weight": {None: q8}}).of_experts(path, 3) is None
    assert Scheme({f"{path}gate_up_proj.weight": {"gate": q4, "up": q8}}).of_experts(path, 3) is None
    assert Scheme(whole | {f"{path}gate_up_proj.weight": {None: q8}}).of_experts(path, 3) == (q8, q8, q4)
