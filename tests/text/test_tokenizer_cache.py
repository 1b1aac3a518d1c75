"""Converted tokenizers are kept, shared safely between processes, and made anew when they are damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raylm.model_files.source import ModelSource
from raylm.text import cache, gguf_tokenizer
from raylm.text.tokenizer import Tokenizer
from tests.text.test_tokenizer_gguf import byte_level_values
from tests.text.tiny_tokenizers import write_gguf

LOAD = """
import sys
from pathlib import Path
from raylm.model_files.source import ModelSource
from raylm.text.tokenizer import Tokenizer

sys.stdin.readline()
tokenizer = Tokenizer.load(ModelSource(Path(sys.argv[1]), "gguf"), cache_dir=Path(sys.argv[2]))
print(tokenizer.encode("the 123 cats"), tokenizer.eos_token_ids)
"""


@pytest.fixture
def source(tmp_path) -> ModelSource:
    values = byte_level_values("qwen2") | {"tokenizer.chat_template": "{{ messages }}"}
    return ModelSource(write_gguf(tmp_path / "model.gguf", "qwen2", values), "gguf")


@pytest.fixture
def conversions(monkeypatch) -> list[Path]:
    """The files converted so far."""
    seen: list[Path] = []
    convert = gguf_tokenizer.convert_gguf

    def counted(path: Path):
        seen.append(path)
        return convert(path)

    monkeypatch.setattr(gguf_tokenizer, "convert_gguf", counted)
    return seen


def only_folder(root: Path) -> Path:
    (folder,) = root.iterdir()
    return folder


def same(one: Tokenizer, other: Tokenizer) -> bool:
    text = "the 123 cats<think> <|end|>"
    return one.encode(text) == other.encode(text) and one.info == other.info and one.vocab_size == other.vocab_size


def test_the_second_load_converts_nothing(source, conversions, tmp_path):
    first = Tokenizer.load(source, cache_dir=tmp_path / "cache")
    second = Tokenizer.load(source, cache_dir=tmp_path / "cache")
    assert conversions == [source.path]
    assert same(first, second)
    assert second.info.chat_template == "{{ messages }}"
    assert sorted(path.name for path in only_folder(tmp_path / "cache").iterdir()) == ["info.json", "tokenizer.json"]


def test_another_file_of_the_same_name_is_converted(source, conversions, tmp_path):
    Tokenizer.load(source, cache_dir=tmp_path / "cache")
    write_gguf(source.path, "qwen2", byte_level_values("gpt-2"))
    Tokenizer.load(source, cache_dir=tmp_path / "cache")
    assert len(conversions) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def edit(path: Path) -> None:
    data = json.loads(path.read_text())
    data["info" if "info" in data else "version"] = {} if "info" in data else "1.1"
    path.write_text(json.dumps(data))


def not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize("damage", [cut, empty, remove, edit, not_text])
@pytest.mark.parametrize("name", ["tokenizer.json", "info.json"])
def test_a_damaged_cache_is_made_anew(source, conversions, tmp_path, name, damage):
    first = Tokenizer.load(source, cache_dir=tmp_path / "cache")
    damage(only_folder(tmp_path / "cache") / name)
    assert same(Tokenizer.load(source, cache_dir=tmp_path / "cache"), first)
    assert same(Tokenizer.load(source, cache_dir=tmp_path / "cache"), first)
    assert len(conversions) == 2


def test_changed_facts_with_valid_json_are_noticed(source, conversions, tmp_path):
    Tokenizer.load(source, cache_dir=tmp_path / "cache")
    path = only_folder(tmp_path / "cache") / "info.json"
    path.write_text(path.read_text().replace("{{ messages }}", "{{ password }}"))
    assert Tokenizer.load(source, cache_dir=tmp_path / "cache").info.chat_template == "{{ messages }}"
    assert len(conversions) == 2


def test_a_cache_that_cannot_be_written_is_no_error(source, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert Tokenizer.load(source, cache_dir=blocked).encode("the")
    assert "is not kept" in caplog.text


def test_processes_may_convert_at_once(source, tmp_path):
    folder = tmp_path / "cache"
    command = [sys.executable, "-W", "error", "-c", LOAD, str(source.path), str(folder)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for worker in workers:  # all have started: let them go together
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    results = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], results
    assert len({output for output, _ in results}) == 1
    assert sorted(path.name for path in only_folder(folder).iterdir()) == ["info.json", "tokenizer.json"]
    assert Tokenizer.load(source, cache_dir=folder).encode("the 123 cats")


def test_the_default_place_is_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path / "raylm" / "tokenizers"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.default_cache_dir() == tmp_path / "home" / ".cache" / "raylm" / "tokenizers"
