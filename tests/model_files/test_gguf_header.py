"""The GGUF header reader against the gguf package's writer, and damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from raylm.errors import ConfigError
from raylm.model_files.gguf_header import GGUFTensorInfo, read_gguf
from raylm.model_files.source import locate


@pytest.fixture
def path(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint32("a.uint", 4_000_000_000)
    writer.add_int32("a.int", -5)
    writer.add_float32("a.float", 0.5)
    writer.add_uint64("a.long", 2**40)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "Köln 東京")
    writer.add_array("a.texts", ["", "b", "ü"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.25, 1.5])
    writer.add_tensor("matrix", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("vector", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "a.gguf"


def test_values_and_tensors(path: Path) -> None:
    file = read_gguf(path)
    assert file.metadata == {
        "general.architecture": "llama",
        "a.uint": 4_000_000_000,
        "a.int": -5,
        "a.float": 0.5,
        "a.long": 2**40,
        "a.flag": True,
        "a.text": "Köln 東京",
        "a.texts": ["", "b", "ü"],
        "a.ints": [1, -2, 3],
        "a.floats": [0.25, 1.5],
    }
    assert isinstance(file.metadata["a.flag"], bool)
    matrix, vector = file.tensors
    assert matrix == GGUFTensorInfo("matrix", (2, 3), 0, matrix.offset)
    assert np.fromfile(path, "<f4", 6, offset=matrix.offset).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.fromfile(path, "<f2", 4, offset=vector.offset).tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("demo")
def test_equals_the_gguf_package_on_a_real_file() -> None:
    path = locate("smollm2-135m").path
    file = read_gguf(path)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert file.metadata["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48900
    end = max(tensor.offset for tensor in file.tensors)
    assert len(file.tensors) == 272
    assert end < path.stat().st_size


def test_every_cut_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    header = read_gguf(path).tensors[0].offset - 32
    for length in range(1, header, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="cut short or damaged|not a GGUF file"):
            read_gguf(path)


def test_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    with pytest.raises(ConfigError, match="cannot read this GGUF file"):
        read_gguf(path)
    for data, message in (
        (b"", "cannot read this GGUF file"),
        (b"PK\x03\x04" + bytes(30), "does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported; allowed: 2, 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"a", 99), "a value of unknown type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63), "cut short or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 4, 2**62), "cut short or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIQ1s", 1, b"a", 8, 1, b"\xff"), "is not UTF-8"),
    ):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=message):
            read_gguf(path)
