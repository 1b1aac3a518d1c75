"""Quantised weights that are repacked into blocks of GGUF files: the same numbers, in the right places, and the same
model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raylm import ops
from raylm.cli import main
from raylm.errors import ConfigError
from raylm.layers.weight import BlockWeight, PlainWeight
from raylm.models.decoder import DecoderModel
from raylm.models.scheme import stored_forms
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, PagedRun, generate, load
from tests.models.stored import assert_equal
from tests.support import checkpoints
from tests.support.quantised import FILE, KINDS, Kind, awq, ct_packed, gptq, write_both

FORMS = {
    "gptq_128": "Q4_0",
    "gptq_rows": "Q5_0",
    "gptq_2": "Q4_0",
    "gptq_3": "Q4_0",
    "gptq_4": "Q5_0",
    "gptq_4_v2": "Q5_0",
    "awq": "Q5_0",
    "awq_rows": "Q5_0",
    "auto_round": "Q5_0",
    "auto_round_sym": "Q4_0",
    "auto_round_awq": "Q5_0",
    "ct_w2a16": "Q4_0",
    "ct_w4a16": "Q4_0",
    "ct_w4a16_zeros": "Q5_0",
    "ct_w8a16": "Q8_0",
    "ct_int8": "Q8_0",
    "ct_int8_tensor": "Q8_0",
    "quark_int8": "Q8_0",
}
SYMMETRIC_8 = Kind(KINDS["gptq_8"].config | {"sym": True}, gptq(8, 32, zero=128))
DECODED = [
    *("gptq_ordered", "ct_w4a16_ordered"),  # columns of a block are of several groups
    *("gptq_8", "gptq_8_v2", "ct_int8_zeros"),  # differences of nine bits
    *("bnb8", "nf4", "fp8_blocks", "ct_nvfp4"),
]
PROMPTS = {"a": list(range(20)), "b": [3, 1, 4]}


@pytest.fixture
def exact_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were kernels for every kind, with the products of the fallback, which are exact."""
    monkeypatch.setattr(ops, "block_kernels", lambda like, kind: True)
    monkeypatch.setattr("raylm.ops.blocks._has_kernels", lambda device, kind: False)


def forms(model: DecoderModel) -> set[str]:
    return set(stored_forms(model))


def changed(folder: Path, name: str, change: object) -> None:
    tensors = load_file(folder / FILE)
    save_file(tensors | {name: change(tensors[name])}, folder / FILE)  # type: ignore[operator]


@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize("name", [*FORMS, "gptq_8_sym"])
def test_the_same_numbers(name: str, tmp_path: Path) -> None:
    kind, form = (SYMMETRIC_8, "Q8_0") if name == "gptq_8_sym" else (KINDS[name], FORMS[name])
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    packed, _ = write_both(plain, tmp_path, kind)
    model = load(packed, as_stored=True)
    assert stored_forms(model) == {form: 7}
    assert_equal(packed)


@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize("name", DECODED)
def test_what_blocks_do_not_hold_is_decoded(name: str, tmp_path: Path) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", num_hidden_layers=1), tmp_path, KINDS[name])
    assert stored_forms(load(packed, as_stored=True)) == {}
    assert_equal(packed)


@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "gptq_128"),
        ("qwen2", "awq"),
        ("phi3", "gptq_4"),  # queries, keys and values in one tensor; gate and up too
        ("glm4", "ct_w4a16_zeros"),
        ("gpt_neox", "ct_int8"),  # queries, keys and values by heads
        ("cohere", "auto_round_awq"),  # rotary dimensions in pairs
        ("mixtral", "ct_w4a16"),
    ],
)
def test_families(family: str, kind: str, tmp_path: Path) -> None:
    plain = checkpoints.FAMILIES[family](tmp_path / "plain", num_hidden_layers=2)
    packed, _ = write_both(plain, tmp_path, KINDS[kind])
    assert forms(load(packed, as_stored=True)) == {FORMS[kind]}
    assert_equal(packed, tensor=2)


@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize("columns", [32, 64, 96])
def test_groups_of_several_blocks(columns: int, tmp_path: Path) -> None:
    """Ranks begin within a group; the last one is cut short."""
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1, intermediate_size=192)
    kind = KINDS["awq"]
    packed, _ = write_both(plain, tmp_path, Kind(kind.config | {"group_size": columns}, awq(columns)))
    for rank in range(2):
        context = ParallelContext(rank, rank, 2, 0, 1, CPU)
        assert stored_forms(load(packed, context=context, as_stored=True)) == {"Q5_0": 7}
    assert_equal(packed, tensor=2)


