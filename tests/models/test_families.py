"""Every family computes what transformers computes from the same checkpoint."""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raylm.errors import ConfigError
from raylm.layers.alibi import alibi_slopes
from raylm.models import families, registry
from raylm.models.families import baichuan
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, PagedRun, generate, load
from tests.support import checkpoints

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 16}
# Of 4 heads, or 2, the usual slopes are powers of two, which transformers' own rounding of Falcon's leaves as they are.
FALCON_RW = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
MINISTRAL3 = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.3}
OLD_FALCON = {"new_decoder_architecture": False, "num_kv_heads": None}
GEMMA_LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CASES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without groups": ("llama", {"num_key_value_heads": 4}),
    "llama with one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama beyond what it was trained for": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 untied, part sliding": (
        "qwen2",
        {"tie_word_embeddings": False, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "mimo": ("mimo", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    "bloom": ("bloom", {}),
    "bloom with heads no power of two": ("bloom", {"n_head": 12, "hidden_size": 96}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma2 without local layers": ("gemma2", {"layer_types": ["full_attention"] * 3}),
    "ministral": ("ministral", {}),
    "ministral3": ("ministral3", {}),
    "ministral3 within what it was trained for": (
        "ministral3",
        {"rope_parameters": {**MINISTRAL3, "original_max_position_embeddings": 512, "factor": 1.0}},
    ),
    "granite": ("granite", {}),
    "granite tied, with biases": ("granite", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {}),
    "smollm3, layers by name": ("smollm3", {"no_rope_layers": [0, 0, 1]}),
    "phi3": ("phi3", {}),
    "phi3 without window, partly rotated": ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.5}),
    "phi3 for long texts": (
        "phi3",
        {"sliding_window": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 8},
    ),
    "phi3 for short ones": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512}),
    "exaone4": ("exaone4", {}),
    "exaone4 without window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2 without biases": ("starcoder2", {"use_bias": False, "sliding_window": None}),
    "stablelm": ("stablelm", {}),
    "stablelm with biases": ("stablelm", {"use_qkv_bias": True}),
    "stablelm side by side": ("stablelm", {"use_parallel_residual": True}),
    "stablelm with normed heads": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "olmo2": ("olmo2", {}),
    "olmo2 with one kv head": ("olmo2", {"num_key_value_heads": 1}),
    "olmo3": ("olmo3", {}),
    "olmo3 for long texts": ("olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}}),
    "cohere": ("cohere", {}),
    "cohere with normed heads": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("cohere2", {}),
    "falcon": ("falcon", {}),
    "falcon with one norm": ("falcon", {"num_ln_in_parallel_attn": 1}),
    "falcon with one kv head": ("falcon", OLD_FALCON),
    "falcon, one after the other, with biases": (
        "falcon",
        {**OLD_FALCON, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "falcon with linear biases": ("falcon", {**OLD_FALCON, **FALCON_RW}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt2": ("gpt2", {}),
    "gpt2 of the usual width": ("gpt2", {"n_inner": None}),
    "opt": ("opt", {}),
    "opt with a narrower embedding": ("opt", {"word_embed_proj_dim": 48}),
    "opt_350m": ("opt_350m", {}),
    "nemotron": ("nemotron", {}),
    "nemotron with biases": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "chatglm": ("chatglm", {}),
    "internlm2": ("internlm2", {}),
    "internlm3": ("internlm3", {}),
    "minicpm": ("minicpm", {}),
    "baichuan": ("baichuan", {}),
    "mixtral": ("mixtral", {}),
    "mixtral with windows": ("mixtral", {"sliding_window": 8}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe with dense layers": ("qwen2_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, every second layer": ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": False}),
    "olmoe": ("olmoe", {}),
    "granitemoe": ("granitemoe", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe with normed heads": ("glm4_moe", {"use_qk_norm": True, "n_group": 1, "first_k_dense_replace": 0}),
    "deepseek": ("deepseek", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss without windows": ("gpt_oss", {"layer_types": ["full_attention"], "num_experts_per_tok": 6}),
    "gpt_oss, layers by their names": (
        "gpt_oss",
        {"layer_types": ["full_attention", "sliding_attention"], "attention_bias": False, "rope_parameters": PLAIN},
    ),
    "phimoe": ("phimoe", {}),
    "phimoe with windows": ("phimoe", {"sliding_window": 8, "lm_head_bias": False, "attention_bias": False}),
    "phimoe for short texts": (
        "phimoe",
        {"sliding_window": 512, "rope_parameters": {**LONGROPE, **MSCALES, "original_max_position_embeddings": 512}},
    ),
    "gemma3": ("gemma3", {}),
    "gemma3 linear rope, capped": ("gemma3", {"rope_parameters": GEMMA_LINEAR, "final_logit_softcapping": 5.0}),
}
PROMPTS = {
    "long": [(7 * i + 3) % checkpoints.VOCAB_SIZE for i in range(37)],
    "short": [5, 9],
    "middle": [(11 * i + 1) % checkpoints.VOCAB_SIZE for i in range(13)],
}


def assert_same(texts: dict, logits: dict, model: torch.nn.Module, *, atol: float = 1e-4) -> None:
    """Equal logits at every position, so equal greedy tokens unless two are as good."""
    for name, text in texts.items():
        with torch.inference_mode():
            expected = model(torch.tensor([text[:-1]])).logits[0]
        torch.testing.assert_close(logits[name], expected, atol=atol, rtol=1e-4)
        top = expected.topk(2).values
        clear = top[:, 0] - top[:, 1] > 2 * atol
        start = len(PROMPTS.get(name, text)) - 1
        chosen = torch.tensor(text[1:])
        assert torch.equal(chosen[start:][clear[start:]], expected.argmax(-1)[start:][clear[start:]])


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    folder = checkpoints.FAMILIES[family](tmp_path, **changes)
    texts, logits = generate(PagedRun(load(folder)), PROMPTS, num_tokens=12)
    assert [len(text) for text in texts.values()] == [len(prompt) + 12 for prompt in PROMPTS.values()]
    assert_same(texts, logits, checkpoints.reference(folder))


KINDS_OF_ARITHMETIC = {
    *("llama", "gemma2", "gemma3", "qwen3", "granite", "olmo2", "bloom", "gpt2", "cohere2", "falcon", "minicpm"),
    *("mixtral", "deepseek", "gpt_oss", "phimoe"),
}
"""Each has a norm, a scale, a soft cap, a bias or a router that rounds differently from the others'."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f in KINDS_OF_ARITHMETIC else [pytest.mark.nightly]) for f in checkpoints.FAMILIES],
)
def test_errs_in_bfloat16_as_transformers_does(family: str, tmp_path: Path) -> None:
    """Of the distance of a position's logits to those in float32 of the same rounded weights the median: where rounding
    chooses other experts, both are far off."""
    folder = checkpoints.FAMILIES[family](tmp_path)
    run = PagedRun(load(folder, dtype=torch.bfloat16), dtype=torch.bfloat16)
    texts, logits = generate(run, PROMPTS, num_tokens=4)
    exact, rounded = checkpoints.reference(folder), checkpoints.reference(folder)
    for ours, theirs in zip(exact.parameters(), rounded.parameters(), strict=True):
        theirs.data = theirs.data.bfloat16()
        ours.data = theirs.data.float()
    found, expected = [], []
    with torch.inference_mode():
        for name, text in texts.items():
            tokens = torch.tensor([text[:-1]])
            right = exact(tokens).logits[0]
            found.append((logits[name].float() - right).norm(dim=-1))
            expected.append((rounded(tokens).logits[0].float() - right).norm(dim=-1))
    assert torch.cat(found).median() <= 1.5 * torch.cat(expected).median()


def test_phimoe_for_long_texts(tmp_path: Path) -> None:
    """By how long sequences may be; transformers takes the long factors where it is told how long they are."""
    rope = {**LONGROPE, **MSCALES, "original_max_position_embeddings": 2}
    folder = checkpoints.FAMILIES["phimoe"](tmp_path, rope_parameters=rope)
    texts, logits = generate(PagedRun(load(folder)), PROMPTS, num_tokens=6)
    reference = checkpoints.reference(folder)
    rotary = reference.model.rotary_emb
    rotary.rope_init_fn = functools.partial(rotary.rope_init_fn, seq_len=512)
    assert_same(texts, logits, reference)


class LinearBiases(torch.nn.Module):
    """A Llama that knows positions by biases of its scores: rotated by the angles of position 0, it knows no others."""

    def __init__(self, llama: torch.nn.Module, num_heads: int) -> None:
        super().__init__()
        self._llama = llama
        self._slopes = alibi_slopes(num_heads)

    def forward(self, tokens: torch.Tensor) -> object:
        positions = torch.arange(tokens.shape[1])
        distance = (positions - positions[:, None]).float()
        scores = (self._slopes[:, None, None] * distance).masked_fill(distance > 0, -torch.inf)
        return self._llama(tokens, attention_mask=scores[None], position_ids=torch.zeros_like(tokens))


def test_baichuan_with_linear_biases_and_a_normed_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baichuan, "_VOCABULARY_OF_2", checkpoints.VOCAB_SIZE)
    folder = checkpoints.FAMILIES["baichuan"](tmp_path, num_hidden_layers=40, hidden_size=32, head_dim=8)
    model = load(folder)
    assert model.arch.alibi and model.arch.norm_head
    texts, logits = generate(PagedRun(model), PROMPTS, num_tokens=4)
    reference = checkpoints.reference(folder)
    reference.lm_head.weight.data = torch.nn.functional.normalize(reference.lm_head.weight.data)
    assert_same(texts, logits, LinearBiases(reference, model.arch.num_heads))


@pytest.mark.parametrize(
    "family",
    [
        *(
            "llama",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3",
            "mistral",
            "granite",
            "smollm3",
            "olmo2",
            "olmo3",
            "glm4",
            "phi3",
        ),
        *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "deepseek", "glm4_moe", "gpt_oss"),
    ],
)
def test_gguf_equals_transformers(family: str, tmp_path: Path) -> None:
    # No window: a GGUF file of a Mistral says "llama" and has none, one of a Gemma has its pattern fixed.
    changes = {
        "gemma3": {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "query_pre_attn_scalar": 16},
        "gemma2": {"query_pre_attn_scalar": 16},
        "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
        "olmo3": {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        "mistral": {"sliding_window": None},
        "mixtral": {"sliding_window": None},
        "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 2, "sliding_window": 600},
    }
    folder = checkpoints.FAMILIES[family](tmp_path / "hf", **changes.get(family, {}))
    path = checkpoints.write_gguf(folder, tmp_path / "model.gguf")
    texts, logits = generate(PagedRun(load(path)), PROMPTS, num_tokens=4)
    model = checkpoints.reference(folder)
    for parameter in model.parameters():
        if parameter.squeeze().ndim > 1:  # vectors are stored in float32
            parameter.data = parameter.data.half().float()
    assert_same(texts, logits, model)


def test_gguf_rope_factors_are_those_of_llama3(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "hf", rope_parameters=LLAMA3)
    with_factors = checkpoints.write_gguf(folder, tmp_path / "model.gguf")
    hf, gguf_model = load(folder), load(with_factors)
    tables = [model.layers["0"].self_attn._rotary for model in (hf, gguf_model)]
    torch.testing.assert_close(*tables, atol=1e-4, rtol=1e-4)


def test_gemma3_inside_a_checkpoint_with_vision(tmp_path: Path) -> None:
    folder = checkpoints.gemma3(tmp_path)
    text, logits = generate(PagedRun(load(folder)), PROMPTS, num_tokens=2)
    config = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 2], "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    for prefix in ("model.language_model.", "language_model.model."):
        renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        renamed |= {"vision_tower.weight": torch.ones(1), "multi_modal_projector.weight": torch.ones(1)}
        save_file(renamed, folder / "model.safetensors")
        found, found_logits = generate(PagedRun(load(folder)), PROMPTS, num_tokens=2)
        assert found == text
        assert all(torch.equal(found_logits[name], logits[name]) for name in logits)


def test_a_layer_for_drafts_that_is_not_loaded(tmp_path: Path) -> None:
    folder = checkpoints.FAMILIES["glm4_moe"](tmp_path, num_nextn_predict_layers=0)
    expected, _ = generate(PagedRun(load(folder)), PROMPTS, num_tokens=2)
    tensors = load_file(folder / "model.safetensors")
    own = {name.replace("layers.2.", "layers.3."): tensor.clone() for name, tensor in tensors.items() if ".2." in name}
    own["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    save_file(own | tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"without a place in this model: model\.layers\.3"):
        load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    assert generate(PagedRun(load(folder)), PROMPTS, num_tokens=2)[0] == expected


def test_one_rotary_table_for_equal_settings(tmp_path: Path) -> None:
    tables = [layer.self_attn._rotary.data_ptr() for layer in load(checkpoints.gemma3(tmp_path)).layers.values()]
    assert len(set(tables)) == 2
    assert tables[0] == tables[1] == tables[3] != tables[2]


@pytest.mark.usefixtures("demo")
def test_smollm2_equals_transformers() -> None:
    prompts = {
        str(i): [(1009 * i + 31 * j) % 49000 + 17 for j in range(length)] for i, length in enumerate((1, 2, 5, 13, 40))
    }
    run = PagedRun(load("smollm2-135m"), block_size=16, num_blocks=64)
    texts, logits = generate(run, prompts, num_tokens=4)
    model = checkpoints.smollm2_reference()
    for name, text in texts.items():
        with torch.inference_mode():
            expected = model(torch.tensor([text[:-1]])).logits[0]
        torch.testing.assert_close(logits[name], expected, atol=2e-2, rtol=1e-3)
        assert text[len(prompts[name]) :] == expected.argmax(-1)[len(prompts[name]) - 1 :].tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_the_norms_of_its_own_heads(rank: int, tmp_path: Path) -> None:
    folder = checkpoints.stablelm(tmp_path, qk_layernorm=True)
    stored = load_file(folder / "model.safetensors")
    layer = load(folder, context=ParallelContext(rank, rank, 2, 0, 1, CPU)).layers["1"].self_attn
    for part, heads in (("q", layer.q_norm), ("k", layer.k_norm)):
        count = len(heads.weight)
        name = f"model.layers.1.self_attn.{part}_layernorm.norms"
        own = [stored[f"{name}.{head}.weight"] for head in range(rank * count, (rank + 1) * count)]
        assert torch.equal(heads.weight, torch.stack(own))


def test_every_file_of_a_family_is_registered() -> None:
    """A new family is its own file and one line of the registry."""
    files = {path.stem for path in Path(families.__file__).parent.glob("*.py")} - {"__init__"}
    named = [importlib.import_module(f"raylm.models.families.{name}").ARCHITECTURES for name in sorted(files)]
    assert {name for each in named for name in each} == set(registry.families())
    assert sum(map(len, named)) == len(registry.families())
