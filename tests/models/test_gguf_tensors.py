"""GGUF tensors of every allowed type decode to what the gguf package says."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from raylm.errors import ConfigError
from raylm.model_files.source import ModelSource
from raylm.models.gguf import gguf_tensors
from tests.models.paged import PagedRun, generate, load
from tests.support import checkpoints

TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)


def random_bytes(kind: GGMLType, shape: tuple[int, int]) -> np.ndarray:
    """A tensor in the file's own bytes. Some types cannot be made in Python, but any bytes decode to something."""
    random = np.random.default_rng(0)
    if not kind.name.endswith("_K") and not kind.name.startswith("IQ"):
        return gguf.quantize(random.standard_normal(shape, dtype=np.float32), kind)
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    # No scale of 16 bits is infinite or no number: no byte is large enough.
    return random.integers(0, 0x70, (shape[0], shape[1] // values * num_bytes), dtype=np.uint8)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, GGMLType]]) -> None:
    writer = gguf.GGUFWriter(path, "qwen2")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", TYPES)
# 2100 rows of 512 take several pieces; the last of them is short, and one of 3 rows decodes as a single group.
@pytest.mark.parametrize("num_rows", [3, 2100])
def test_types(name: str, num_rows: int, tmp_path: Path) -> None:
    kind, shape = GGMLType[name], (num_rows, 512)
    raw = random_bytes(kind, shape)
    write(tmp_path / "a.gguf", {"x": (raw, kind)})
    (tensor,) = gguf_tensors(ModelSource(tmp_path / "a.gguf", "gguf"))
    assert (tensor.name, tensor.shape, tensor.num_bytes) == ("x", shape, raw.nbytes)
    expected = torch.tensor(gguf.dequantize(raw, kind))
    found = torch.cat([piece.float() for _, piece in tensor.pieces(0, num_rows)])
    assert torch.equal(found, expected)
    part = torch.cat([piece.float() for _, piece in tensor.pieces(1, num_rows - 1)])
    assert torch.equal(part, expected[1:-1])


def test_other_types_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", {"x": (gguf.quantize(np.ones((2, 256), np.float32), GGMLType.TQ1_0), GGMLType.TQ1_0)})
    with pytest.raises(ConfigError, match="tensor x has type TQ1_0; allowed: F32, F16, BF16, Q4_0, .* Q6_K"):
        gguf_tensors(ModelSource(tmp_path / "a.gguf", "gguf"))


def test_a_file_cut_short(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "hf")
    path = checkpoints.write_gguf(folder, tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="the file ends inside tensor .*: it is cut short"):
        load(path)


def test_a_quantised_model_generates_as_its_decoded_weights_do(tmp_path: Path) -> None:
    quants = {"attn_q": GGMLType.Q8_0, "attn_k": GGMLType.Q4_1, "ffn_up": GGMLType.Q5_1, "token_embd": GGMLType.Q4_0}
    folder = checkpoints.llama(tmp_path / "hf", tie_word_embeddings=True)
    path = checkpoints.write_gguf(folder, tmp_path / "model.gguf", quants)
    model, reference = load(path), checkpoints.reference(folder)
    reader = gguf.GGUFReader(path)
    weights = {tensor.name: torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors}
    state = {}
    for name, found in checkpoints._gguf_names(reference.config).items():
        if found in weights:
            heads = {"attn_q": 4, "attn_k": 2}.get(found.split(".")[-2])
            state[name] = checkpoints._unpermuted(weights[found], heads) if heads else weights[found]
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    reference.load_state_dict(state)
    prompts = {"a": list(range(20)), "b": [3, 1, 4]}
    texts, logits = generate(PagedRun(model), prompts, num_tokens=4)
    for name, text in texts.items():
        with torch.inference_mode():
            expected = reference(torch.tensor([text[:-1]])).logits[0]
        torch.testing.assert_close(logits[name], expected, atol=2e-4, rtol=1e-4)
