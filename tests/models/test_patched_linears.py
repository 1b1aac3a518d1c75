"""Linear layers as codes in patches, kept so where GPUs have kernels; torch stands for these here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.slots import FP8_PATCHES, FP8_ROWS, INT8_ROWS, PatchForm
from raylm.layers.weight import Columns, Part, PatchedWeight, PlainWeight, make_weight
from raylm.model_files.source import locate
from raylm.models import few_rows
from raylm.models.arch import ArchConfig
from raylm.models.decoder import DecoderModel
from raylm.models.load import load_model
from raylm.models.scheme import configured_scheme
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, PagedRun, generate, load
from tests.ops.in_patches import rounded
from tests.support import checkpoints
from tests.support.quantised import FILE, KINDS, change_config, gptq, groups_of, write_both

PROMPTS = {"a": [(5 * i + 3) % 300 + 3 for i in range(20)], "b": [3, 1, 4]}
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU had kernels for such weights."""

    def takes(numbers: ops.Numbers, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> bool:
        return rows % ops.PATCH_ROWS == 0 and columns % ops.PATCHED_UNIT == 0

    monkeypatch.setattr(ops, "takes_patched", takes)


def weights(model: nn.Module) -> dict[str, PatchedWeight]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PatchedWeight)}


def read(weight: PatchedWeight) -> Tensor:
    """The numbers, with columns in their own order."""
    numbers = ops.unpack(weight.patches, *weight.form, weight.num_values // (len(weight.patches) * 16))
    return numbers if weight.order is None else numbers[:, weight.order.long().argsort()]


def inexact(kind: str) -> float:
    """How far numbers in patches may be from a checkpoint's: words of integers have 16 bits of a scale, and NF4's table
    is of bfloat16s."""
    return 2.0**-16 if "nvfp4" in kind else 2.0**-8 if kind.startswith("nf4") else 0


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("family", "kind", "size"),
    [
        ("llama", "awq", 2),
        ("qwen3", "ct_w4a16", 1),
        ("llama", "ct_w4a16_zeros", 2),
        ("phi3", "gptq_4", 2),  # queries, keys and values in one tensor
        ("gpt_neox", "ct_w2a16", 1),  # by heads, a scale a row
        ("cohere", "gptq_4_v2", 1),  # rotary dimensions in pairs
        ("qwen2", "awq_rows", 1),
        ("llama", "fp8_128", 2),
        ("qwen3", "modelopt_blocks", 1),
        ("llama", "ct_fp8_weights", 2),
        ("phi3", "ct_int8", 2),
        ("llama", "ct_int8_tensor", 1),
        ("llama", "ct_w8a8", 1),
        ("phi3", "quark_w8a8", 2),
        ("qwen2", "ct_int8_zeros", 2),
        ("llama", "ct_w8a16", 1),
        ("qwen3", "gptq_8", 2),
        ("llama", "ct_mxfp4", 2),
        ("llama", "ct_nvfp4", 2),
        ("qwen3", "modelopt_nvfp4", 1),
        ("llama", "gptq_ordered", 1),
        ("phi3", "gptq_ordered", 2),
        ("gpt_neox", "gptq_3_ordered", 1),
        ("qwen3", "ct_w4a16_ordered", 1),
        ("cohere", "ct_w4a16_ordered", 2),
        ("llama", "ct_w8a16_ordered", 1),
        ("qwen2", "ct_fp8_ordered", 1),
        ("llama", "nf4", 2),
        ("llama", "ct_mxfp8", 2),
        ("qwen3", "modelopt_mxfp8", 1),
        ("phi3", "nf4_nested_64", 2),
    ],
)
def test_the_numbers_of_a_checkpoint_stay(family: str, kind: str, size: int, tmp_path: Path) -> None:
    packed, dense = write_both(checkpoints.FAMILIES[family](tmp_path / "plain", **SIZES), tmp_path, KINDS[kind])
    for rank in range(size):
        context = ParallelContext(rank, rank, size, 0, 1, CPU)
        stored = weights(load(packed, context=context, as_stored=True))
        expected = load(dense, context=context)
        assert len(stored) >= 2 * expected.arch.num_layers
        for name, weight in stored.items():
            torch.testing.assert_close(read(weight), expected.get_submodule(name).values, atol=0, rtol=inexact(kind))
    if size == 1:
        texts, logits = generate(PagedRun(load(packed, as_stored=True)), PROMPTS, num_tokens=4)
        expected_texts, expected_logits = generate(PagedRun(load(dense)), PROMPTS, num_tokens=4)
        assert texts == expected_texts
        bound = 1e-4 + 256 * inexact(kind)
        for name in PROMPTS:
            torch.testing.assert_close(logits[name], expected_logits[name], atol=bound, rtol=bound)


