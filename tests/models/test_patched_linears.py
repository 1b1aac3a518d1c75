"""Linear layers as codes in patches, kept so where GPUs have kernels; torch stands for these here."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from raylm import ops
from raylm.layers.slots import PatchForm
from raylm.layers.weight import Columns, Part, PatchedWeight, PlainWeight, make_weight
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, PagedRun, generate, load
from tests.support import checkpoints
from tests.support.quantised import KINDS, write_both

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
    return ops.unpack(weight.patches, *weight.form, weight.num_values // (len(weight.patches) * 16))


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
        ("qwen2", "ct_int8_zeros", 2),
        ("llama", "ct_w8a16", 1),
        ("qwen3", "gptq_8", 2),
        ("llama", "ct_mxfp4", 2),
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
            assert torch.equal(read(weight), expected.get_submodule(name).values), name
    if size == 1:
        texts, logits = generate(PagedRun(load(packed, as_stored=True)), PROMPTS, num_tokens=4)
        expected_texts, expected_logits = generate(PagedRun(load(dense)), PROMPTS, num_tokens=4)
        assert texts == expected_texts
        for name in PROMPTS:
            torch.testing.assert_close(logits[name], expected_logits[name], atol=1e-4, rtol=1e-4)


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


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["gptq_ordered", "ct_w4a16_ordered", "nf4", "fp8_blocks", "ct_nvfp4", "ct_mxfp8"])
def test_other_formats_are_not_kept_so(kind: str, tmp_path: Path) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", num_hidden_layers=1), tmp_path, KINDS[kind])
    assert not weights(load(packed, as_stored=True))


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
