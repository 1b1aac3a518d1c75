"""Checkpoints that somebody made to break their reader: each is loaded, or refused with a ConfigError."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from raylm.errors import ConfigError
from raylm.model_files.gguf_header import read_gguf
from raylm.model_files.source import ModelSource, locate
from raylm.model_files.weight_files import weight_files
from raylm.models.arch import ArchConfig
from raylm.text.gguf_tokenizer import convert_gguf
from raylm.text.tokenizer import Tokenizer
from tests.models.paged import load
from tests.support import checkpoints

FILE = "model.safetensors"
INDEX = f"{FILE}.index.json"
NUMBERS = (0, -1, 1, 3, 1.5, 2**31, 2**40, 2**63, 10**30, 10**400, float("inf"), float("nan"), "64", None, True, [], {})


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 512}
LONGROPE = {"rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints.llama(tmp_path)
    checkpoints.write_tokenizer(tmp_path)
    return tmp_path


def refused(read: Callable[[], object]) -> bool:
    """Whether it is refused with a sentence; any other error is the test's failure."""
    try:
        read()
    except ConfigError as error:
        assert str(error), "a refusal says why"
        return True
    return False


def test_absurd_numbers_of_config_json(folder: Path):
    path = folder / "config.json"
    given = json.loads(path.read_text())
    num_refused = 0
    for name, known in given.items():
        if isinstance(known, str):
            continue
        for value in NUMBERS:
            path.write_text(json.dumps(given | {name: value}))
            num_refused += refused(lambda: load(folder))
    assert num_refused > 100
    path.write_text(json.dumps(given))
    assert not refused(lambda: load(folder))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000; allowed: a positive integer of at most 4096"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776; allowed: a positive integer of at most 2147483647"),
        ({"hidden_size": 2**30, "head_dim": 2**28}, "too large for this machine's memory"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; allowed: a positive number"),
        ({"rope_parameters": {**YARN, "rope_theta": 1}}, r"rope_theta is 1\.0; allowed: more than 1, with YaRN"),
        ({"rope_parameters": {**YARN, "factor": 1e29}}, r"factor is 1e\+29; allowed: at most 16777216 / .*, 512"),
        (
            {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 1}},
            "original_max_position_embeddings is 1; allowed: at least 2",
        ),
        ({"eos_token_id": 10**30}, "eos_token_id is 10{30}; allowed: a token id or a list of them"),
    ],
)
def test_absurd_numbers_are_told_with_their_limit(folder: Path, changes: dict[str, object], sentence: str):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=sentence):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[" * 100_000, b"[]", b"null", b'{"a": 1' * 9, b"{}" + b" " * (17 << 20)]
)
def test_json_that_is_none(folder: Path, name: str, content: bytes):
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load(folder)


@pytest.mark.parametrize(
    "weights",
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        ".",
        "",
        5,
        None,
        ["x"],
        "x\0",
        "a" * 300,
        "-x",
        INDEX,
    ],
)
def test_indices_that_lead_elsewhere_or_to_themselves(folder: Path, weights: object):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": FILE, "b": weights}}))
    with pytest.raises(ConfigError, match=r"index\.json: (names|not an index|not a safetensors file)"):
        load(folder)


def test_links_that_lead_nowhere_or_round(folder: Path):
    (folder / FILE).unlink()
    for target in (FILE, "nowhere"):
        (folder / FILE).symlink_to(target)
        with pytest.raises(ConfigError, match="holds no weights"):
            load(folder)
        (folder / FILE).unlink()
    os.mkfifo(folder / FILE)
    with pytest.raises(ConfigError, match="holds no weights"):
        load(folder)
    (folder / FILE).unlink()
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    with pytest.raises(ConfigError, match=r"(cannot be looked at|has no config\.json)"):
        locate(str(folder))


def test_mutations_of_safetensors(folder: Path):
    path = folder / FILE
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    dice = random.Random(7)
    num_refused = 0
    for _ in range(300):
        broken = bytearray(whole)
        for _ in range(dice.randint(1, 3)):
            broken[dice.randrange(header)] = dice.choice(b'\x00\xff"{}[],:0123456789-eE')
        path.write_bytes(broken if dice.random() < 0.9 else broken[: dice.randrange(len(broken))])
        num_refused += refused(lambda: load(folder))
    assert num_refused > 200


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (
            {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]},
            r"tensor x of shape .* cannot have 8 bytes",
        ),
        ({"dtype": "F32", "shape": [2], "data_offsets": [2**62, 2**62 + 8]}, "tensor x ends at byte .* the file has"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "tensor x of shape .* cannot have -8 bytes"),
        (
            {"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]},
            "x has 100 dimensions; allowed: at most 8",
        ),
    ],
)
def test_entries_of_safetensors_that_cannot_be(folder: Path, entry: dict[str, object], sentence: str):
    header = json.dumps({"x": entry}).encode()
    (folder / FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ConfigError, match=sentence):
        load(folder)


