"""Models by URL: fsspec's store in memory, and one in a folder for several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError
from raylm.model_files.advice import sampling_defaults
from raylm.model_files.deployed import bring_weights, pinned
from raylm.model_files.source import locate
from raylm.model_files.weight_files import weight_files
from tests.support.hangup import ended_by_hangup

URL = "memory://models/tiny"
TEXT = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
BRING = """
import sys
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.model_files.weight_files import weight_files
try:
    print(weight_files(locate(sys.argv[1])).paths[0])
except ConfigError as error:
    sys.exit(str(error))
"""
SLOW = """
import os, sys, time
from fsspec.implementations.local import LocalFileSystem
whole = LocalFileSystem.get_file
def half(self, key, place, **_):
    if key.endswith(".safetensors"):
        with open(key, "rb") as source, open(place, "wb") as target:
            target.write(source.read(100))
            target.flush()
            open(os.environ["HALF"], "w").close()
            time.sleep(60)
    whole(self, key, place)
LocalFileSystem.get_file = half
"""


@pytest.fixture
def store(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    """The tiny model in a store, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fs = MemoryFileSystem()
    for path in tiny.iterdir():
        fs.pipe_file(f"/models/tiny/{path.name}", path.read_bytes())
    yield fs
    fs.rm("/models", recursive=True)


def cached(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != ".lock"]


def bring(url: str, home: Path, *, before: str = "", **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(home), **variables}
    command = ended_by_hangup([sys.executable, "-c", before + BRING, url])
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_url_brings_the_weights_when_they_are_read(store: fsspec.AbstractFileSystem, tiny: Path, tmp_path: Path):
    store.pipe_file("/models/tiny/consolidated.safetensors", b"unwanted")
    store.pipe_file("/models/tiny/onnx/model.onnx", b"unwanted")
    config = parse(EngineConfig, {"model": {"path": URL}}, source="test")
    assert config.model.served_name == "tiny"
    assert pinned(config) == config and sampling_defaults(config).temperature == 1.0
    assert {path.name for path in cached(tmp_path)} == TEXT
    bring_weights(config)
    (path,) = weight_files(locate(URL)).paths
    assert path.read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert {path.name for path in cached(tmp_path)} == {*TEXT, "model.safetensors"}


def test_an_object_that_has_changed_is_another_copy(store: fsspec.AbstractFileSystem):
    first = weight_files(locate(URL + "/"))
    assert weight_files(locate(URL)) == first
    store.pipe_file("/models/tiny/model.safetensors", b"new")
    (second,) = weight_files(locate(URL)).paths
    assert second.read_bytes() == b"new" and second != first.paths[0] and first.paths[0].is_file()


def test_gguf_files_by_url(store: fsspec.AbstractFileSystem):
    names = [f"tiny-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in names:
        store.pipe_file(f"/models/tiny/{name}", name.encode())
    source = locate(f"{URL}/{names[0]}")
    assert source.kind == "gguf"
    assert [path.read_bytes() for path in weight_files(source).paths] == [name.encode() for name in names]
    with pytest.raises(ConfigError, match=r"none\.gguf': there is no such object"):
        locate(f"{URL}/none.gguf")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (
            "memory://models/none",
            r"model\.path 'memory://models/none': has no object config\.json; allowed: the URL of",
        ),
        ("nothing://a/b", r"'nothing://a/b': ValueError: Protocol not known: nothing"),
    ],
)
def test_what_is_not_there_is_told(store: fsspec.AbstractFileSystem, url: str, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        locate(url)


def test_a_store_without_its_package_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(ConfigError, match=r"s3://bucket/model': .*s3fs.*; in raylm's repository, pip install -e"):
        locate("s3://bucket/model")


def test_names_of_objects_that_lead_elsewhere_are_left_out(store: fsspec.AbstractFileSystem, tmp_path: Path):
    hostile = {"/models/tiny/../../../evil.jinja", "/models/tiny/additional_chat_templates/../../x.jinja"}
    for key in hostile:
        store.store[key] = store.store["/models/tiny/config.json"]
    locate(URL)
    for key in hostile:
        del store.store[key]
    assert {path.name for path in cached(tmp_path)} == TEXT


def test_a_copy_that_was_killed_leaves_nothing_half(tiny: Path, tmp_path: Path):
    url, half = f"file://{tiny}", tmp_path / "half"
    with bring(url, tmp_path / "cache", before=SLOW, HALF=str(half)) as process:
        while not half.exists():
            assert process.poll() is None, process.stderr.read()
        process.kill()
    assert {path.name for path in cached(tmp_path)} == {*TEXT, "model.safetensors.part"}
    with bring(url, tmp_path / "cache") as first, bring(url, tmp_path / "cache") as second:
        for process in (first, second):
            path, error = process.communicate(timeout=240)
            assert Path(path.strip()).read_bytes() == (tiny / "model.safetensors").read_bytes(), error
    assert {path.name for path in cached(tmp_path)} == {*TEXT, "model.safetensors"}


def test_a_full_disk_is_told_and_leaves_nothing_half(tiny: Path, tmp_path: Path):
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    with bring(f"file://{tiny}", tmp_path / "cache", before=full) as process:
        _, error = process.communicate(timeout=240)
    assert "no room is left for it in" in error and "XDG_CACHE_HOME" in error
    assert {path.name for path in cached(tmp_path)} == TEXT