@pytest.mark.usefixtures("kernels")
def test_ranks_share_an_mlp_by_whole_patches(tmp_path: Path) -> None:
    """Seven patches, of which the last has 64 columns: three for each rank but the first, which has four."""
    sizes = SIZES | {"intermediate_size": 832}
    packed, dense = write_both(checkpoints.llama(tmp_path / "plain", **sizes), tmp_path, KINDS["awq"])
    mlps = [
        load(packed, context=ParallelContext(rank, rank, 2, 0, 1, CPU), as_stored=True).layers["0"].mlp
        for rank in range(2)
    ]
    expected = load(dense).layers["0"].mlp
    for mlp, share in zip(mlps, (512, 320), strict=True):
        down, gate_up = mlp.down_proj.weight, mlp.gate_up_proj.weight
        assert isinstance(down, PatchedWeight) and isinstance(gate_up, PatchedWeight)
        assert (read(down).shape[1], read(gate_up).shape[0]) == (share, 2 * share)
    assert torch.equal(torch.cat([read(mlp.down_proj.weight) for mlp in mlps], dim=1), expected.down_proj.weight.values)
    x = torch.randn(3, SIZES["hidden_size"])
    torch.testing.assert_close(sum(mlp.partial(x) for mlp in mlps), expected.partial(x), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_what_a_rank_would_cut_is_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, dense = write_both(checkpoints.llama(tmp_path / "plain", **SIZES), tmp_path, KINDS["awq"])
    context = ParallelContext(1, 1, 2, 0, 1, CPU)
    with caplog.at_level(logging.INFO, logger="raylm"):
        layer = load(packed, context=context, as_stored=True).layers["0"]
    assert any(
        "weights: matrices that are float32 all the same: 1; ranks cut" in message for message in caplog.messages
    )
    expected = load(dense, context=context).layers["0"]
    assert isinstance(layer.mlp.down_proj.weight, PatchedWeight)  # 512 columns a rank
    assert isinstance(layer.self_attn.o_proj.weight, PlainWeight)  # 256
    torch.testing.assert_close(layer.self_attn.o_proj.weight.values, expected.self_attn.o_proj.weight.values)


def by_groups(columns: int) -> list[int]:
    groups = groups_of(columns, 32).tolist()
    return sorted(range(columns), key=groups.__getitem__)


@pytest.mark.usefixtures("kernels")
def test_columns_in_activation_order_are_sorted_by_their_groups(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", **SIZES), tmp_path, KINDS["gptq_ordered"])
    with caplog.at_level(logging.INFO, logger="raylm"):
        found = weights(load(packed, as_stored=True))
    orders = {name.split(".")[-2]: weight.order for name, weight in found.items()}
    assert {name: order.tolist() for name, order in orders.items() if order is not None} == {
        "qkv_proj": by_groups(512),
        "o_proj": by_groups(64),
        "gate_up_proj": by_groups(512),
        "down_proj": by_groups(1024),
    }
    assert "4 in int4 with a scale for each 32 columns in activation order; activations" in caplog.text
    weight = found["layers.0.mlp.down_proj.weight"]
    picked = torch.tensor([31, 0, 31, 17])
    assert torch.equal(weight.rows(picked), read(weight)[picked])
    x = torch.randn(1025, 6).t()[:, 1:]  # as no layer has them, but an operator takes them
    torch.testing.assert_close(weight.matmul(x), F.linear(x, read(weight)), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_ranks_that_share_the_columns_of_sorted_groups_decode_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed, dense = write_both(checkpoints.llama(tmp_path / "plain", **SIZES), tmp_path, KINDS["gptq_ordered"])
    context = ParallelContext(1, 1, 2, 0, 1, CPU)
    with caplog.at_level(logging.INFO, logger="raylm"):
        layer = load(packed, context=context, as_stored=True).layers["0"]
    assert "weights: matrices that are float32 all the same: 2; ranks cut" in caplog.text
    assert isinstance(layer.self_attn.qkv_proj.weight, PatchedWeight)
    assert isinstance(layer.mlp.gate_up_proj.weight, PatchedWeight)
    expected = load(dense, context=context).layers["0"]
    for found, numbers in (
        (layer.self_attn.o_proj.weight, expected.self_attn.o_proj.weight),
        (layer.mlp.down_proj.weight, expected.mlp.down_proj.weight),
    ):
        assert isinstance(found, PlainWeight)
        torch.testing.assert_close(found.values, numbers.values)


def in_turn(columns: int) -> Tensor:
    """As if each group of 32 had every so many columns: another order than the checkpoints'."""
    return (torch.arange(columns) % (columns // 32)).to(torch.int32)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("change", "decoded"),
    [
        ({"self_attn.k_proj": in_turn(512)}, "self_attn.qkv_proj"),
        ({"mlp.up_proj": torch.arange(512, dtype=torch.int32) // 32}, "mlp.gate_up_proj"),
        # A column more in the first group, and one less in the second.
        ({"mlp.down_proj": (torch.arange(1024) - 1).clamp(0).div(32, rounding_mode="floor").int()}, "mlp.down_proj"),
    ],
)
def test_orders_that_no_patches_have_are_decoded(change: dict[str, Tensor], decoded: str, tmp_path: Path) -> None:
    changes = {f"model.layers.0.{module}.g_idx": groups for module, groups in change.items()}
    plain = checkpoints.llama(tmp_path / "plain", **SIZES)
    packed, _ = write_both(plain, tmp_path, KINDS["gptq_ordered"], changes=changes)
    found, expected = load(packed, as_stored=True), load(packed)
    kept = weights(found)
    assert len(kept) == 3
    assert torch.equal(
        found.get_submodule(f"layers.0.{decoded}.weight").values,
        expected.get_submodule(f"layers.0.{decoded}.weight").values,
    )
    for name, weight in kept.items():
        assert torch.equal(read(weight), expected.get_submodule(name).values), name


@pytest.mark.usefixtures("kernels")
def test_the_last_group_in_activation_order_may_be_smaller(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain", hidden_size=512, intermediate_size=640, num_hidden_layers=1)
    kind = replace(
        KINDS["gptq_ordered"],
        config=KINDS["gptq_ordered"].config | {"group_size": 256},
        packer=gptq(4, 256, ordered=True),
    )
    packed, dense = write_both(plain, tmp_path, kind)
    name = "layers.0.mlp.down_proj.weight"
    weight = weights(load(packed, as_stored=True))[name]  # groups of 256, 256 and 128
    assert weight.order is not None and torch.equal(read(weight), load(dense).get_submodule(name).values)


@pytest.mark.usefixtures("kernels")
def test_groups_of_neighbours_have_no_order_whatever_the_configuration_says(tmp_path: Path) -> None:
    plain, kind = checkpoints.llama(tmp_path / "plain", **SIZES), KINDS["gptq_4"]
    packed, dense = write_both(plain, tmp_path, replace(kind, config=kind.config | {"desc_act": True}))
    for size in (1, 2):
        context = ParallelContext(size - 1, size - 1, size, 0, 1, CPU)
        found, expected = (load(path, context=context, as_stored=True) for path in (packed, dense))
        kept = weights(found)
        assert len(kept) == 5 - size  # two ranks cut o_proj's patches
        for name, weight in kept.items():
            assert weight.order is None and torch.equal(read(weight), expected.get_submodule(name).values), name


@pytest.mark.usefixtures("kernels")
def test_a_group_that_is_not_there_is_refused(tmp_path: Path) -> None:
    changes = {"model.layers.0.self_attn.q_proj.g_idx": torch.full((512,), 16, dtype=torch.int32)}
    plain = checkpoints.llama(tmp_path / "plain", **SIZES)
    packed, _ = write_both(plain, tmp_path, KINDS["gptq_ordered"], changes=changes)
    with pytest.raises(ConfigError, match=r"q_proj\.g_idx names group 16; allowed: 0 to 15"):
        load(packed, as_stored=True)


@pytest.mark.usefixtures("kernels")
def test_weights_from_a_peer_have_the_order_too(tmp_path: Path) -> None:
    """A peer sends parameters alone."""
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", **SIZES), tmp_path, KINDS["gptq_ordered"])
    source, context = locate(str(packed)), ParallelContext.single(CPU)
    peer = load(packed, as_stored=True)

    def fill(model: DecoderModel) -> bool:
        for own, sent in zip(model.parameters(), peer.parameters(), strict=True):
            own.copy_(sent)
        return True

    arch = ArchConfig.from_source(source)
    filled = load_model(source, arch, context, torch.float32, "auto", as_stored=True, progress=False, fill=fill)
    texts, logits = (list(each) for each in zip(*(run(model) for model in (peer, filled)), strict=True))
    assert texts[0] == texts[1] and all(torch.equal(logits[0][name], logits[1][name]) for name in PROMPTS)


def run(model: DecoderModel) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    return generate(PagedRun(model), PROMPTS, num_tokens=4)


@pytest.mark.usefixtures("kernels")
def test_dummy_weights_that_would_have_an_order_have_some(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain", **SIZES)
    change_config(plain, quantization_config=KINDS["gptq_ordered"].config)
    model = load(plain, "dummy", as_stored=True)
    orders = [weight.order.tolist() for weight in weights(model).values() if weight.order is not None]
    assert [sorted(order) for order in orders] == [list(range(columns)) for columns in (512, 64, 512, 1024)]
    assert all(order != sorted(order) for order in orders)
    _, logits = run(model)
    assert bool(logits["a"].isfinite().all())


@pytest.mark.usefixtures("kernels")
def test_one_kernel_for_all_layers_takes_columns_in_their_own_order_alone(tmp_path: Path) -> None:
    for name, reads in (("gptq_4", True), ("gptq_ordered", False)):
        plain = checkpoints.llama(tmp_path / name / "plain", **SIZES)
        packed, _ = write_both(plain, tmp_path / name, KINDS[name])
        found = list(weights(load(packed, as_stored=True)).values())
        assert len(found) == 4 and (few_rows._read(found, torch.float32) is not None) == reads


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["fp4", "nf4_nested", "nf4_over_rows", "fp8_blocks"])
def test_other_formats_are_not_kept_so(kind: str, tmp_path: Path) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", num_hidden_layers=1), tmp_path, KINDS[kind])
    assert not weights(load(packed, as_stored=True))


def change(packed: Path, end: str, changed: Callable[[Tensor], Tensor]) -> None:
    """All tensors whose names end so."""
    tensors = load_file(packed / FILE)
    save_file({name: changed(each) if name.endswith(end) else each for name, each in tensors.items()}, packed / FILE)


@pytest.mark.usefixtures("kernels")
def test_codes_of_another_table_than_nf4_are_decoded(tmp_path: Path) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", **SIZES), tmp_path, KINDS["nf4"])
    assert len(weights(load(packed, as_stored=True))) == 4
    change(packed, ".quant_map", lambda table: table * 0.5)
    assert not weights(load(packed, as_stored=True))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("end", "byte", "sentence"),
    [
        ("proj.weight", 0x7F, "proj.weight holds codes that are no numbers"),
        ("weight_scale", 192, r"proj.weight holds scales that are no finite numbers, or above 2 \*\* 64"),
    ],
)
def test_what_kernels_do_not_take_of_mxfp8_is_refused(end: str, byte: int, sentence: str, tmp_path: Path) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", **SIZES), tmp_path, KINDS["ct_mxfp8"])
    change(packed, end, lambda tensor: torch.full_like(tensor.view(torch.uint8), byte).view(tensor.dtype))
    with pytest.raises(ConfigError, match=sentence):
        load(packed, as_stored=True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["nf4", "ct_mxfp8"])
def test_dummy_weights_have_the_deviation_of_others(kind: str, tmp_path: Path) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", **SIZES), tmp_path, KINDS[kind])
    dummy = weights(load(packed, "dummy", as_stored=True))
    assert len(dummy) == 4 and all(0.01 < float(read(weight).std()) < 0.03 for weight in dummy.values())


@pytest.mark.usefixtures("kernels")
def test_the_log_says_what_is_computed_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", **SIZES), tmp_path, KINDS["awq"])
    with caplog.at_level(logging.INFO, logger="raylm"):
        load(packed, as_stored=True)
        dummy = weights(load(packed, "dummy", as_stored=True, seed=3))
    found = "weights: computed with as they are stored: 4 in int4 with a scale for each 32 columns; activations and all"
    assert sum(found in message for message in caplog.messages) == 2 and "decoded to" not in caplog.text
    for weight in dummy.values():
        numbers = read(weight)
        assert 0.01 < float(numbers.std()) < 0.03 and len(numbers.unique()) > 1000
    again = weights(load(packed, "dummy", as_stored=True, seed=3))
    assert all(torch.equal(weight.patches, again[name].patches) for name, weight in dummy.items())


def test_a_table_gives_its_rows() -> None:
    form = PatchForm("int4", 32)
    weight = make_weight([Part(None, 64, 32, 16)], Columns.whole(576), {None: form}, dtype=torch.float32, device=CPU)
    assert isinstance(weight, PatchedWeight)
    slot = weight.named_slots("weight")["weight", None]
    assert slot.shape == (64, 576) and slot.start == 1
    numbers = [torch.randint(0, 16, (32, size)) for size in (576, 18)]
    slot.put(0, ops.pack_integers("int4", numbers[0].to(torch.uint8), torch.rand(32, 18), numbers[1], 32))
    picked = torch.tensor([31, 0, 31, 17])
    assert torch.equal(weight.rows(picked), read(weight)[picked])


@pytest.mark.parametrize(
    "parts", [[Part(None, 24, 24, 0)], [Part(None, 48, 16, 8)], [Part(None, 32, 32, 0, padding=16)]]
)
def test_parts_that_rows_of_patches_do_not_end_with_are_plain(parts: list[Part]) -> None:
    weight = make_weight(parts, Columns.whole(512), {None: PatchForm("int4", 64)}, dtype=torch.float32, device=CPU)
    assert isinstance(weight, PlainWeight)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("ct_w8a8", INT8_ROWS),
        ("quark_w8a8", INT8_ROWS),
        ("ct_int8", PatchForm("int8", 128)),  # activations are left as they are
        ("quark_int8", PatchForm("int8", 128)),
        ("ct_w8a4", PatchForm("int8", 128)),
        ("ct_w8a8_groups", PatchForm("int8", 64)),
        ("ct_w8a8_groups_of_activations", PatchForm("int8", 128)),
        ("ct_w8a8_zeros_of_activations", PatchForm("int8", 128)),
        ("quark_w8a4", PatchForm("int8", 128)),
        ("fp8_128", FP8_ROWS),
        ("ct_fp8_weights", FP8_PATCHES),
        ("modelopt_blocks", FP8_PATCHES),
    ],
)
def test_activations_are_rounded_where_the_checkpoint_says_so(kind: str, form: PatchForm, tmp_path: Path) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", **SIZES), tmp_path, KINDS[kind])
    model = load(packed, as_stored=True)
    assert {weight.form for weight in weights(model).values()} == {form}
    assert configured_scheme(model.arch, torch.bfloat16).linears == form


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("kind", "most"), [("ct_w8a8", 16), ("fp8_128", 64)])
def test_many_rows_are_rounded(kind: str, most: int, tmp_path: Path) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", **SIZES), tmp_path, KINDS[kind])
    weight = weights(load(packed, as_stored=True))["layers.0.mlp.down_proj.weight"]
    x = torch.randn(most + 1, SIZES["intermediate_size"], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(weight.matmul(x[1:]), F.linear(x[1:], read(weight)))
    expected = F.linear(rounded(x, weight.form.numbers).float(), read(weight))
    torch.testing.assert_close(weight.matmul(x), expected, atol=1e-3, rtol=1e-3)
    assert (weight.matmul(x) - F.linear(x, read(weight))).abs().max() > 0.01