def test_a_deeply_nested_header_of_safetensors(folder: Path):
    header = b"[" * 100_000
    (folder / FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        load(folder)


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.llama(tmp_path_factory.mktemp("gguf"))
    checkpoints.write_tokenizer(folder)
    return checkpoints.write_gguf(folder, folder / "whole.gguf")


def test_a_thousand_mutations_of_a_gguf_file(whole_gguf: Path, tmp_path: Path):
    whole = whole_gguf.read_bytes()
    header = min(tensor.offset for tensor in read_gguf(whole_gguf).tensors)
    path, dice = tmp_path / "broken.gguf", random.Random(11)
    path.write_bytes(whole)
    counts = {"refused": 0, "read": 0}
    for index in range(1000):
        size = dice.choice((1, 1, 4, 8))
        # Half of them near the beginning, where counts and the metadata's keys are; the vocabulary fills the rest.
        at = dice.randrange(4, 700 if index % 2 else header - size)
        kind = dice.randrange(4)
        new = (b"\xff" * size, bytes(size), dice.randbytes(size), dice.randrange(2**16).to_bytes(8, "little")[:size])[
            kind
        ]
        with path.open("r+b") as file:
            file.seek(at)
            file.write(new)
        for read in (lambda: ArchConfig.from_source(ModelSource(path, "gguf")), lambda: convert_gguf(path)):
            counts["refused" if refused(read) else "read"] += 1
        if index % 10 == 0:
            refused(lambda: load(path))
        with path.open("r+b") as file:
            file.seek(at)
            file.write(whole[at : at + size])
    assert min(counts.values()) > 100, counts
    assert not refused(lambda: load(path))


def test_gguf_files_that_are_cut(whole_gguf: Path, tmp_path: Path):
    whole = whole_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 8, 20, 24, 100, 3000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf: "):
            load(path)


def _model(given: dict[str, object], **changes: object) -> dict[str, object]:
    return {**given, "model": {**given["model"], **changes}}


_FAR = {"id": 2**31, "content": "<far>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False}  # fmt: skip
_OPEN = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
_FRAME = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [],
          "special_tokens": {}}  # fmt: skip
BAD_TOKENIZERS: dict[str, Callable[[dict[str, object]], object]] = {
    "no object": lambda given: [],
    "no model": lambda given: {**given, "model": None},
    "another model": lambda given: {**given, "model": {"type": "Nonsense"}},
    "vocabulary of lists": lambda given: _model(given, vocab=[[]]),
    "token ids of four billion": lambda given: _model(given, vocab={**given["model"]["vocab"], "far": 2**32 - 1}),
    "negative ids": lambda given: _model(given, vocab={"a": -1}),
    "merges of nothing": lambda given: _model(given, merges=[["no", "pe"]]),
    "an added token of another id": lambda given: {**given, "added_tokens": [_FAR]},
    "a pattern that is none": lambda given: {**given, "pre_tokenizer": _OPEN},
    "a frame of tokens that are not there": lambda given: {**given, "post_processor": _FRAME},
}


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
def test_hostile_tokenizers(folder: Path, name: str):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(BAD_TOKENIZERS[name](json.loads(path.read_text()))))

    def read() -> None:
        tokenizer = Tokenizer.load(ModelSource(folder, "folder"))
        assert tokenizer.decode(tokenizer.encode("Hello")) is not None

    # Ids beyond the model's rows are refused in the requests that have them, and other merges make other tokens.
    harmless = ("merges of nothing", "an added token of another id", "token ids of four billion")
    assert refused(read) or name in harmless, "read as if nothing were wrong"


def test_mutations_of_tokenizer_json(folder: Path):
    path = folder / "tokenizer.json"
    whole, dice = path.read_bytes(), random.Random(3)
    num_refused = 0
    for _ in range(200):
        broken = bytearray(whole)
        broken[dice.randrange(len(broken))] = dice.choice(b'\x00\xff"{}[],:0123456789-\\u')
        path.write_bytes(broken)
        num_refused += refused(lambda: Tokenizer.load(ModelSource(folder, "folder")).encode("Hello <|end|>"))
    assert num_refused > 50


def test_a_checkpoint_cannot_name_more_files_than_there_can_be(folder: Path):
    (folder / INDEX).write_text(json.dumps({"weight_map": {str(number): f"{number}.x" for number in range(10_001)}}))
    with pytest.raises(ConfigError, match=r"names 10001 files; allowed: 1 to 10000"):
        weight_files(locate(str(folder)))
