"""EAGLE-3 heads and MTP layers: what their configurations and checkpoints must say. What they compute is tested with
the proposers (tests/worker/test_device_proposers.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raylm.errors import ConfigError
from raylm.model_files.source import ModelSource, locate
from raylm.models.arch import ArchConfig
from raylm.models.arch_eagle3 import Eagle3Arch, read_eagle3_arch
from raylm.models.check import with_mtp
from raylm.models.decoder import DecoderModel
from raylm.models.eagle3 import Eagle3Head, load_eagle3
from raylm.models.load import load_model
from raylm.models.taps import HiddenTaps
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, PagedRun, generate, load
from tests.support import checkpoints

FILE = "model.safetensors"
BOTH_SPELLINGS = [
    {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
    {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}},
]


@pytest.fixture
def target(tmp_path: Path) -> DecoderModel:
    return load(checkpoints.llama(tmp_path / "target"))


def head_arch(tmp_path: Path, target: ArchConfig | None = None, **changes: object) -> Eagle3Arch:
    if not (tmp_path / "target").exists():
        checkpoints.llama(tmp_path / "target")
    folder = checkpoints.eagle3(tmp_path / "head", tmp_path / "target", **changes)
    return read_eagle3_arch(locate(str(folder)), target or ArchConfig.from_source(locate(str(tmp_path / "target"))))


def load_head(tmp_path: Path, target: DecoderModel, **changes: object) -> Eagle3Head:
    arch = head_arch(tmp_path, target.arch, **changes)
    return load_eagle3(locate(str(tmp_path / "head")), arch, target, progress=False)


@pytest.mark.parametrize("fields", BOTH_SPELLINGS)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"])
def test_the_description_of_a_head(fields: dict, name: str, tmp_path: Path) -> None:
    found = head_arch(tmp_path, architectures=[name], max_position_embeddings=64, **fields)
    assert (found.draft_vocab_size, found.target_hidden_size, found.target_layers) == (200, 64, (0, 2, 3))
    assert not found.norm_before_residual
    # Rows of the target may be longer than what the head was trained for.
    assert (found.arch.num_layers, found.arch.max_position) == (1, 512)


def test_layers_that_are_not_named_are_the_authors_choice(tmp_path: Path) -> None:
    checkpoints.llama(tmp_path / "target", num_hidden_layers=12)
    found = head_arch(tmp_path, eagle_aux_hidden_state_layer_ids=None)
    assert found.target_layers == (2, 6, 9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures is .'GPT2LMHeadModel'.; allowed: an EAGLE-3 head: one of",
        ),
        ({"draft_vocab_size": None}, "draft_vocab_size is missing: this is no EAGLE-3 head"),
        ({"draft_vocab_size": 321}, "draft_vocab_size is 321; allowed: at most vocab_size, 320"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; allowed: 1"),
        ({"vocab_size": 300}, "vocab_size is 300; allowed: 320, the target's"),
        ({"hidden_size": 32}, "hidden_size is 32; allowed: 64, the target's hidden_size"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32; allowed: 64"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "the target's 3 layers are too few"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "allowed: 3 numbers from 0 to the target's 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "allowed: 3 numbers from 0 to the target's 3 layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
    ],
)
def test_what_is_no_head_for_this_target(fields: dict, message: str, tmp_path: Path) -> None:
    draft_vocab = {"draft_vocab_size": 200, **fields}["draft_vocab_size"]
    head_arch(tmp_path)
    config = tmp_path / "head" / "config.json"
    text = json.loads(config.read_text()) | fields | {"draft_vocab_size": draft_vocab}
    config.write_text(json.dumps(text))
    with pytest.raises(ConfigError, match=message):
        read_eagle3_arch(locate(str(tmp_path / "head")), ArchConfig.from_source(locate(str(tmp_path / "target"))))


def test_a_gguf_file_is_no_head(target: DecoderModel) -> None:
    with pytest.raises(ConfigError, match="an EAGLE-3 head is a folder with config.json"):
        read_eagle3_arch(ModelSource(Path("x.gguf"), "gguf"), target.arch)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("olmo2", {}, "layers have no norms before them"),
        ("opt_350m", {}, "layers have no norms before them"),
        ("opt", {"word_embed_proj_dim": 48}, "embedding has 48 columns, not hidden_size, 64"),
    ],
)
def test_a_target_that_heads_cannot_read(family: str, changes: dict, message: str, tmp_path: Path) -> None:
    head_arch(tmp_path)
    folder = checkpoints.FAMILIES[family](tmp_path / family, **changes)
    with pytest.raises(ConfigError, match=message):
        read_eagle3_arch(locate(str(tmp_path / "head")), ArchConfig.from_source(locate(str(folder))))


def test_tensors_of_a_head_are_complete(target: DecoderModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 missing: fc.weight"):
        load_head(tmp_path, target, leave_out=("fc.weight",))
    with pytest.raises(ConfigError, match="1 missing: d2t"):
        load_head(tmp_path, target, leave_out=("d2t",))
    with pytest.raises(ConfigError, match="lm_head.weight is missing, and the target's has another shape"):
        load_head(tmp_path, target, leave_out=("lm_head.weight",))


def test_a_map_to_tokens_that_the_target_has_not(target: DecoderModel, tmp_path: Path) -> None:
    arch = head_arch(tmp_path, target.arch)
    tensors = load_file(tmp_path / "head" / FILE)
    tensors["d2t"][7] = 400
    save_file(tensors, tmp_path / "head" / FILE)
    with pytest.raises(ConfigError, match="d2t names tokens outside of the target's 320"):
        load_eagle3(locate(str(tmp_path / "head")), arch, target, progress=False)


def test_names_of_other_trainers_and_an_embedding_of_its_own(target: DecoderModel, tmp_path: Path) -> None:
    expected = load_head(tmp_path, target).state_dict()
    tensors = load_file(tmp_path / "head" / FILE)
    renamed = {name.replace("midlayer.", "model.layers.0."): tensor for name, tensor in tensors.items()}
    renamed["embed_tokens.weight"] = torch.ones(320, 64)
    save_file(renamed, tmp_path / "head" / FILE)
    arch = read_eagle3_arch(locate(str(tmp_path / "head")), target.arch)
    found = load_eagle3(locate(str(tmp_path / "head")), arch, target, progress=False).state_dict()
    assert found.pop("embed_tokens.weight.values").eq(1).all()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_random_head(target: DecoderModel, tmp_path: Path) -> None:
    arch = head_arch(tmp_path, target.arch)
    (tmp_path / "head" / FILE).unlink()
    head = load_eagle3(locate(str(tmp_path / "head")), arch, target, dummy=True)
    assert head.fc.weight.plain.std() > 0.01 and head.norm.weight.eq(1).all() and head.d2t.eq(0).all()
    assert (head.draft(torch.ones(3, 64)) < 200).all()


def test_a_mimo_has_its_mtp_layer_only_when_it_is_asked_for(tmp_path: Path) -> None:
    folder = checkpoints.mimo(tmp_path)
    source = locate(str(folder))
    arch = ArchConfig.from_source(source)
    assert (arch.mtp_layers, arch.uses_mtp) == (1, False)
    plain = load(folder)
    assert not any("mtp" in name for name in plain.state_dict())
    model = load_model(source, with_mtp(arch), ParallelContext.single(CPU), torch.float32, "auto", progress=False)
    tensors = load_file(folder / FILE)
    assert torch.equal(model.mtp.input_proj.weight.plain, tensors["model.mtp_layers.0.input_proj.weight"])
    assert len(model.state_dict()) == len(plain.state_dict()) + len(model.mtp.state_dict())
    save_file({k: v for k, v in tensors.items() if "final_layernorm" not in k}, folder / FILE)
    load(folder)
    with pytest.raises(ConfigError, match="1 missing: mtp_layers.0.final_layernorm.weight"):
        load_model(source, with_mtp(arch), ParallelContext.single(CPU), torch.float32, "auto", progress=False)


@pytest.mark.parametrize(("family", "layers"), [("llama", 0), ("mimo", 2)])
def test_models_without_one_mtp_layer_cannot_draft_by_it(family: str, layers: int, tmp_path: Path) -> None:
    folder = checkpoints.FAMILIES[family](tmp_path, **({"num_nextn_predict_layers": layers} if layers else {}))
    if layers:
        config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": layers}
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"has {layers} MTP layers .*; allowed: a MiMoForCausalLM with 1"):
        with_mtp(ArchConfig.from_source(locate(str(folder))))


@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom", "mimo"])
def test_taps_keep_what_transformers_calls_hidden_states(family: str, tmp_path: Path) -> None:
    folder = checkpoints.FAMILIES[family](tmp_path)
    model, tokens = load(folder), list(range(40, 51))
    num_layers = model.arch.num_layers
    taps = HiddenTaps(model, [0, 2, num_layers], max_tokens=20)
    PagedRun(model).step({"a": tokens})
    reference = checkpoints.reference(folder)
    parts = list(reference.transformer.h if family == "bloom" else reference.model.layers)
    before_norm: list[torch.Tensor] = []
    norm = reference.transformer.ln_f if family == "bloom" else reference.model.norm
    norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0][0]))
    with torch.inference_mode():
        states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert len(parts) == num_layers
    expected = torch.cat((states[0][0], states[2][0], before_norm[0]), dim=-1)
    torch.testing.assert_close(taps.take(len(tokens)), expected, atol=2e-4, rtol=1e-4)


def test_a_model_with_taps_computes_the_same(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path)
    prompts = {"a": list(range(9)), "b": [3, 4]}
    expected, expected_logits = generate(PagedRun(load(folder)), prompts, num_tokens=3)
    model = load(folder)
    HiddenTaps(model, [0, 1, 3], max_tokens=20)
    found, logits = generate(PagedRun(model), prompts, num_tokens=3)
    assert found == expected
    assert all(torch.equal(logits[name], expected_logits[name]) for name in logits)
