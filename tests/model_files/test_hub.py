"""Models by their names on the hub, which is a small one on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from huggingface_hub import constants

from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError
from raylm.llm import LLM
from raylm.model_files.advice import sampling_defaults
from raylm.model_files.deployed import bring_weights, pinned
from raylm.model_files.source import locate
from raylm.model_files.weight_files import weight_files
from tests.support import hub as hubs
from tests.support.hangup import ended_by_hangup

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


def config_of(path: str, **sections: dict[str, object]) -> EngineConfig:
    model = {"path": path, **sections.pop("model", {})}
    return parse(EngineConfig, {"model": model, **sections}, source="test")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def bring(hub: hubs.Hub, home: Path, name: str, *, before: str = "") -> subprocess.Popen[str]:
    """A process that downloads a model with its weights."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    command = ended_by_hangup([sys.executable, "-c", before + BRING, name])
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_name_brings_what_says_what_a_model_is_and_its_weights_when_they_are_read(hub: hubs.Hub, tiny: Path):
    unwanted = ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", "README.md", "modeling.py")
    hub.add("acme/tiny", {**files_of(tiny), **dict.fromkeys(unwanted, b"unwanted")})
    source = locate("acme/tiny")
    assert (source.kind, hub.fetched()) == ("folder", TEXT)
    (path,) = weight_files(source).paths
    assert path.read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert hub.fetched() == {*TEXT, "model.safetensors"}


def test_of_several_files_those_that_the_index_names_are_brought(hub: hubs.Hub, tiny: Path):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.dumps({"weight_map": dict(zip("abc", names + names[:1], strict=True))}).encode()
    parts = {names[0]: b"one", names[1]: b"two", "model-extra.safetensors": b"no", "model.safetensors": b"no"}
    hub.add("acme/tiny", {"config.json": b"{}", "model.safetensors.index.json": index, **parts})
    assert [path.read_bytes() for path in weight_files(locate("acme/tiny")).paths] == [b"one", b"two"]
    assert {name for name in hub.fetched() if name.endswith(".safetensors")} == set(names)


def test_a_branch_is_pinned_to_its_commit_and_needs_no_network_then(hub: hubs.Hub, tiny: Path):
    old = hub.add("acme/tiny", tiny)
    hub.add("acme/drafts", tiny, branch="v2")
    speculation = {"method": "draft_model", "model": "acme/drafts@v2"}
    config = pinned(config_of("hf://acme/tiny", speculation=speculation))
    assert (config.model.reference, config.model.served_name) == (f"acme/tiny@{old}", "acme/tiny")
    assert config.speculation.model == f"acme/drafts@{hub.models['acme/drafts'].refs['v2']}"
    bring_weights(config)
    new = hub.add("acme/tiny", {**files_of(tiny), "generation_config.json": b'{"temperature": 0.5}'})
    before = list(hub.log)
    bring_weights(config)
    assert sampling_defaults(config).temperature == 1.0
    assert pinned(config) == config
    assert hub.log == before
    assert pinned(config_of("acme/tiny")).model.revision == new
    assert pinned(config_of("acme/tiny", model={"revision": old})).model.revision == old
    assert sampling_defaults(config_of("acme/tiny", model={"revision": "main"})).temperature == 0.5


def test_a_folder_of_the_same_name_wins(hub: hubs.Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tiny.parent)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tiny.parent / "acme").mkdir(exist_ok=True)
    (tiny.parent / "acme" / "tiny").symlink_to(tiny)
    assert locate("acme/tiny").remote is None
    assert config_of("acme/tiny").model.served_name == "tiny"
    assert pinned(config_of("acme/tiny")) == config_of("acme/tiny")
    with pytest.raises(ConfigError, match=r"revision is 'v2', but model\.path 'acme/tiny' is no name of a model on"):
        _ = config_of("acme/tiny", model={"revision": "v2"}).model.reference