@pytest.mark.usefixtures("exact_kernels")
def test_groups_that_cut_blocks_are_decoded(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    packed, _ = write_both(plain, tmp_path, Kind(KINDS["awq"].config | {"group_size": 16}, awq(16)))
    assert stored_forms(load(packed, as_stored=True)) == {}
    assert_equal(packed)


@pytest.mark.usefixtures("exact_kernels")
@pytest.mark.parametrize(
    ("dtype", "scale", "is_held"),
    [
        (torch.bfloat16, 2.0**-17, True),
        (torch.bfloat16, 1.0078125 * 2.0**-17, True),
        (torch.bfloat16, 1.0078125 * 2.0**-18, False),
        (torch.bfloat16, 65536.0, False),
        (torch.float32, 0.125, True),
        (torch.float32, 0.1, False),
    ],
)
def test_scales_that_float16_does_not_hold(dtype: torch.dtype, scale: float, is_held: bool, tmp_path: Path) -> None:
    """One such scale has the whole matrix decoded, and the other parts of it."""
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    packed, _ = write_both(plain, tmp_path, KINDS["ct_w4a16"])

    def change(scales: Tensor) -> Tensor:
        scales = scales.to(dtype)
        scales[5, 1] = scale
        return scales

    changed(packed, "model.layers.0.self_attn.k_proj.weight_scale", change)
    model = load(packed, as_stored=True)
    assert isinstance(model.layers["0"].self_attn.qkv_proj.weight, BlockWeight if is_held else PlainWeight)
    assert stored_forms(model) == {"Q4_0": 7 if is_held else 4}
    assert_equal(packed)


@pytest.mark.usefixtures("exact_kernels")
def test_impossible_scales(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    for name, kind, part in (("a", "gptq_4", "scales"), ("b", "ct_w4a16", "weight_scale")):
        packed, _ = write_both(plain, tmp_path / name, KINDS[kind])
        changed(packed, f"model.layers.0.mlp.up_proj.{part}", lambda scales: scales.fill_(torch.inf))
        with pytest.raises(ConfigError, match=rf"up_proj\.{part} holds scales that are no finite numbers"):
            load(packed, as_stored=True)
    packed, _ = write_both(plain, tmp_path / "c", KINDS["ct_int8"])
    changed(packed, "model.layers.0.mlp.up_proj.weight_scale", torch.neg)
    with pytest.raises(ConfigError, match=r"up_proj\.weight_scale holds negative scales"):
        load(packed, as_stored=True)


@pytest.mark.usefixtures("exact_kernels")
def test_a_head_in_blocks(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    tensors = load_file(plain / FILE)
    packed, _ = write_both(plain, tmp_path, KINDS["ct_w4a16"])
    parts, _ = ct_packed(4, 32)(torch.Generator().manual_seed(1), *tensors["lm_head.weight"].shape)
    stored = load_file(packed / FILE)
    del stored["lm_head.weight"]
    save_file(stored | {f"lm_head.{part}": tensor for part, tensor in parts.items()}, packed / FILE)
    assert stored_forms(load(packed, as_stored=True)) == {"Q4_0": 8}
    assert_equal(packed)


def test_the_doctor_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = write_both(checkpoints.llama(tmp_path / "plain", num_hidden_layers=1), tmp_path, KINDS["awq"])
    for has_kernels, words in ((True, []), (True, ["--weights", "decoded"]), (False, [])):
        monkeypatch.setattr(ops, "block_kernels", lambda like, kind, found=has_kernels: found)
        assert main(["doctor", str(packed), "--json", *words]) == 0
        choices = json.loads(capsys.readouterr().out)["choices"]
        (reason,) = [each["reason"] for each in choices if each["name"] == "stored weights"]
        assert ("matrices stay where blocks" in reason) is (has_kernels and not words)
        assert reason.endswith("decoded to float32 while they are loaded: they take the memory of float32")


KERNELS = ["gptq_128", "gptq_4", "awq", "ct_w4a16", "ct_w4a16_zeros", "ct_int8"]


@pytest.mark.parametrize("kind", KERNELS)
def test_the_same_model(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extension's kernels, where there are any: weights are equal, activations have 16 bits."""
    monkeypatch.setattr(ops, "block_kernels", lambda like, kind: True)
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=2)
    packed, _ = write_both(plain, tmp_path, KINDS[kind])
    stored, dense = load(packed, as_stored=True), load(packed)
    assert forms(stored) == {FORMS[kind]}
    texts, logits = generate(PagedRun(stored), PROMPTS, num_tokens=4)
    expected_texts, expected = generate(PagedRun(dense), PROMPTS, num_tokens=4)
    assert texts == expected_texts
    for name in PROMPTS:
        assert (logits[name] - expected[name]).norm() < 3e-4 * expected[name].norm()


@pytest.mark.usefixtures("exact_kernels")
def test_the_memory_is_that_of_blocks(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=2)
    packed, _ = write_both(plain, tmp_path, KINDS["gptq_128"])
    stored, dense = (
        sum(tensor.nbytes for name, tensor in load(packed, as_stored=each).named_parameters() if "_proj" in name)
        for each in (True, False)
    )
    assert stored == dense / 32 / 4 * 18
