"""Steps of few rows through one operator for all layers: the same tokens, and only where it may be."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from raylm import ops
from raylm.layers.attention import AttentionMetadata, LayerInput
from raylm.models import few_rows
from raylm.models.decoder import DecoderModel
from raylm.models.few_rows import why_not
from raylm.models.taps import HiddenTaps
from raylm.ops import extension
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, PagedRun, generate, load
from tests.support import checkpoints
from tests.support.quantised import KINDS, write_both

MANY = {str(length): list(range(length)) for length in range(2, 8)}
PROMPTS = {"a": list(range(19)), "b": [3, 4, 5]}


@pytest.fixture
def few_layers(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """As if GPUs' operator had a kernel here: torch's version of it, with its calls counted."""
    calls = Mock(wraps=ops.few_layers)
    monkeypatch.setattr(few_rows, "_on_cpu", few_rows._on_gpu)
    monkeypatch.setattr(ops, "few_layers_rows", lambda *_, **__: ops.FEW_ROWS)
    monkeypatch.setattr(ops, "few_layers", calls)
    return calls


@pytest.fixture
def decode_layers(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """CPUs' operator, with its calls counted."""
    if "decode_layers" not in extension.load().ops.get("cpu", ()):
        pytest.skip(f"the extension has no decode_layers for cpu: {extension.load()}")
    calls = Mock(wraps=ops.decode_layers)
    monkeypatch.setattr(ops, "decode_layers", calls)
    return calls


