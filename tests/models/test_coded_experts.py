"""Experts' weights as codes in patches, kept so where GPUs have kernels; torch stands for these here."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.experts import ParallelExperts
from raylm.layers.slots import FP8_PATCHES, FP8_ROWS, INT8_ROWS, MXFP4_PATCHES, MXFP8_PATCHES, PatchForm
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.decoder import DecoderModel
from raylm.models.scheme import HOPPER, Scheme, configured_scheme
from raylm.ops.patches import unpack
from raylm.parallel.context import ParallelContext
from tests.models import test_mxfp4
from tests.models.paged import CPU, PagedRun, generate, load
from tests.support import checkpoints, torchao
from tests.support.quantised import KINDS, change_config, write_both

ALL = KINDS | torchao.KINDS

PROMPTS = {"a": [(5 * i + 3) % 300 + 3 for i in range(20)], "b": [3, 1, 4]}
SIZES = {"hidden_size": 128, "moe_intermediate_size": 256, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU had the kernels for such experts that a Hopper GPU has."""
    takes = ops.takes_patched_experts
    monkeypatch.setattr(
        ops,
        "takes_patched_experts",
        lambda numbers, num_experts, hidden, size, *_: takes(
            numbers, num_experts, hidden, size, torch.bfloat16, HOPPER
        ),
    )


def experts_of(model: DecoderModel) -> list[ParallelExperts]:
    return [module for module in model.modules() if isinstance(module, ParallelExperts)]


def read(experts: ParallelExperts) -> list[Tensor]:
    """Numbers of both matrices: [E, rows, columns]."""
    matrices = (experts.matrices.gate_up_proj, experts.matrices.down_proj)
    if experts.form is None:
        return [matrix.float() for matrix in matrices]
    columns = len(experts.matrices.down_proj[0]) * 16, len(experts.matrices.gate_up_proj[0]) * 8
    return [
        torch.stack([unpack(each, *experts.form, size) for each in matrix])
        for matrix, size in zip(matrices, columns, strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "form", "size"),
    [
        ("fp8_128", FP8_ROWS, 2),
        ("fp8", FP8_ROWS, 1),
        ("ct_fp8_weights", FP8_PATCHES, 1),
        ("quark_mxfp4", MXFP4_PATCHES, 2),
        ("ct_mxfp4", MXFP4_PATCHES, 1),
        ("awq", PatchForm("int4", 32), 2),
        ("ct_w4a16_zeros", PatchForm("int4", 32), 1),
        ("ct_w8a16", PatchForm("int8", 128), 1),
        ("ct_int8", PatchForm("int8", 128), 2),
        ("ct_nvfp4", PatchForm("int8", 16), 2),
        ("ao_int8", PatchForm("int8", 128), 2),
        ("ao_intx_4_zeros", PatchForm("int4", 32), 1),
        ("ao_fp8_dynamic", FP8_ROWS, 2),
        ("ao_int4", PatchForm("affine4", 32), 1),
        ("ao_tiles", PatchForm("affine4", 32), 2),
        ("ct_w8a8", INT8_ROWS, 1),
        ("ct_mxfp8", MXFP8_PATCHES, 1),
        ("nf4", PatchForm("nf4", 32), 1),
        ("nf4_nested_64", PatchForm("nf4", 64), 2),
    ],
)
def test_the_numbers_of_a_checkpoint_stay(kind: str, form: PatchForm, size: int, tmp_path: Path) -> None:
    packed, dense = write_both(checkpoints.FAMILIES["qwen3_moe"](tmp_path / "plain", **SIZES), tmp_path, ALL[kind])
    # Offsets of up to 1 are float16, and NF4's table is of bfloat16s.
    error, relative = 2.0**-12 if form.numbers == "affine4" else 0, 2.0 ** (-8 if form.numbers == "nf4" else -16)
    for rank in range(size):
        context = ParallelContext(rank, rank, size, 0, 1, CPU)
        (stored,) = experts_of(load(packed, context=context, as_stored=True))
        (expected,) = experts_of(load(dense, context=context))
        assert stored.form == form and expected.form is None
        for found, numbers in zip(read(stored), read(expected), strict=True):
            torch.testing.assert_close(found, numbers, atol=error, rtol=relative)
    if size == 1:
        _, logits = generate(PagedRun(load(packed, as_stored=True)), PROMPTS, num_tokens=4)
        _, expected_logits = generate(PagedRun(load(dense)), PROMPTS, num_tokens=4)
        bound = max(5e-3, 8 * relative)
        for name in PROMPTS:  # linear layers' activations are rounded
            torch.testing.assert_close(logits[name][0], expected_logits[name][0], atol=bound, rtol=bound)