def test_an_offline_llm_by_name_and_dummy_weights_without_a_download(hub: hubs.Hub, tiny: Path):
    hub.add("acme/tiny", tiny)
    shape = {"device": "cpu", "max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    with closing(LLM("acme/tiny", load_format="dummy", progress=False, **shape)) as llm:
        assert llm.name == "acme/tiny"
    assert hub.fetched() == TEXT
    with (
        closing(LLM("acme/tiny", progress=False, **shape)) as named,
        closing(LLM(str(tiny), progress=False, **shape)) as local,
    ):
        params = named.params(max_tokens=4, temperature=0)
        assert named.generate("Hello", params) == local.generate("Hello", params)
        assert named.config.model.revision == hub.models["acme/tiny"].refs["main"]


def test_a_private_model_needs_a_token(hub: hubs.Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    hub.add("acme/tiny", tiny, token=hubs.TOKEN)
    with pytest.raises(ConfigError, match=r"^model\.path acme/tiny: http://\S+ has no model acme/tiny, or .*HF_TOKEN"):
        locate("acme/tiny")
    monkeypatch.setenv("HF_TOKEN", hubs.TOKEN)
    assert weight_files(locate("acme/tiny")).paths
    monkeypatch.delenv("HF_TOKEN")
    Path(constants.HF_TOKEN_PATH).write_text(hubs.TOKEN)
    hub.add("acme/other", tiny, token=hubs.TOKEN)
    assert locate("acme/other").kind == "folder"


def test_what_a_hub_refuses_is_told_with_what_helps(hub: hubs.Hub, tiny: Path):
    hub.add("acme/gated", tiny, gated=True)
    hub.add("acme/tiny", {"README.md": b"empty"})
    with pytest.raises(
        ConfigError, match=r"acme/gated: .* gated: accept its terms at http\S+/acme/gated, then set HF_T"
    ):
        locate("acme/gated")
    with pytest.raises(ConfigError, match=r"speculation\.model acme/none: .* has no model acme/none"):
        locate("acme/none", field="speculation.model")
    with pytest.raises(ConfigError, match=r"no revision 'v9'; allowed: a branch, a tag or a commit"):
        locate("acme/tiny@v9")
    with pytest.raises(ConfigError, match=r"acme/tiny: the repository has no config\.json; allowed: a model as transf"):
        locate("acme/tiny")


def test_without_weights_the_sentence_says_what_is_read(hub: hubs.Hub, tiny: Path):
    hub.add("acme/tiny", {name: data for name, data in files_of(tiny).items() if name in TEXT})
    with pytest.raises(ConfigError, match=r"^acme/tiny@\w{40}: holds no weights; allowed: model\.safetensors \(or sev"):
        weight_files(locate("acme/tiny"))


def test_offline_a_whole_copy_is_enough(hub: hubs.Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    hub.add("acme/tiny", tiny)
    source = locate("acme/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate("acme/tiny") == source
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set and \S+ has no whole copy of it"):
        weight_files(source)
    with pytest.raises(
        ConfigError, match=r"acme/other: HF_HUB_OFFLINE is set .* download the model with 'hf download'"
    ):
        locate("acme/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    weight_files(source)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert weight_files(locate("acme/tiny")).paths


def test_a_hub_out_of_reach_is_told(hub: hubs.Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    hub.add("acme/tiny", tiny)
    weight_files(locate("acme/tiny"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert weight_files(locate("acme/tiny")).paths
    with pytest.raises(
        ConfigError, match=r"acme/other: http://127\.0\.0\.1:9 cannot be reached \(ConnectError: .*folder o"
    ):
        locate("acme/other")


@pytest.mark.parametrize("name", ["acme/tiny:q4_k_m", "acme/tiny/tiny-Q4_K_M.gguf"])
def test_one_gguf_file_of_a_repository(hub: hubs.Hub, name: str, monkeypatch: pytest.MonkeyPatch):
    files = {
        "tiny-Q4_K_M.gguf": b"GGUF4",
        "tiny-Q8_0.gguf": b"GGUF8",
        "mmproj-Q4_K_M.gguf": b"no",
        "config.json": b"{}",
    }
    commit = hub.add("acme/tiny", files)
    source = locate(name)
    assert (source.kind, source.path.read_bytes(), hub.fetched()) == ("gguf", b"GGUF4", {"tiny-Q4_K_M.gguf"})
    assert weight_files(source).paths == [source.path]
    config = pinned(config_of(name))
    assert config.model.revision == commit and config.model.served_name == name
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate(config.model.reference) == locate(name) == source


def test_a_gguf_file_in_shards_is_brought_whole(hub: hubs.Hub):
    names = [f"q8/tiny-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    hub.add("acme/tiny", {**{name: name.encode() for name in names}, "tiny-Q4_0.gguf": b"no"})
    source = locate("acme/tiny:Q8_0")
    assert hub.fetched() == set(names)
    assert [path.read_bytes() for path in weight_files(source).paths] == [name.encode() for name in names]
    with pytest.raises(ConfigError, match=r"is shard 2 of 3; name the first, tiny-Q8_0-00001-of-00003\.gguf"):
        weight_files(locate(f"acme/tiny/{names[1]}"))


def test_a_gguf_file_that_is_not_one_is_told_with_the_files(hub: hubs.Hub):
    hub.add("acme/tiny", {"a-Q4_0.gguf": b"", "b-Q4_0.gguf": b"", "../../c-Q8_0.gguf": b"out"})
    with pytest.raises(
        ConfigError, match=r":Q5_0: 0 files of the repository end in Q5_0; allowed: .* a-Q4_0\.gguf, b-Q4"
    ):
        locate("acme/tiny:Q5_0")
    with pytest.raises(
        ConfigError, match=r":Q4_0: 2 files of the repository end in Q4_0; .* a-Q4_0\.gguf, b-Q4_0\.gguf$"
    ):
        locate("acme/tiny:Q4_0")
    with pytest.raises(
        ConfigError, match=r"c\.gguf: the repository has no such file; its \.gguf files: a-Q4_0\.gguf, b"
    ):
        locate("acme/tiny/c.gguf")
    with pytest.raises(ConfigError, match=r"no config\.json, but \.gguf files: name one, as acme/tiny/a-Q4_0\.gguf"):
        locate("acme/tiny")
    with pytest.raises(ConfigError, match="0 files of the repository end in Q8_0"):
        locate("acme/tiny:Q8_0")


@pytest.mark.parametrize(
    "name",
    ["../tiny", "acme/..", "acme/../tiny", "/acme/tiny", "acme\\tiny", "acme/ti ny", "acme/tiny@../x", "acme/tiny\0",
     "acme/tiny@..%2F..%2Fx", "acme/tiny/../x.gguf", "acme/tiny//x.gguf", "a" * 600 + "/tiny", "acme/tiny:../x",
     "~x/y"],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_no_names_of_the_hub(hub: hubs.Hub, name: str):
    with pytest.raises(
        ConfigError, match=r"(does not exist or is not a \.gguf file|looked at).*; allowed: a folder with config"
    ):
        locate(name)
    with pytest.raises(ConfigError, match=r"is no model of the hub; allowed: hf://owner/name"):
        locate("hf://" + name)
    assert hub.log == []


def test_files_of_a_hostile_hub_stay_in_the_cache(hub: hubs.Hub, tmp_path: Path, tiny: Path):
    hub.add("acme/tiny", {"config.json": b"{}", "additional_chat_templates/../../../../../../../evil.jinja": b"out"})
    with pytest.raises(ConfigError, match=r"acme/tiny: it cannot be downloaded into"):
        locate("acme/tiny")
    assert not list(tmp_path.rglob("evil.jinja"))


def test_a_download_that_was_killed_leaves_nothing_half(hub: hubs.Hub, tiny: Path, tmp_path: Path):
    hub.add("acme/tiny", tiny)
    hub.held = "model.safetensors"
    with bring(hub, tmp_path / "home", "acme/tiny") as process:
        assert hub.half_sent.wait(240)
        process.kill()
    kept = [path.name for path in (tmp_path / "home").rglob("snapshots/*/*")]
    assert set(kept) == TEXT
    hub.held = None
    with bring(hub, tmp_path / "home", "acme/tiny") as process:
        path, error = process.communicate(timeout=240)
        assert Path(path.strip()).read_bytes() == (tiny / "model.safetensors").read_bytes(), error


def test_two_processes_at_once_download_once(hub: hubs.Hub, tiny: Path, tmp_path: Path):
    hub.add("acme/tiny", tiny)
    hub.held = "model.safetensors"
    with bring(hub, tmp_path, "acme/tiny") as first, bring(hub, tmp_path, "acme/tiny") as second:
        assert hub.half_sent.wait(240)
        hub.go_on.set()
        paths = {process.communicate(timeout=240)[0].strip() for process in (first, second)}
    (path,) = paths
    assert Path(path).read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert sum(line.startswith("GET") and line.endswith("/model.safetensors") for line in hub.log) == 1


def test_a_full_disk_is_told_and_leaves_nothing_half(hub: hubs.Hub, tiny: Path, tmp_path: Path):
    hub.add("acme/tiny", {**files_of(tiny), "model.safetensors": bytes(4 << 20)})
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))\n"
    with bring(hub, tmp_path, "acme/tiny", before=full) as process:
        _, error = process.communicate(timeout=240)
    assert f"model.path acme/tiny@{hub.models['acme/tiny'].refs['main']}: no room is left for it in {tmp_path}" in error
    assert process.returncode == 1
    assert max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 2 << 20
