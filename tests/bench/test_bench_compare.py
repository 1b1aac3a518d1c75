"""transformers' side of a comparison, on a tiny random model."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raylm.bench.cases import parse_case
from raylm.bench.compare import GenerateRunner, compare_case, load_reference
from raylm.bench.offline import TokenRequest
from raylm.model_files.source import locate
from tests.support.fake_llm import FakeLLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def model(folder):
    return load_reference(locate(str(folder)), dtype="float32", device="cpu")


def test_the_reference_has_the_weights_and_no_end(folder, model):
    assert model.dtype is torch.float32 and not model.training
    assert model.generation_config.eos_token_id is None
    stored = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, stored.lm_head.weight)


def test_a_static_batch_runs_to_its_longest_output(model, monkeypatch):
    calls = []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda ids, **kw: calls.append((ids, kw)) or generate(ids, **kw))
    GenerateRunner(model, "static").run([TokenRequest([5, 6, 7], 2), TokenRequest([8], 4)])
    ((ids, options),) = calls
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert options["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert options["generation_config"].max_new_tokens == 4


def test_a_comparison_gives_a_line_a_program(model):
    first, *others = compare_case(FakeLLM(), model, parse_case("a:3:4:2-4"), "throughput", repeat=1)
    assert (first.bench, first.case, first.output_len) == ("throughput", "a", "2-4")
    assert [(line.bench, line.against) for line in others] == [("compare", "static"), ("compare", "generate_batch")]
    for line in others:
        assert line.raylm_tokens_per_s == first.output_tokens_per_s
        assert line.unavailable is None, line.unavailable
        assert line.ratio == pytest.approx(line.raylm_tokens_per_s / line.other_tokens_per_s)


def test_latency_is_compared_with_generate(model):
    first, other = compare_case(FakeLLM(), model, parse_case("a:2:4:3"), "latency", repeat=1)
    assert first.bench == "latency"
    assert other.against == "generate" and other.other_tokens_per_s > 0
