"""Weights in other formats than safetensors: torch's own files and Mistral's give the same parameters."""

from __future__ import annotations

import json
import os
import zipfile
from functools import partial
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.torch_files import torch_file_tensors
from tests.models.paged import load
from tests.support import checkpoints

FILE, TORCH = "model.safetensors", "pytorch_model.bin"
PARAMS = {
    "dim": 64,
    "n_layers": 3,
    "head_dim": 16,
    "hidden_dim": 96,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-6,
    "vocab_size": checkpoints.VOCAB_SIZE,
    "rope_theta": 10000.0,
    "max_seq_len": 512,
}
YARN = {"factor": 32, "original_max_position_embeddings": 16, "beta": 32, "alpha": 1}
NATIVE = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "block_sparse_moe": "feed_forward",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def same(first: Path, second: Path, load_format: str = "auto") -> bool:
    expected, found = load(first).state_dict(), load(second, load_format).state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.mistral(tmp_path_factory.mktemp("original"), sliding_window=None)


@pytest.fixture
def copied(original: Path, tmp_path: Path) -> Path:
    """The same model's config.json, without weights."""
    (tmp_path / "config.json").write_bytes((original / "config.json").read_bytes())
    return tmp_path


def native_tensors(original: Path) -> dict[str, torch.Tensor]:
    """As Mistral stores them: heads' neighbouring dimensions are a pair of the rotary embedding."""
    found = {}
    for name, tensor in load_file(original / FILE).items():
        if "q_proj" in name or "k_proj" in name:
            heads = tensor.shape[0] // 16
            tensor = tensor.reshape(heads, 2, 8, -1).transpose(1, 2).reshape(tensor.shape)
        for theirs, ours in NATIVE.items():
            name = name.replace(theirs + ".", ours + ".")
        found[name.removeprefix("model.")] = tensor.contiguous()
    return found


def test_torch_s_own_file_gives_the_same_model(original: Path, copied: Path):
    tensors = load_file(original / FILE)
    rest = tensors.pop("lm_head.weight")
    # A view into a larger storage, as shared or cut tensors are stored.
    tensors["lm_head.weight"] = torch.cat([torch.zeros(2, rest.shape[1]), rest])[2:]
    torch.save(tensors, copied / TORCH)
    assert same(original, copied) and same(original, copied, "pt")


