"""Models by s3:// and gs://, through the packages that people use, from stores on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.model_files.weight_files import weight_files
from tests.support.object_stores import ACCESS_KEY, SECRET_KEY, GcsHandler, ObjectStore, S3Handler, running

BUCKET = "models"
_HANDLERS = {"s3": S3Handler, "gs": GcsHandler}


@pytest.fixture(params=_HANDLERS)
def scheme(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def store(scheme: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A bucket with the tiny model, of which the environment says where it is, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with running(_HANDLERS[scheme], BUCKET) as found:
        found.objects = {f"a/tiny/{path.name}": path.read_bytes() for path in tiny.iterdir()}
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", found.url)
        # Read when gcsfs is first imported: the store is asked for objects alone, and nobody for credentials.
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
        pytest.importorskip("gcsfs").GCSFileSystem.clear_instance_cache()
        yield found


def test_a_folder_is_copied_and_a_change_is_another_copy(store: ObjectStore, scheme: str, tiny: Path) -> None:
    url = f"{scheme}://{BUCKET}/a/tiny"
    first = weight_files(locate(url))
    assert [path.read_bytes() for path in first.paths] == [(tiny / "model.safetensors").read_bytes()]
    assert weight_files(locate(url + "/")) == first
    # As long as before: its tag alone tells.
    body = store.objects["a/tiny/model.safetensors"]
    store.objects["a/tiny/model.safetensors"] = body[:-1] + bytes([body[-1] ^ 1])
    (changed,) = weight_files(locate(url)).paths
    assert changed not in first.paths and changed.read_bytes() == store.objects["a/tiny/model.safetensors"]


def test_a_gguf_file_by_url(store: ObjectStore, scheme: str) -> None:
    store.objects["b/tiny.gguf"] = b"GGUF and more"
    (path,) = weight_files(locate(f"{scheme}://{BUCKET}/b/tiny.gguf")).paths
    assert path.read_bytes() == b"GGUF and more"


def test_a_connection_that_is_cut_leaves_a_whole_file_or_none(
    store: ObjectStore, scheme: str, tiny: Path, tmp_path: Path
) -> None:
    source = locate(f"{scheme}://{BUCKET}/a/tiny")
    store.breaks_after = 1000
    for attempt in range(2):
        try:
            (path,) = weight_files(source).paths
        except ConfigError as error:
            assert attempt == 0 and f"{scheme}://{BUCKET}/a/tiny" in str(error)
            assert not list((tmp_path / "cache").rglob("model.safetensors*"))
        else:
            assert path.read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert store.breaks_after is None, "one was cut"


def test_what_is_not_there_is_told(store: ObjectStore, scheme: str) -> None:
    for url in (f"{scheme}://{BUCKET}/none", f"{scheme}://elsewhere/tiny"):
        with pytest.raises(ConfigError, match=rf"model\.path '{url}': has no object config\.json"):
            locate(url)


@pytest.mark.parametrize("scheme", ["s3"], indirect=True)
def test_a_key_that_is_not_known_is_told(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    with pytest.raises(ConfigError, match=rf"model\.path 's3://{BUCKET}/a/tiny': .*access key"):
        locate(f"s3://{BUCKET}/a/tiny")
