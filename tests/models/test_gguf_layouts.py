"""GGUF files whose tensors are joined, or stand alone, as llama.cpp's converters write them on request or once did."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.models.paged import load
from tests.support import checkpoints


class Joining(gguf.GGUFWriter):
    """Writes queries, keys and values as one tensor, and gate and up of all experts as another."""

    _JOINED = (
        (("attn_q", "attn_k", "attn_v"), "attn_qkv", 0),
        (("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps", 1),
    )

    def add_tensor(self, name: str, data: np.ndarray, **more: object) -> None:
        held: dict[str, np.ndarray] = self.__dict__.setdefault("held", {})
        path, _, end = name.rpartition(".")
        before, _, part = path.rpartition(".")
        for parts, joined, axis in self._JOINED:
            if part in parts:
                held[name] = data
                names = [f"{before}.{each}.{end}" for each in parts]
                if all(each in held for each in names):
                    whole = np.concatenate([held.pop(each) for each in names], axis=axis)
                    super().add_tensor(f"{before}.{joined}.{end}", whole, **more)
                return
        super().add_tensor(name, data, **more)


class Apart(gguf.GGUFWriter):
    """Writes each expert by itself, as the first files of Mixtral have them."""

    def add_tensor(self, name: str, data: np.ndarray, **more: object) -> None:
        if "_exps." not in name:
            super().add_tensor(name, data, **more)
            return
        for number, each in enumerate(data):
            super().add_tensor(name.replace("_exps.", f".{number}."), each, **more)


@pytest.mark.parametrize(
    ("family", "writer"),
    [("llama", Joining), ("qwen2", Joining), ("qwen3_moe", Joining), ("mixtral", Joining), ("mixtral", Apart)],
)
def test_the_same_parameters(family: str, writer: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints.FAMILIES[family](tmp_path / "hf")
    usual = load(checkpoints.write_gguf(folder, tmp_path / "usual.gguf")).state_dict()
    monkeypatch.setattr(gguf, "GGUFWriter", writer)
    path = checkpoints.write_gguf(folder, tmp_path / "own.gguf")
    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert ("blk.0.attn_qkv.weight" in names) == (writer is Joining)
    assert "blk.0.ffn_gate_exps.weight" not in names
    own = load(path).state_dict()
    assert own.keys() == usual.keys()
    assert all(torch.equal(own[name], usual[name]) for name in usual)
