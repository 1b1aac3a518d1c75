"""ArchConfig: both spellings of config.json, GGUF metadata, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from raylm.errors import ConfigError
from raylm.layers.rope_settings import RopeSettings
from raylm.model_files.source import ModelSource, locate
from raylm.models.arch import ArchConfig, ExpertsSpec
from tests.support import checkpoints

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def arch(folder: Path, **changes: object) -> ArchConfig:
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}))
    return ArchConfig.from_source(ModelSource(folder, "folder"))


def test_fields_left_out_take_the_familys_defaults(tmp_path: Path) -> None:
    found = arch(tmp_path)
    assert (found.num_kv_heads, found.head_dim, found.max_position, found.norm_eps) == (4, 16, 2048, 1e-6)
    assert {layer.rope for layer in found.layers} == {RopeSettings(1e4)}
    assert (found.tie_embeddings, found.qkv_bias, found.layers[0].window, found.dtype) == (False, False, 0, "float32")
    assert (found.bos_token_id, found.eos_token_ids) == (None, ())


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_old_and_new_spelling_of_rope(key: str, tmp_path: Path) -> None:
    old = arch(tmp_path, rope_theta=5e5, rope_scaling={key: "llama3", **LLAMA3})
    new = arch(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old.layers == new.layers
    assert old.layers[0].rope == RopeSettings(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    assert arch(tmp_path, rope_theta=1e6, rope_scaling=None).layers[0].rope == RopeSettings(1e6)


def test_gpt_oss_as_it_is_released(tmp_path: Path) -> None:
    scaling = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    }
    given = {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 32,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    found = arch(tmp_path, **given, num_key_value_heads=2, rope_theta=150000, rope_scaling=scaling)
    assert found == arch(tmp_path, **given, num_key_value_heads=2)
    assert [layer.window for layer in found.layers] == [128, 0, 128, 0]
    rope = found.layers[0].rope
    assert rope is not None and (rope.theta, rope.kind, rope.truncate) == (150000, "yarn", False)
    assert (found.head_dim, found.max_position, found.dtype) == (64, 131072, "bfloat16")
    assert found.sinks and found.qkv_bias and found.o_bias
    experts = found.layers[0].mlp
    assert isinstance(experts, ExpertsSpec)
    assert (experts.num_experts, experts.per_token, experts.limit, experts.activation) == (32, 4, 7.0, "clamped_swiglu")
    with pytest.raises(ConfigError, match=r"swiglu_alpha is 1\.5; allowed: 1\.702"):
        arch(tmp_path, **given, num_key_value_heads=2, swiglu_alpha=1.5)


def test_gemma3_in_both_spellings(tmp_path: Path) -> None:
    gemma = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 12, "sliding_window": 512}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = arch(tmp_path, **gemma, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=scaling)
    parameters = {
        "full_attention": {"rope_theta": 1e6, **scaling},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    new = arch(tmp_path, **gemma, rope_parameters=parameters, layer_types=kinds)
    assert old == new
    assert old.layers[5].rope == RopeSettings(1e6, "linear", factor=8.0)
    assert old.layers[4].rope == RopeSettings(1e4)
    assert [layer.window for layer in old.layers[:6]] == [512] * 5 + [0]
    assert (old.embedding_multiplier, old.norm_offset, old.attention_scale) == (8.0, 1.0, 1 / 16)


def test_gemma3_text_section_of_a_larger_model(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560,
        "num_hidden_layers": 6,
        "model_type": "gemma3_text",
        "sliding_window": 1024,
        "dtype": None,
    }
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "eos_token_id": [1, 106]}))
    found = ArchConfig.from_source(locate(str(tmp_path)))
    assert (found.hidden_size, found.num_heads, found.num_kv_heads, found.head_dim) == (2560, 8, 4, 256)
    assert (found.dtype, found.eos_token_ids, found.tie_embeddings) == ("bfloat16", (1, 106), True)
    assert found.layers[0].window == 1024


def test_mistrals_text_section(tmp_path: Path) -> None:
    text = {name: value for name, value in BASE.items() if name != "architectures"}
    text |= {"model_type": "mistral", "sliding_window": None, "max_position_embeddings": 8192}
    given = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    assert arch(tmp_path, **given).layers[0].window == 0
    text["sliding_window"] = 32
    assert arch(tmp_path, **given).layers[0].window == 32
    text |= {"model_type": "ministral3", "sliding_window": None}
    rope = arch(tmp_path, **given).layers[0].rope
    assert rope is not None and (rope.kind, rope.query_beta, rope.original_max_position) == ("yarn", 0.1, 16384)
    text["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16384}
    rope = arch(tmp_path, **given).layers[0].rope
    assert rope is not None and (rope.factor, rope.query_beta) == (2.0, 0.0)
    text["model_type"] = ["mistral"]
    with pytest.raises(ConfigError, match=r"text_config: model_type is \['mistral'\]; allowed: one of mistral"):
        arch(tmp_path, **given)
    text["model_type"] = "mistral4"
    with pytest.raises(ConfigError, match="text_config: model_type is 'mistral4'; allowed: one of mistral, ministral3"):
        arch(tmp_path, **given)


def test_blooms_own_names(tmp_path: Path) -> None:
    names = {"n_embed": 1024, "n_layer": 24, "n_head": 16, "layer_norm_epsilon": 1e-4, "seq_length": 512}
    config = {"architectures": ["BloomForCausalLM"], "torch_dtype": "float16", "vocab_size": 250880, **names}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = ArchConfig.from_source(locate(str(tmp_path)))
    assert (found.hidden_size, found.layers[0].mlp.size, found.num_layers) == (1024, 4096, 24)
    assert (found.num_heads, found.num_kv_heads, found.head_dim, found.max_position) == (16, 16, 64, 512)
    assert (found.norm, found.norm_eps, found.alibi, found.tie_embeddings) == ("layer", 1e-4, True, True)


def test_sliding_windows(tmp_path: Path) -> None:
    mistral, qwen = {"architectures": ["MistralForCausalLM"]}, {"architectures": ["Qwen2ForCausalLM"]}
    assert arch(tmp_path, **mistral).layers[0].window == 4096
    assert arch(tmp_path, **mistral, sliding_window=None).layers[0].window == 0
    assert arch(tmp_path, **qwen, sliding_window=32).layers[0].window == 0
    assert arch(tmp_path, **mistral, sliding_window=131072, max_position_embeddings=131072).layers[0].window == 0
    part = arch(tmp_path, **qwen, sliding_window=32, use_sliding_window=True, max_window_layers=3)
    assert [layer.window for layer in part.layers] == [0, 0, 0, 32]


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert arch(tmp_path, eos_token_id=9, bos_token_id=1).eos_token_ids == (9, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"architectures is \['MambaForCausalLM'\]; allowed: one of LlamaFor"),
        ({"architectures": None}, "architectures is None; allowed"),
        (
            {"rope_scaling": {"rope_type": "ntk"}},
            "rope_scaling: rope_type is 'ntk'; allowed: one of default, linear, llama3, yarn, longrope",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": 2}}, "long_factor is 2"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 9, "long_factor": [1.0] * 8}},
            "short_factor is .*; allowed: 8 positive numbers, one for two dimensions",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5; allowed: at most 1"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor is 0.2; allowed: a share of the 16 dimensions .* even"),
        (
            {"quantization_config": {"quant_method": "aqlm"}},
            "config.json: quantization_config: quant_method is 'aqlm'; allowed: fp8, .*, or a .gguf file",
        ),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"architectures": ["MiniCPMForCausalLM"], "num_experts": 8}, r"num_experts is 8; allowed: 0 \(no mixture"),
        (
            {"architectures": ["ChatGLMModel"], "position_encoding_2d": True},
            "position_encoding_2d is True; allowed: fal",
        ),
        (
            {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba", "attention"] * 2},
            r"layer_types is \['mamba', .*; allowed: attention or full_attention for every layer \(there is no Mamba",
        ),
        (
            {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["attention"], "num_local_experts": 8},
            "num_local_experts is 8; allowed: 0",
        ),
        ({"hidden_size": "large"}, "hidden_size is 'large'; allowed: a positive integer"),
        ({"num_attention_heads": True}, "num_attention_heads is True; allowed: a positive integer"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; allowed: a positive number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; allowed: true or false"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; allowed: one of silu, swish, gelu_new"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; allowed: a token id or a list"),
        ({"dtype": "float8"}, "dtype is 'float8'; allowed: float32, bfloat16, float16"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4; allowed: a multiple of num_key_value_heads, 3"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["chunked_attention"] * 4},
            "layer_types is .* allowed: 4 names, each one of full_attention, sliding_attention",
        ),
        (
            {"architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is True; allowed: false",
        ),
    ],
)
def test_refused(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        arch(tmp_path, **changes)


def test_damaged_json(tmp_path: Path) -> None:
    for text, message in (("{", "not valid JSON"), ("[]", "must hold a JSON object, not list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            ArchConfig.from_source(ModelSource(tmp_path, "folder"))


@pytest.mark.usefixtures("demo")
def test_smollm2() -> None:
    found = ArchConfig.from_source(locate("smollm2-135m"))
    assert (found.architecture, found.vocab_size, found.num_layers) == ("LlamaForCausalLM", 49152, 30)
    assert (found.num_heads, found.num_kv_heads, found.head_dim, found.max_position) == (9, 3, 64, 8192)
    assert (found.tie_embeddings, found.eos_token_ids, found.bos_token_id) == (True, (2,), 1)
    assert found.layers[29].rope == RopeSettings(1e5)


def write_metadata(path: Path, name: str, **changes: object) -> ModelSource:
    """A GGUF file with little more than metadata."""
    fields = {
        "block_count": 6,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
    }
    writer = gguf.GGUFWriter(path, name)
    for key, value in {**fields, **changes}.items():
        adding = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, list: writer.add_array}
        add = adding.get(type(value), writer.add_uint32)
        add(f"{name}.{key}", value)
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tensor("token_embd.weight", checkpoints.torch.zeros(100, 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource(path, "gguf")


def test_gguf_metadata(tmp_path: Path) -> None:
    source = write_metadata(tmp_path / "a.gguf", "gemma3", **{"attention.sliding_window": 8, "rope.freq_base": 1e6})
    found = ArchConfig.from_source(source)
    assert (found.architecture, found.vocab_size, found.norm_offset) == ("Gemma3ForCausalLM", 100, 0.0)
    assert [layer.window for layer in found.layers] == [8, 8, 8, 8, 8, 0]
    assert (found.layers[0].rope, found.layers[5].rope) == (RopeSettings(1e4), RopeSettings(1e6))
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    found = ArchConfig.from_source(write_metadata(tmp_path / "b.gguf", "qwen2", **linear))
    assert found.layers[0].rope == RopeSettings(1e4, "linear", factor=4.0)
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0}
    given = {"rope.dimension_count": 6, **{f"rope.scaling.{name}": value for name, value in scaling.items()}}
    rope = ArchConfig.from_source(write_metadata(tmp_path / "c.gguf", "qwen3", **given)).layers[0].rope
    assert (rope.kind, rope.factor, rope.original_max_position, rope.beta_fast) == ("yarn", 4.0, 32, 16.0)
    assert rope.size(16) == 6 and rope.attention_factor == pytest.approx(1 + 0.1 * math.log(4))


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "gpt-oss"])
def test_gguf_layers_that_slide(name: str, tmp_path: Path) -> None:
    experts = {"expert_count": 4, "expert_used_count": 2} if name == "gpt-oss" else {}
    window, key = {**experts, "attention.sliding_window": 8}, "attention.sliding_window_pattern"

    def windows(**changes: object) -> list[int]:
        source = write_metadata(tmp_path / "a.gguf", name, **window, **changes)
        return [layer.window for layer in ArchConfig.from_source(source).layers]

    assert windows(**{key: [True, False, False, True, True, False]}) == [8, 0, 0, 8, 8, 0]
    assert windows(**{key: 3}) == [8, 8, 0, 8, 8, 0]
    with pytest.raises(ConfigError, match=rf"{key} is \[True\]; allowed: a positive integer, or 6 times true or false"):
        windows(**{key: [True]})


def test_gguf_granite_4_without_mamba(tmp_path: Path) -> None:
    """Its converter writes the heads of every layer, as of a hybrid, and that it is rotated."""
    given = {"attention.head_count_kv": [2] * 6, "rope.scaling.finetuned": True, "expert_count": 0, "logit_scale": 10.0}
    found = ArchConfig.from_source(write_metadata(tmp_path / "a.gguf", "granite", **given))
    assert (found.num_kv_heads, found.logits_divisor, found.attention_scale) == (2, 10.0, 0.25)
    assert found.layers[0].rope == RopeSettings(1e4)
    given["rope.scaling.finetuned"] = False
    assert ArchConfig.from_source(write_metadata(tmp_path / "b.gguf", "granite", **given)).layers[0].rope is None
    given["attention.head_count_kv"] = [2] * 5 + [0]
    with pytest.raises(ConfigError, match=r"head_count_kv is \[2, 2, 2, 2, 2, 0\]; allowed: a positive integer"):
        ArchConfig.from_source(write_metadata(tmp_path / "c.gguf", "granite", **given))


def test_gguf_yarns_attention_factor(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 8.0, "original_context_length": 16}
    given = {f"rope.scaling.{name}": value for name, value in scaling.items()}

    def factor(name: str, **more: float) -> float:
        changes = given | {f"rope.scaling.{key}": value for key, value in more.items()}
        (rope,) = {
            layer.rope for layer in ArchConfig.from_source(write_metadata(tmp_path / "a", name, **changes)).layers
        }
        assert rope is not None
        return rope.attention_factor

    usual = 1 + 0.1 * math.log(8)
    assert factor("qwen3") == factor("olmo2") == pytest.approx(usual)
    assert factor("qwen3", yarn_attn_factor=1.5) == factor("olmo2", yarn_attn_factor=1.5) == pytest.approx(1.5)
    assert factor("qwen3", attn_factor=1.5) == pytest.approx(1.5 * usual)
    assert factor("olmo2", attn_factor=1.5) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "mamba",
            {},
            "general.architecture is 'mamba'; allowed: llama, qwen2, qwen3, gemma, .*, glm4, qwen2moe",
        ),
        ("llama", {"rope.scaling.type": "su"}, "llama.rope.scaling.type is 'su'; allowed: none, linear, yarn"),
        ("llama", {"rope.scaling.type": "yarn"}, "llama.rope.scaling.factor is missing"),
        ("llama", {"rope.dimension_count": 7}, "llama.rope.dimension_count is 7; allowed: an even number up to .*, 16"),
        (
            "llama",
            {"rope.dimension_count": 18},
            "llama.rope.dimension_count is 18; allowed: an even number up to .*, 16",
        ),
        ("qwen2", {"expert_count": 8}, "qwen2.expert_count is 8; allowed: 0"),
        (
            "llama",
            {"expert_count": 8, "expert_used_count": 9},
            "llama.expert_used_count is 9; allowed: 1 to llama.expert_count, 8",
        ),
        (
            "qwen3moe",
            {"expert_count": 8, "expert_used_count": 2, "expert_shared_count": 1},
            "qwen3moe.expert_shared_count is 1; allowed: 0 without blk.5.ffn_up_shexp.weight",
        ),
        (
            "glm4moe",
            {"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 3},
            "glm4moe.expert_gating_func is 3; allowed: 1, 2",
        ),
    ],
)
def test_gguf_refused(name: str, changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        ArchConfig.from_source(write_metadata(tmp_path / "a.gguf", name, **changes))


@pytest.mark.usefixtures("demo")
def test_reading_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    code = (
        "import sys; from raylm.model_files.source import locate; from raylm.models.arch import ArchConfig; "
        "ArchConfig.from_source(locate(sys.argv[1])); ArchConfig.from_source(locate('smollm2-135m')); "
        "print(sorted({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