@pytest.mark.parametrize(("kind", "form"), [("ct_w8a8", PatchForm("int8", 128)), ("ct_fp8_channel", FP8_PATCHES)])
def test_where_some_leave_activations_as_they_are_all_do(kind: str, form: PatchForm, tmp_path: Path) -> None:
    packed, dense = write_both(checkpoints.FAMILIES["qwen3_moe"](tmp_path / "plain", **SIZES), tmp_path, ALL[kind])
    config = ALL[kind].config
    group = config["config_groups"]["group_0"]
    groups = {"down": {**group, "targets": ["re:.*down_proj"], "input_activations": None}, "others": group}
    change_config(packed, quantization_config={**config, "config_groups": groups})
    (stored,), (expected,) = (experts_of(load(path, as_stored=True)) for path in (packed, dense))
    assert stored.form == form and expected.form is None
    for found, numbers in zip(read(stored), read(expected), strict=True):
        torch.testing.assert_close(found, numbers, atol=0, rtol=2.0**-16)


def test_gpt_oss_stays_in_mxfp4(tmp_path: Path) -> None:
    packed, twin = test_mxfp4.write_both(tmp_path)
    for stored, expected in zip(experts_of(load(packed, as_stored=True)), experts_of(load(twin)), strict=True):
        assert stored.form == MXFP4_PATCHES
        assert all(map(torch.equal, read(stored), read(expected)))
    texts, logits = generate(PagedRun(load(packed, as_stored=True)), PROMPTS, num_tokens=4)
    expected_texts, expected_logits = generate(PagedRun(load(twin)), PROMPTS, num_tokens=4)
    assert texts == expected_texts
    for name in PROMPTS:
        torch.testing.assert_close(logits[name], expected_logits[name], atol=1e-4, rtol=1e-4)


def test_ranks_share_whole_patches(tmp_path: Path) -> None:
    """Three patches, of which the last has 32 columns: two and one."""
    packed, twin = test_mxfp4.write_both(tmp_path, intermediate_size=288, num_hidden_layers=1)
    (whole,) = experts_of(load(twin))
    contexts = [ParallelContext(rank, rank, 2, 0, 1, CPU) for rank in range(2)]
    parts = [experts_of(load(packed, context=context, as_stored=True))[0] for context in contexts]
    assert [part.form for part in parts] == [MXFP4_PATCHES] * 2
    (first_inner, first), (last_inner, last) = map(read, parts)
    inner, outer = read(whole)
    assert first.shape[2] == 256 and torch.equal(torch.cat((first, last), dim=2), outer)
    gates, ups = zip(first_inner.chunk(2, dim=1), last_inner.chunk(2, dim=1), strict=True)
    assert torch.equal(torch.cat((*gates, *ups), dim=1), inner)
    x, weights = torch.randn(5, outer.shape[1]), torch.rand(5, 2)
    chosen = torch.stack([torch.randperm(len(outer))[:2] for _ in range(5)])
    shares = sum(part(x, weights, chosen) for part in parts)
    torch.testing.assert_close(shares, whole(x, weights, chosen), atol=1e-4, rtol=1e-4)


def test_what_ranks_would_cut_is_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """96 columns, one patch for two ranks."""
    packed, twin = test_mxfp4.write_both(tmp_path)
    context = ParallelContext(1, 1, 2, 0, 1, CPU)
    with caplog.at_level(logging.INFO, logger="raylm"):
        stored, expected = (experts_of(load(path, context=context, as_stored=True)) for path in (packed, twin))
    matrices = 2 * 2 * len(expected[0].matrices.down_proj)
    assert sum(f"weights: matrices that are float32 all the same: {matrices};" in each for each in caplog.messages) == 1
    assert stored[0].form is None and torch.equal(stored[0].matrices.down_proj, expected[0].matrices.down_proj)


@pytest.mark.parametrize("exponent", [192, 255])
def test_scales_of_mxfp4_that_kernels_do_not_take_are_refused(exponent: int, tmp_path: Path) -> None:
    packed, _ = test_mxfp4.write_both(tmp_path)
    tensors = load_file(packed / test_mxfp4.FILE)
    tensors[test_mxfp4.SCALES][0, 3] = exponent
    save_file(tensors, packed / test_mxfp4.FILE)
    with pytest.raises(ConfigError, match="down_proj_scales holds scales that are no finite numbers, or above 2"):
        load(packed, as_stored=True)


def test_a_layer_that_is_not_packed_has_numbers(tmp_path: Path) -> None:
    packed, twin = test_mxfp4.write_both(tmp_path)
    stored, plain = load_file(packed / test_mxfp4.FILE), load_file(twin / test_mxfp4.FILE)
    of_first = [name for name in plain if ".layers.0.mlp.experts." in name]
    mixed = {name: tensor for name, tensor in stored.items() if ".layers.0.mlp.experts." not in name}
    save_file(mixed | {name: plain[name] for name in of_first}, packed / test_mxfp4.FILE)
    first, second = experts_of(load(packed, as_stored=True))
    assert (first.form, second.form) == (None, MXFP4_PATCHES)


