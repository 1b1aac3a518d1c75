"""A family that raylm has not is its own file and one line of the registry, and no more."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import raylm
from raylm import LLM, SamplingParams
from raylm.models import families, registry
from raylm.models.decoder import DecoderModel
from tests.models.paged import PagedRun, generate, load
from tests.support import checkpoints, gguf_kinds

FILE = '''
"""A Llama under names of its own, whose configuration leaves out what its family has always."""

from functools import partial

from raylm.models import read_gguf
from raylm.models.family import Family
from raylm.models.names import HF_WEIGHTS, TensorNames
from raylm.models.read_folder import dense

ARCHITECTURES = {
    "NewcomerForCausalLM": Family(
        read=dense,
        defaults={"max_position_embeddings": 512, "rms_norm_eps": 1e-6, "vocab_size": 320},
        field_names={"width": "hidden_size", "depth": "num_hidden_layers"},
        gguf={"newcomer": partial(read_gguf.dense, normalized=True)},
        names=TensorNames(folder={**HF_WEIGHTS, "blocks": ("layers", None), "out": ("o_proj", None)}),
    )
}
'''
PROMPT = [5, 6, 7, 8, 9, 10, 11]
NAMES = re.compile(r"[A-Z]\w*For(CausalLM|ConditionalGeneration)")
"""Architectures as checkpoints name them."""
OTHERS = {
    "models/arch_eagle3.py": "heads that draft, which are no family",
    "models/read_params.py": "a format that only one family has",
    "models/transformers_model.py": "transformers' own class",
    "bench/": "shapes and copies of models to measure",
}
"""Files that may name architectures, beside those of families."""


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its file is in the package of families, its line in the registry."""
    (tmp_path / "newcomer.py").write_text(FILE)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_FAMILIES", (*registry._FAMILIES, "newcomer"))
    registry.families.cache_clear()
    yield
    registry.families.cache_clear()
    sys.modules.pop("raylm.models.families.newcomer", None)
    vars(families).pop("newcomer", None)


@pytest.mark.usefixtures("newcomer")
def test_it_is_its_own_file_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints.llama(tmp_path / "model")
    expected = _tokens(load(folder))
    monkeypatch.setitem(gguf_kinds.ARCHITECTURES, "llama", "newcomer")
    file = checkpoints.write_gguf(folder, tmp_path / "newcomer.gguf")
    _rename(folder)
    llm = LLM(str(folder), device="cpu", dtype="float32", progress=False)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (completion,) = llm.generate([PROMPT], params, progress=False)
    llm.close()
    assert completion.outputs[0].token_ids == expected
    stored = load(file)
    assert stored.arch.architecture == "NewcomerForCausalLM"
    # Its weights have 16 bits, and those of the folder 32.
    assert _tokens(stored)[:2] == expected[:2]


def test_only_files_of_families_name_architectures() -> None:
    root = Path(raylm.__file__).parent
    found = [
        f"{name}:{node.lineno}: {node.value}"
        for path in sorted(root.rglob("*.py"))
        if not (name := path.relative_to(root).as_posix()).startswith(("models/families/", *OTHERS))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMES.fullmatch(node.value)
    ]
    assert found == []


def _tokens(model: DecoderModel) -> list[int]:
    texts, _ = generate(PagedRun(model), {"text": PROMPT}, 8)
    found: list[int] = texts["text"][len(PROMPT) :]
    return found


def _rename(folder: Path) -> None:
    """The checkpoint as its own authors would have saved it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["NewcomerForCausalLM"], "model_type": "newcomer"}
    config |= {"width": config.pop("hidden_size"), "depth": config.pop("num_hidden_layers")}
    for always in ("max_position_embeddings", "rms_norm_eps", "vocab_size"):
        del config[always]
    path.write_text(json.dumps(config))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    renamed = {
        name.replace(".layers.", ".blocks.").replace(".o_proj.", ".out."): each for name, each in tensors.items()
    }
    save_file(renamed, path, metadata={"format": "pt"})
