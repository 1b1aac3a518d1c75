"""Models that raylm has no family for, through transformers' modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.check import check_model
from raylm.models.registry import families
from raylm.models.transformers_model import TransformersModel
from tests.models.paged import PagedRun, generate, load
from tests.models.test_families import PROMPTS, assert_same
from tests.support import checkpoints

DOTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1}
CASES = {
    "an MLP without a gate": ("ArceeForCausalLM", {}),
    "a tied head": ("ArceeForCausalLM", {"tie_word_embeddings": True}),
    "numbers and an activation in the checkpoint": ("ApertusForCausalLM", {}),
    "biases, and one of the head": ("PhiForCausalLM", {}),
    "layer norms with biases": ("Jais2ForCausalLM", {}),
    "norms without weights": ("OlmoForCausalLM", {}),
    "one tensor of queries, keys and values": ("PersimmonForCausalLM", {"num_key_value_heads": 4}),
    "one head of keys": ("GPTBigCodeForCausalLM", {"n_inner": 96}),
    "windows in some layers": ("CwmForCausalLM", {"sliding_window": 8}),
    "experts, one tensor a projection": (
        "Dots1ForCausalLM",
        {**DOTS, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
    ),
    "experts with names that changed": ("Ernie4_5_MoeForCausalLM", checkpoints.ERNIE_EXPERTS),
    "experts with Mixtral's names": ("MiniMaxM2ForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "experts, one tensor for all": ("GraniteMoeSharedForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "scaled embeddings, caps and windows": ("VaultGemmaForCausalLM", {"sliding_window": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    folder = checkpoints.of_transformers(name, tmp_path, **changes)
    model = load(folder, implementation="transformers" if name in families() else "auto")
    assert isinstance(model, TransformersModel)
    texts, logits = generate(PagedRun(model), PROMPTS, num_tokens=12)
    assert_same(texts, logits, checkpoints.reference(folder))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "mistral"])
def test_where_it_is_asked_for(family: str, tmp_path: Path) -> None:
    """A family that raylm has gives the same either way."""
    folder = checkpoints.FAMILIES[family](tmp_path)
    model = load(folder, implementation="transformers")
    assert isinstance(model, TransformersModel)
    texts, logits = generate(PagedRun(model), PROMPTS, num_tokens=6)
    assert_same(texts, logits, checkpoints.reference(folder))
    with pytest.raises(ConfigError, match="allowed: one of LlamaForCausalLM"):
        load(checkpoints.of_transformers("ArceeForCausalLM", tmp_path / "arcee"), implementation="raylm")


def test_in_bfloat16(tmp_path: Path) -> None:
    folder = checkpoints.of_transformers("ArceeForCausalLM", tmp_path)
    run = PagedRun(load(folder, dtype=torch.bfloat16), dtype=torch.bfloat16)
    texts, logits = generate(run, PROMPTS, num_tokens=4)
    reference = checkpoints.reference(folder)
    with torch.inference_mode():
        expected = reference(torch.tensor([texts["long"][:-1]])).logits[0]
    assert (logits["long"].float() - expected).norm() < 0.05 * expected.norm()


def test_a_checkpoint_without_the_name_of_the_whole(tmp_path: Path) -> None:
    folder = checkpoints.of_transformers("ArceeForCausalLM", tmp_path)
    expected, _ = generate(PagedRun(load(folder)), PROMPTS, num_tokens=2)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): x for name, x in tensors.items()}, folder / "model.safetensors")
    assert generate(PagedRun(load(folder)), PROMPTS, num_tokens=2)[0] == expected


def test_a_tensor_too_few_or_too_many_is_named(tmp_path: Path) -> None:
    folder = checkpoints.of_transformers("ArceeForCausalLM", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    gone = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file({**tensors, "model.layers.1.mlp.odd.weight": gone}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 missing: layers\.1\.mlp\.up_proj\.weight; 1 without a place .*odd"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("DeepseekV3ForCausalLM", {}, r"latent vectors \(MLA\)"),
        ("MambaForCausalLM", {}, "its layer_types are linear_attention, not full_attention or sliding_attention"),
        ("ArceeForCausalLM", {"rope_type": "dynamic", "factor": 2.0}, "its rope_type is dynamic"),
    ],
)
def test_what_the_cache_is_not_for(name: str, changes: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = checkpoints.of_transformers(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    if changes:
        config["rope_parameters"] = {"rope_theta": 1e4, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"{name}.*raylm has no family for.*{message}"):
        ArchConfig.from_source(locate(str(folder)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("DiffLlamaForCausalLM", "layer 0 attends twice"),
        ("PersimmonForCausalLM", r"keys are \(4, 16\).*but the cache holds \(2, 16\)"),
    ],
)
def test_what_attention_is_not_for(name: str, message: str, tmp_path: Path) -> None:
    folder = checkpoints.of_transformers(name, tmp_path)
    with pytest.raises(ConfigError, match=message):
        PagedRun(load(folder)).step({"a": [5, 6, 7]})


def test_a_model_with_attention_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.ArceeForCausalLM, "_supports_attention_backend", False)
    with pytest.raises(ConfigError, match="ArceeForCausalLM of transformers computes attention by itself"):
        load(checkpoints.of_transformers("ArceeForCausalLM", tmp_path))


def test_configurations_that_it_cannot_do(tmp_path: Path) -> None:
    folder = checkpoints.of_transformers("PersimmonForCausalLM", tmp_path, num_key_value_heads=4)

    def check(**sections: object) -> None:
        model = {"path": str(folder), "implementation": "transformers"}
        check_model(EngineConfig.model_validate({"model": model, **sections}))

    with pytest.raises(ConfigError, match=r"parallel\.tensor is 2, but .* has no plan to split it; allowed: 1"):
        check(parallel={"tensor": 2})
    with pytest.raises(ConfigError, match=r"parallel\.pipeline is 2, but .* no plan to split it into stages"):
        check(parallel={"pipeline": 2})
    with pytest.raises(ConfigError, match=r"speculation\.method is eagle3, but the model runs through transformers"):
        check(speculation={"method": "eagle3", "model": str(folder)})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OddForCausalLM"]}))
    with pytest.raises(ConfigError, match="implementation is transformers, but .*no causal language model of the"):
        check()