def test_codes_and_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    plain = checkpoints.FAMILIES["qwen3_moe"](tmp_path / "plain", **SIZES)
    packed, _ = write_both(plain, tmp_path, KINDS["fp8_128"])
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    for path, number, message, how in (
        (packed, 0xFF, "holds codes that are no numbers", {"as_stored": True}),
        (plain, math.inf, "holds numbers that are not finite", {"quantise": True}),
    ):
        tensors = load_file(path / test_mxfp4.FILE)
        damaged = tensors[name].view(torch.uint8) if number == 0xFF else tensors[name]
        damaged[3, 5] = number
        save_file(tensors, path / test_mxfp4.FILE)
        with pytest.raises(ConfigError, match=message):
            load(path, **how)


@pytest.mark.parametrize(("kind", "size"), [("fp8_128", 192), ("fp8_128", 256), ("gptq_128", 192)])
def test_plans_know_what_is_decoded(kind: str, size: int, tmp_path: Path) -> None:
    plain = checkpoints.FAMILIES["qwen3_moe"](tmp_path / "plain", **SIZES | {"moe_intermediate_size": size})
    packed, _ = write_both(plain, tmp_path, KINDS[kind])
    (stored,) = experts_of(load(packed, as_stored=True))
    assert stored.form == configured_scheme(ArchConfig.from_source(locate(str(packed))), torch.bfloat16).experts


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_are_quantised_while_they_are_loaded(rank: int, tmp_path: Path) -> None:
    plain = checkpoints.FAMILIES["qwen3_moe"](tmp_path, **SIZES)
    context = ParallelContext(rank, rank, 2, 0, 1, CPU)
    (stored,), (expected,) = (experts_of(load(plain, context=context, quantise=each)) for each in (True, False))
    assert stored.form == FP8_ROWS
    for found, numbers in zip(read(stored), read(expected), strict=True):
        largest = numbers.unflatten(-1, (-1, 128)).abs().amax(-1, keepdim=True).expand(-1, -1, -1, 128).flatten(2)
        assert bool(((found - numbers).abs() <= numbers.abs() / 16 + largest / 448).all()) and not torch.equal(
            found, numbers
        )


@pytest.mark.parametrize("kind", ["gptq_ordered", "fp8_blocks"])
def test_other_formats_are_decoded(kind: str, tmp_path: Path) -> None:
    packed, dense = write_both(checkpoints.FAMILIES["qwen3_moe"](tmp_path / "plain", **SIZES), tmp_path, KINDS[kind])
    (stored,), (expected,) = (experts_of(load(path, as_stored=True)) for path in (packed, dense))
    assert stored.form is None and all(map(torch.equal, read(stored), read(expected)))


def test_dummy_experts_are_as_the_configuration_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, kind in (
        ("fp8_rows", "fp8_128"),
        ("int8_rows", "ct_w8a8"),
        ("int4", "awq"),
        ("nf4", "nf4"),
        ("mxfp8", "ct_mxfp8"),
    ):
        plain = checkpoints.FAMILIES["qwen3_moe"](tmp_path / name / "plain", **SIZES)
        packed, _ = write_both(plain, tmp_path / name, KINDS[kind])
        with caplog.at_level(logging.INFO, logger="raylm"):
            (experts,) = experts_of(load(packed, "dummy", as_stored=True, seed=3))
        assert experts.form is not None and experts.form.numbers == name and str(experts.form) in caplog.text
        for numbers in read(experts):
            assert bool(numbers.isfinite().all()) and 0.005 < float(numbers.std()) < 0.04
            assert abs(float(numbers.mean())) < float(numbers.std()) / 20


def test_matrices_of_several_forms_are_none() -> None:
    parts = [f"{expert}.{name}" for expert in range(2) for name in ("gate_up_proj", "down_proj")]
    names = [f"layers.0.mlp.experts.{part}.weight" for part in parts]
    matrices = {name: {None: FP8_PATCHES} for name in names} | {names[0]: dict.fromkeys(("gate", "up"), FP8_PATCHES)}
    path = "layers.0.mlp.experts."
    assert Scheme(matrices).of_experts(path, 2) == FP8_PATCHES
    assert Scheme(matrices).of_experts(path, 3) is None  # the third has numbers
    assert Scheme(matrices | {names[0]: {"gate": FP8_PATCHES}}).of_experts(path, 2) is None
    assert Scheme(matrices | {names[3]: {None: MXFP4_PATCHES}}).of_experts(path, 2) is None
    # Where some leave activations as they are, all do.
    assert Scheme(matrices | {names[3]: {None: FP8_ROWS}}).of_experts(path, 2) == FP8_PATCHES
    assert Scheme(matrices | {names[3]: {None: INT8_ROWS}}).of_experts(path, 2) is None
