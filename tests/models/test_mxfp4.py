"""Checkpoints whose experts are stored as MXFP4, as GPT-OSS is released, against twins that are decoded by hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raylm import LLM, EngineConfig, SamplingParams
from raylm.errors import ConfigError
from raylm.layers.slots import Slot
from raylm.model_files.source import locate
from raylm.models import filling
from raylm.models.arch import ArchConfig
from raylm.models.checkpoint import MXFP4Tensor
from raylm.models.load import checkpoint_digest
from raylm.models.mxfp4 import decode
from raylm.models.safetensors import file_tensors
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, PagedRun, generate, load
from tests.models.reads import count_reads
from tests.support import checkpoints
from tests.support.greedy import assert_greedy

FILE = "model.safetensors"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits; the fourth is the sign."""
BLOCKS = "model.layers.0.mlp.experts.down_proj_blocks"
SCALES = "model.layers.0.mlp.experts.down_proj_scales"
PROMPTS = {"a": [(7 * i + 3) % checkpoints.VOCAB_SIZE for i in range(23)], "b": [5, 9]}


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., G, 16] and [..., G] -> [..., 32 G], value by value."""
    found = []
    for codes, scale in zip(blocks.flatten(0, -2).tolist(), scales.flatten().tolist(), strict=True):
        for code in codes:
            for four_bits in (code % 16, code // 16):
                sign = -1 if four_bits >= 8 else 1
                found.append(sign * VALUES[four_bits % 8] * 2.0 ** (scale - 127))
    return torch.tensor(found).view(*blocks.shape[:-2], -1)


def write_both(folder: Path, **sizes: int) -> tuple[Path, Path]:
    """A checkpoint with packed experts, and its twin in transformers' layout."""
    twin, packed = (
        checkpoints.FAMILIES["gpt_oss"](folder / name, **{"num_hidden_layers": 2} | sizes)
        for name in ("twin", "packed")
    )
    tensors, stored = load_file(twin / FILE), load_file(packed / FILE)
    random = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        num_experts, columns, rows = tensors[name].shape
        blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(121, 126, blocks.shape[:-1], dtype=torch.uint8, generator=random)
        tensors[name] = decoded(blocks, scales).transpose(1, 2).contiguous()
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, twin / FILE)
    save_file(stored, packed / FILE)
    change_config(packed, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return packed, twin


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_both(tmp_path_factory.mktemp("mxfp4"))


@pytest.fixture
def packed(both: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy that a test may change."""
    for path in both[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_it_is_its_decoded_twin(both: tuple[Path, Path]) -> None:
    packed, twin = (load(folder) for folder in both)
    for (name, found), expected in zip(packed.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(found, expected), name
    texts, logits = generate(PagedRun(packed), PROMPTS, num_tokens=8)
    model = checkpoints.reference(both[1])
    for name, text in texts.items():
        with torch.inference_mode():
            expected = model(torch.tensor([text[:-1]])).logits[0]
        torch.testing.assert_close(logits[name], expected, atol=1e-4, rtol=1e-4)


def test_a_prefix_that_is_in_the_cache_changes_nothing(both: tuple[Path, Path]) -> None:
    """The whole way: sinks and windows over blocks that another request has filled."""
    packed, twin = both
    prompt = [(5 * i + 3) % 300 + 3 for i in range(40)]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    model = {"path": str(packed), "dtype": "float32", "max_model_len": 128}
    config = EngineConfig.model_validate({"model": model, "cache": {"num_blocks": 64}, "runtime": {"device": "cpu"}})
    llm = LLM(config, progress=False)
    try:
        first, again = (llm.generate([prompt], greedy, progress=False)[0] for _ in range(2))
    finally:
        llm.close()
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert_greedy(checkpoints.reference(twin), prompt, first.outputs[0].token_ids)


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_its_part(both: tuple[Path, Path], size: int) -> None:
    """Shares of 48 and 24 columns begin within a block."""
    for rank in range(size):
        context = ParallelContext(rank, rank, size, 0, 1, CPU)
        packed, twin = (load(folder, context=context) for folder in both)
        for (name, found), expected in zip(packed.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(found, expected), name


def test_a_rank_reads_the_blocks_of_its_columns_alone(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {tensor.name: tensor for tensor in file_tensors(both[0] / FILE, packed=True)}
    blocks, scales = tensors[BLOCKS].item(0), tensors[SCALES].item(0)
    rows, groups = scales.shape
    tensor = MXFP4Tensor(tensors[BLOCKS].item(0).flat(), scales)
    assert tensor.shape == (rows, 32 * groups) == (64, 96)
    read = count_reads(monkeypatch)
    slot = Slot(torch.zeros(rows, 40), tensor.shape, dim=1, start=50)
    filling.fill([(tensor, slot)], progress=False, num_threads=1)
    assert sum(read) == (blocks.num_bytes + scales.num_bytes) * 2 // 3
    stored = load_file(both[0] / FILE)
    assert torch.equal(slot.destination, decoded(stored[BLOCKS][0], stored[SCALES][0])[:, 50:90])


def test_loading_needs_little_more_than_the_weights(tmp_path: Path) -> None:
    """The peak of a process of its own. The experts, decoded whole before they are copied, would double it."""
    size, count, layers = 512, 32, 2
    sizes = {"hidden_size": size, "intermediate_size": size, "num_local_experts": count, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
    config = {"architectures": ["GptOssForCausalLM"], **sizes, **heads, "rope_parameters": {"rope_type": "default"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (64, size), "lm_head.weight": (64, size), "model.norm.weight": (size,)}
    packed: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        own = f"model.layers.{layer}."
        shapes |= {own + f"{norm}_layernorm.weight": (size,) for norm in ("input", "post_attention")}
        shapes |= {own + f"self_attn.{part}_proj.weight": (256, size) for part in "qkv"}
        shapes |= {own + f"self_attn.{part}_proj.bias": (256,) for part in "qkv"}
        shapes |= {own + "self_attn.o_proj.weight": (size, 256), own + "self_attn.o_proj.bias": (size,)}
        shapes |= {own + "self_attn.sinks": (4,)}
        shapes |= {own + "mlp.router.weight": (count, size), own + "mlp.router.bias": (count,)}
        for part, rows in (("gate_up", 2 * size), ("down", size)):
            shapes[own + f"mlp.experts.{part}_proj_bias"] = (count, rows)
            packed[own + f"mlp.experts.{part}_proj_blocks"] = (count, rows, size // 32, 16)
            packed[own + f"mlp.experts.{part}_proj_scales"] = (count, rows, size // 32)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(
        tensors | {name: torch.ones(*shape, dtype=torch.uint8) for name, shape in packed.items()}, tmp_path / FILE
    )
    code = """
import resource, sys
from tests.models.paged import load
from raylm.models import safetensors, weights
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load(sys.argv[1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
print(sum(parameter.nbytes for parameter in model.parameters()))
"""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    peak, num_bytes = map(int, done.stdout.split())
    assert num_bytes > 200e6 and peak < 1.3 * num_bytes


def test_every_code_and_scale() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
    for scale in (0, 1, 126, 127, 128, 250, 254):
        scales = np.full((1, 16), scale, dtype=np.uint8)
        expected = decoded(torch.from_numpy(codes).view(1, 16, 16), torch.from_numpy(scales))
        assert torch.equal(decode(codes, scales), expected)
    assert decode(codes, np.full((1, 16), 255, dtype=np.uint8)).isnan().all()


def test_its_digest_changes_with_it(packed: Path) -> None:
    source = locate(str(packed))
    arch = ArchConfig.from_source(source)
    before = checkpoint_digest(source, arch, "auto", seed=0)
    stored = load_file(packed / FILE)
    stored[BLOCKS][0, 0, 0, 0] += 1
    save_file(stored, packed / FILE)
    assert checkpoint_digest(source, arch, "auto", seed=0) != before


SHAPES = (
    r"down_proj_blocks has blocks of shape \(.*\), and .*down_proj_scales scales of shape \(.*\), an expert; allowed"
)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({BLOCKS: torch.zeros(6, 64, 3, 15, dtype=torch.uint8)}, SHAPES),
        ({BLOCKS: torch.zeros(6, 64, 3, dtype=torch.uint8)}, SHAPES),
        ({BLOCKS: torch.zeros(6, dtype=torch.uint8)}, SHAPES),
        ({SCALES: torch.zeros(6, 64, 2, dtype=torch.uint8)}, SHAPES),
        ({SCALES: torch.zeros(6, 32, 3, dtype=torch.uint8)}, SHAPES),
        ({SCALES: torch.zeros(6, 64, 3, 1, dtype=torch.uint8)}, SHAPES),
        ({SCALES: None}, r"missing: .*experts\.0\.down_proj\.weight.* without a place in this model: .*blocks"),
        ({BLOCKS: None}, r"missing: .*experts\.0\.down_proj\.weight.* without a place in this model: .*scales"),
        ({SCALES: torch.zeros(5, 64, 3, dtype=torch.uint8)}, "1 without a place in this model|without a place"),
        ({SCALES: torch.zeros(10**9, 0, dtype=torch.uint8)}, "without a place"),
        (
            {
                BLOCKS: torch.zeros(6, 64, 2, 16, dtype=torch.uint8),
                SCALES: torch.zeros(6, 64, 2, dtype=torch.uint8),
            },
            r"of another shape: .*down_proj_blocks \(64, 64\), not \(64, 96\)",
        ),
        ({BLOCKS: torch.zeros(6, 64, 3, 16)}, "down_proj_blocks has type F32; allowed: U8"),
        ({"model.norm.weight": torch.zeros(64, dtype=torch.uint8)}, "model.norm.weight has type U8; allowed: F32"),
    ],
)
def test_what_does_not_fit_is_refused(packed: Path, changes: dict[str, Tensor | None], sentence: str) -> None:
    stored = {**load_file(packed / FILE), **changes}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, packed / FILE)
    with pytest.raises(ConfigError, match=sentence):
        load(packed)


def test_a_packed_weight_beside_the_plain_one_is_there_twice(both: tuple[Path, Path], packed: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(load_file(packed / FILE) | {name: load_file(both[1] / FILE)[name]}, packed / FILE)
    with pytest.raises(ConfigError, match=r"there twice: .*experts\.down_proj"):
        load(packed)


def test_a_file_that_is_cut_short_is_refused(packed: Path) -> None:
    whole = (packed / FILE).read_bytes()
    (packed / FILE).write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match="it is cut short"):
        load(packed)


def test_other_quantisations_are_refused(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    change_config(packed, quantization_config={"quant_method": "exl2"})
    with pytest.raises(ConfigError, match="quant_method is 'exl2'; allowed: .*, bitsandbytes, torchao, mxfp4"):
        load(packed)
    llama = checkpoints.llama(tmp_path_factory.mktemp("llama"))
    change_config(llama, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ConfigError, match="quant_method is 'mxfp4'; allowed: .*, bitsandbytes, torchao, or"):
        load(llama)