def tokens_of(model: DecoderModel) -> dict[str, list[int]]:
    return generate(PagedRun(model, block_size=16), PROMPTS, num_tokens=4)[0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_the_same_tokens(family: str, few_layers: Mock, tmp_path: Path) -> None:
    folder = checkpoints.FAMILIES[family](tmp_path)
    apart, together = load(folder), load(folder)
    apart.runs_layers_together = False
    expected = tokens_of(apart)
    assert not few_layers.called
    assert tokens_of(together) == expected
    assert few_layers.called


@pytest.mark.parametrize("kind", ["awq", "fp8_128"])
def test_the_same_tokens_of_experts_in_codes(
    kind: str, few_layers: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("takes_patched", "takes_patched_experts"):
        monkeypatch.setattr(ops, name, lambda *_: True)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "head_dim": 64}
    plain = checkpoints.FAMILIES["qwen3_moe"](tmp_path / "plain", **sizes)
    folder, _ = write_both(plain, tmp_path, KINDS[kind])
    apart, together = load(folder, as_stored=True), load(folder, as_stored=True)
    apart.runs_layers_together = False
    assert tokens_of(together) == tokens_of(apart)
    assert few_layers.called


@pytest.mark.parametrize(
    ("family", "reason"), [("qwen2_moe", "none that are shared"), ("gpt_oss", "with silu or gelu_tanh"), ("phimoe", "")]
)
def test_mixtures_that_no_kernel_takes(
    family: str, reason: str, few_layers: Mock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="raylm"):
        tokens_of(load(checkpoints.FAMILIES[family](tmp_path)))
    assert not few_layers.called and reason in caplog.text


def test_not_over_a_cache_of_another_type(few_layers: Mock, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(checkpoints.llama(tmp_path))
    with caplog.at_level(logging.INFO, logger="raylm"):
        generate(PagedRun(model, block_size=16, dtype=ops.CODES), PROMPTS, num_tokens=4)
    assert not few_layers.called
    assert "the cache is float8_e4m3fn, and it reads one of float32 alone" in caplog.text


@pytest.mark.parametrize("as_stored", [False, True], ids=["decoded", "stored"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_equal_to_the_bit_on_a_cpu(family: str, as_stored: bool, decode_layers: Mock, tmp_path: Path) -> None:
    path = checkpoints.FAMILIES[family](tmp_path / "hf")
    if as_stored:
        kinds = {"attn_q": GGMLType.Q8_0, "attn_output": GGMLType.Q4_1, "ffn_gate": GGMLType.Q5_0}
        path = checkpoints.write_gguf(path, tmp_path / "model.gguf", kinds)
    apart, together = load(path, as_stored=as_stored), load(path, as_stored=as_stored)
    apart.runs_layers_together = False
    texts, logits = generate(PagedRun(apart), MANY, num_tokens=5)
    assert not decode_layers.called
    found_texts, found = generate(PagedRun(together), MANY, num_tokens=5)
    assert decode_layers.called
    assert found_texts == texts
    for name, own in found.items():
        assert torch.equal(own, logits[name])


def test_activations_of_16_bits_keep_layers_apart(
    decode_layers: Mock, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model = load(checkpoints.llama(tmp_path), dtype=torch.bfloat16)
    with caplog.at_level("INFO"):
        generate(PagedRun(model, dtype=torch.bfloat16), PROMPTS, num_tokens=4)
    assert not decode_layers.called
    assert [message for message in caplog.messages if "layer by layer" in message] == [
        "Decode steps of few rows run layer by layer, not all layers in one kernel: "
        "activations are bfloat16; allowed on a CPU: float32."
    ]


@pytest.mark.parametrize("family", ["gemma3", "bloom", "mistral"])
def test_families_that_neither_takes(family: str, few_layers: Mock, decode_layers: Mock, tmp_path: Path) -> None:
    model = load(checkpoints.FAMILIES[family](tmp_path))
    tokens_of(model)
    assert not few_layers.called and not decode_layers.called


def test_taps_between_layers_keep_them_apart(few_layers: Mock, tmp_path: Path) -> None:
    model = load(checkpoints.llama(tmp_path))
    HiddenTaps(model, [model.arch.num_layers], max_tokens=20)
    assert model.runs_layers_together
    HiddenTaps(model, [1], max_tokens=20)
    tokens_of(model)
    assert not few_layers.called


def test_tokens_of_no_sequence_keep_layers_apart(decode_layers: Mock, tmp_path: Path) -> None:
    model = load(checkpoints.llama(tmp_path))
    shape = (2, 16, model.arch.num_kv_heads, model.arch.head_dim)
    one, starts = torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    for tokens in (3, 1):
        meta = AttentionMetadata(starts, one, one.view(1, 1), torch.arange(16, 16 + tokens), 1, 1)
        caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(model.arch.num_layers)]
        positions = torch.zeros(tokens, dtype=torch.int64)
        hidden = model(torch.arange(5, 5 + tokens), [LayerInput(positions, cache, meta) for cache in caches])
        assert len(hidden) == tokens
        assert decode_layers.called == (tokens == 1)


def test_ranks_agree_on_how_many_rows(few_layers: Mock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank whose weights are kept in a form of its own tells the others, which may have a kernel for theirs."""
    said: list[int] = []

    def least(value: int, _: ParallelContext) -> int:
        said.append(value)
        return 0

    monkeypatch.setattr(few_rows, "agree_on_min", least)
    tokens_of(load(checkpoints.llama(tmp_path)))
    monkeypatch.setattr(few_rows, "_read", lambda *_: None)
    tokens_of(load(checkpoints.llama(tmp_path)))
    assert said == [2, 0] and not few_layers.called


def test_why_not(tmp_path: Path) -> None:
    model = load(checkpoints.llama(tmp_path))
    arch, single = model.arch, ParallelContext.single(CPU)
    gpu = ParallelContext.single(torch.device("cuda"))
    assert why_not(arch, gpu, 32) is None and why_not(arch, single, 24) is None
    assert why_not(arch, gpu, 24) == "cache.block_size is 24; allowed: powers of two from 16 on"
    tensor, stages = ParallelContext(0, 0, 2, 0, 1, CPU), ParallelContext(0, 0, 1, 0, 2, CPU)
    apart = "its ranks share no memory (parallel.custom_all_reduce, runtime.deterministic, or other hosts)"
    assert why_not(arch, tensor, 16) == why_not(arch, replace(tensor, reducer=Mock(cells=None)), 16) == apart
    peers = ops.PeerCells(torch.zeros(2), 0, ops.peer_cells_bytes(arch.hidden_size, 2), 1.0)
    tensor = replace(tensor, reducer=Mock(cells=peers))
    assert why_not(arch, tensor, 16) is None
    longer = "its rows are longer than the served model's, for which its ranks share memory"
    assert why_not(replace(arch, hidden_size=2 * arch.hidden_size), tensor, 16) == longer
    assert why_not(arch, stages, 16) == "the model is split into stages"
    assert why_not(replace(arch, sinks=True), single, 16) == "its attention has no sinks"
    first, *others = arch.layers
    nope = replace(first, rope=None)
    assert why_not(replace(arch, layers=(nope, *others)), single, 16) == "layers differ"
    assert why_not(replace(arch, layers=(nope,)), single, 16) == "it rotates queries and keys"
    half = replace(first, rope=replace(first.rope, partial_rotary_factor=0.5))
    assert why_not(replace(arch, layers=(half,)), single, 16) is None
    assert why_not(replace(arch, layers=(half,)), gpu, 16) == "it rotates all of queries and keys"