def test_torch_s_files_with_an_index(original: Path, copied: Path):
    tensors = load_file(original / FILE)
    names = sorted(tensors)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, part in parts.items():
        torch.save({name: tensors[name] for name in part}, copied / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (copied / f"{TORCH}.index.json").write_text(json.dumps(index))
    assert same(original, copied)


def test_safetensors_come_first(original: Path, copied: Path):
    (copied / TORCH).write_bytes(b"not read")
    (copied / "consolidated.safetensors").write_bytes(b"not read")
    (copied / FILE).write_bytes((original / FILE).read_bytes())
    assert same(original, copied)
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: not a file of torch 1\.6 or later"):
        load(copied, "pt")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"a": Evil()}, r"cannot be read as a file of tensors alone, and code in it is never run \(.*mkdir"),
        (Evil(), "code in it is never run"),
        (torch.nn.Linear(2, 2), r"code in it is never run \(.*Linear"),
        ({"a": torch.ones(2), "epoch": 3}, r"'epoch' is a int, not a tensor; load it .* save_pretrained\(FOLDER\)"),
        ({"state_dict": {"a": torch.ones(2)}}, "'state_dict' is a dict, not a tensor"),
        ([torch.ones(2)], "holds a list, not tensors by name"),
        ({"a": torch.ones(2, 3).t()}, "tensor a does not lie row behind row"),
        (
            {"a": torch.ones(2, dtype=torch.int8)},
            "tensor a has type int8; allowed: float32, float16, bfloat16",
        ),
    ],
)
def test_a_torch_file_of_anything_but_tensors_is_refused(content, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(content, tmp_path / TORCH)
    with pytest.raises(ConfigError, match=rf"pytorch_model\.bin: .*{sentence}"):
        torch_file_tensors(tmp_path / TORCH)
    assert not Path("evil").exists()


def test_damaged_torch_files(tmp_path: Path):
    path = tmp_path / TORCH
    torch.save({"a": torch.ones(64)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match=r"not a file of torch 1\.6 or later"):
        torch_file_tensors(path)
    torch.save({"a": torch.ones(64)}, path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin: "):
            torch_file_tensors(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
    with pytest.raises(ConfigError, match="cannot be read as a file of tensors alone"):
        torch_file_tensors(path)


def test_mistral_s_own_format_gives_the_same_model(original: Path, tmp_path: Path):
    save_file(native_tensors(original), tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    arch = ArchConfig.from_source(locate(str(tmp_path)))
    assert (arch.architecture, arch.eos_token_ids, arch.layers[0].window) == ("MistralForCausalLM", (2,), 0)
    assert same(original, tmp_path) and same(original, tmp_path, "mistral")


def test_mistral_s_own_format_of_a_mixtral(tmp_path: Path):
    original = checkpoints.FAMILIES["mixtral"](tmp_path / "original")
    save_file(native_tensors(original), tmp_path / "consolidated.safetensors")
    params = PARAMS | {"rope_theta": 1e6, "norm_eps": 1e-5, "moe": {"num_experts": 6, "num_experts_per_tok": 2}}
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert ArchConfig.from_source(locate(str(tmp_path))).architecture == "MixtralForCausalLM"
    assert same(original, tmp_path)


@pytest.mark.parametrize("family", ["mistral", "ministral3"])
def test_mistral_s_own_format_of_a_model_for_long_texts(family: str, tmp_path: Path):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 16}
    changes = {"rope_parameters": rope} if family == "mistral" else {}
    original = checkpoints.FAMILIES[family](tmp_path / "original", sliding_window=None, **changes)
    save_file(native_tensors(original), tmp_path / "consolidated.safetensors")
    params = PARAMS | {"yarn": {**YARN, "apply_scale": family == "mistral"}, "rope_theta": 1e4, "norm_eps": 1e-5}
    if family == "ministral3":
        params |= {"llama_4_scaling": {"beta": 0.4, "original_max_position_embeddings": 16}}
    (tmp_path / "params.json").write_text(json.dumps(params))
    expected, found = (ArchConfig.from_source(locate(str(folder))).layers for folder in (original, tmp_path))
    assert found == expected and same(original, tmp_path)


def test_mistral_s_weights_beside_config_json(original: Path, copied: Path):
    save_file(native_tensors(original), copied / "consolidated.safetensors")
    assert same(original, copied, "mistral")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mamba": {"size": 8}}, r"mamba is \{'size': 8\}; allowed: no such key; known: dim, n_layers"),
        ({"moe": {"num_experts": 8}}, "moe: num_experts_per_tok is missing"),
        ({"moe": {"num_experts": 8, "shared": 1}}, "moe: shared is 1; allowed: no such key; known: num_experts, num"),
        ({"moe": [8, 2]}, r"moe is \[8, 2\]; allowed: a mapping"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "quantization is "),
        ({"yarn": {"factor": 8}}, "yarn: original_max_position_embeddings is missing"),
        ({"yarn": {**YARN, "gamma": 1}}, "yarn: gamma is 1; allowed: no such key; known: orig"),
        ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling is .*; allowed: a key beside yarn"),
        (
            {"yarn": YARN, "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8192}},
            "llama_4_scaling: original_max_position_embeddings is 8192; allowed: that of yarn, 16",
        ),
        ({"use_biases": True}, "use_biases is True; allowed: false"),
        ({"n_heads": 3}, "num_attention_heads is 3; allowed: a multiple of num_key_value_heads, 2"),
        ({"dim": "64"}, "hidden_size is '64'; allowed: a positive integer"),
        ({"sliding_window": [4, None]}, r"sliding_window is \[4, None\]; allowed: a positive integer"),
    ],
)
def test_params_that_say_more_are_refused(tmp_path: Path, changes: dict[str, object], sentence: str):
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | changes))
    with pytest.raises(ConfigError, match=rf"params\.json: {sentence}"):
        ArchConfig.from_source(locate(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tensorizer", "tensorizer is not read: raylm does not read tensorizer's files: write safetensors from it"),
        ("runai_streamer", "runai_streamer is not read: raylm needs no streamer"),
        ("sharded_state", "take the original one, and auto"),
        ("bitsandbytes", "checkpoints that it has quantised are read by auto"),
        ("npcache", "pt reads pytorch_model.bin as it is"),
        ("torch", "'auto', 'safetensors', 'pt', 'mistral', 'gguf' or 'dummy'"),
    ],
)
def test_formats_of_other_engines_are_refused_by_name(name: str, sentence: str):
    with pytest.raises(ConfigError, match=rf"model\.load_format.*{sentence}"):
        parse(EngineConfig, {"model": {"path": "x", "load_format": name}}, source="test")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("model.tensors", "model.tensors is tensorizer's"),
        ("model-rank-0-part-0.safetensors", None),
        ("consolidated.00.pth", "consolidated.00.pth is Meta's own"),
        ("model.pt", "model.pt is a pickle"),
        ("tf_model.h5", "tf_model.h5 is TensorFlow's"),
    ],
)
def test_files_of_other_formats_are_named(copied: Path, name: str, sentence: str | None):
    (copied / name).write_bytes(b"")
    (copied / name.replace("rank-0", "rank-1")).write_bytes(b"")
    with pytest.raises(ConfigError, match=sentence or "2 safetensors files without an index"):
        load(copied)


def test_a_gguf_file_in_shards_gives_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = checkpoints.llama(tmp_path / "llama")
    checkpoints.write_tokenizer(folder)
    whole = checkpoints.write_gguf(folder, tmp_path / "whole.gguf")
    splitting = partial(gguf.GGUFWriter, split_max_tensors=7)
    monkeypatch.setattr(gguf, "GGUFWriter", splitting)
    checkpoints.write_gguf(folder, tmp_path / "cut.gguf")
    first, second, *_ = names = sorted(tmp_path.glob("cut-*.gguf"))
    assert len(names) > 2
    assert ArchConfig.from_source(locate(str(first))) == ArchConfig.from_source(locate(str(whole)))
    assert same(whole, first)
    with pytest.raises(ConfigError, match=r"is shard 2 of \d+; name the first, cut-00001-of-"):
        load(second)
    second.unlink()
    with pytest.raises(ConfigError, match=r"shards are missing beside it: cut-00002-of-"):
        load(first)
