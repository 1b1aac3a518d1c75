"""The loader: every tensor once, converted and sharded; damage and misfits are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.slots import Slot
from raylm.model_files.source import locate
from raylm.models import filling
from raylm.models.arch import ArchConfig
from raylm.models.load import load_model
from raylm.models.safetensors import file_tensors
from raylm.models.staging import Staging
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext, Sent
from tests.models.paged import CPU, PagedRun, generate, load
from tests.support import checkpoints
from tests.support.peer_sums import share
from tests.support.threaded_ranks import ThreadedRanks

FILE = "model.safetensors"
PROMPTS = {"a": list(range(3, 20)), "b": [7, 8, 9]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.llama(tmp_path)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Write the checkpoint again with some tensors added, replaced or (None) left out."""
    found = {**load_file(folder / FILE), **tensors}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, folder / FILE)


def test_missing_shard_is_named(folder: Path) -> None:
    change(folder, **{"model.layers.1.self_attn.k_proj.weight": None, "model.norm.weight": None})
    message = r"2 missing: layers.1.self_attn.qkv_proj.weight \(shard k\), norm.weight"
    with pytest.raises(ConfigError, match=f"do not fit LlamaForCausalLM: {message}$"):
        load(folder)


def test_tensors_without_a_place_are_named(folder: Path) -> None:
    change(folder, **{"model.layers.9.mlp.up_proj.weight": torch.ones(1), "extra.weight": torch.ones(1)})
    with pytest.raises(ConfigError, match="2 without a place in this model: extra.weight, model.layers.9.mlp.up_proj"):
        load(folder)


def test_part_of_a_name_is_no_match(folder: Path) -> None:
    change(folder, **{"model.layers.0.self_attn.q_proj2.weight": torch.ones(1)})
    with pytest.raises(ConfigError, match="1 without a place in this model: model.layers.0.self_attn.q_proj2.weight"):
        load(folder)


def test_tensors_there_twice_are_named(folder: Path) -> None:
    change(folder, **{"layers.0.mlp.up_proj.weight": torch.ones(96, 64)})
    with pytest.raises(ConfigError, match="2 there twice: layers.0.mlp.up_proj.weight, model.layers.0.mlp.up_proj"):
        load(folder)


def test_another_shape_is_named(folder: Path) -> None:
    change(folder, **{"model.norm.weight": torch.ones(32)})
    with pytest.raises(ConfigError, match=r"1 of another shape: model.norm.weight \(32,\), not \(64,\)"):
        load(folder)


def test_long_lists_are_cut(folder: Path) -> None:
    change(folder, **{f"extra.{i}": torch.ones(1) for i in range(11)})
    with pytest.raises(ConfigError, match="11 without a place .* and 3 more"):
        load(folder)


def test_old_rotary_buffers_are_ignored(folder: Path) -> None:
    change(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert load(folder).norm.weight.shape == (64,)


def test_a_tied_head_may_be_there(tmp_path: Path) -> None:
    folder = checkpoints.qwen2(tmp_path)
    change(folder, **{"lm_head.weight": torch.zeros(checkpoints.VOCAB_SIZE, 64)})
    model = load(folder)
    assert model.logits(torch.ones(1, 64)).abs().sum() > 0


def test_several_files_with_an_index(folder: Path) -> None:
    expected = load(folder).state_dict()
    tensors = load_file(folder / FILE)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / FILE).unlink()
    with pytest.raises(ConfigError, match="holds 2 safetensors files without an index"):
        load(folder)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / f"{FILE}.index.json").write_text(json.dumps(index))
    found = load(folder).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    (folder / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match="names files that are missing: b.safetensors"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_are_converted(dtype: torch.dtype, folder: Path) -> None:
    expected = load(folder).norm.weight
    source = locate(str(folder))
    arch, context = ArchConfig.from_source(source), ParallelContext.single(CPU)
    model = load_model(source, arch, context, dtype, "safetensors", progress=False)
    assert model.norm.weight.dtype == dtype
    assert torch.equal(model.norm.weight, expected.to(dtype))
    save_file({name: tensor.to(dtype) for name, tensor in load_file(folder / FILE).items()}, folder / FILE)
    assert torch.equal(load(folder).norm.weight, expected.to(dtype).float())


def test_integer_weights_are_refused(folder: Path) -> None:
    change(folder, **{"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(ConfigError, match="tensor model.norm.weight has type I8; allowed: F32, F16, BF16"):
        load(folder)


def test_damaged_files(folder: Path) -> None:
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match="tensor .* ends at byte .* it is cut short"):
        load(folder)
    for entry in ({"dtype": "F32", "shape": [1]}, {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, []):
        header = json.dumps({"x": entry}).encode()
        (folder / FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        with pytest.raises(ConfigError, match="the header's entry for tensor x is damaged"):
            load(folder)
    (folder / FILE).write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        load(folder)
    (folder / FILE).unlink()
    with pytest.raises(ConfigError, match=r"holds no weights; allowed: model\.safetensors \(or several files"):
        load(folder)


def test_dummy_needs_only_the_configuration(folder: Path) -> None:
    (folder / FILE).unlink()
    first, second = load(folder, "dummy"), load(folder, "dummy")
    for (name, parameter), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(parameter, other)
        assert (parameter.std() > 0.01) == (not name.endswith("norm.weight"))
    source = locate(str(folder))
    arch, context = ArchConfig.from_source(source), ParallelContext.single(CPU)
    other = load_model(source, arch, context, torch.float32, "dummy", seed=1)
    assert not torch.equal(other.embed_tokens.weight.plain, first.embed_tokens.weight.plain)
    assert not any(parameter.requires_grad for parameter in other.parameters())


def test_format_must_be_the_sources(folder: Path) -> None:
    with pytest.raises(ConfigError, match="load_format is 'gguf', but .* allows: auto, dummy, safetensors"):
        load(folder, "gguf")


def test_progress_bar_can_be_switched_off(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = locate(str(folder))
    arch, context = ArchConfig.from_source(source), ParallelContext.single(CPU)
    capsys.readouterr()
    load_model(source, arch, context, torch.float32, "auto", progress=False)
    assert capsys.readouterr().err == ""
    load_model(source, arch, context, torch.float32, "auto", progress=True)
    assert "weights" in capsys.readouterr().err


class NormReducer:
    """Sums in the norm, as GPUs that read each other's memory do for few rows."""

    cells: ops.PeerCells | None = None

    def __init__(self, ranks: ThreadedRanks, rank: int) -> None:
        self._ranks = ranks
        self._context = ParallelContext(rank, rank, 2, 0, 1, CPU)
        self.num_norms = 0

    def takes(self, x: torch.Tensor) -> bool:
        return True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ranks.all_reduce(x, self._context)

    def takes_gather(self, x: torch.Tensor) -> bool:
        return False

    def sends(self, rows: int, row_bytes: int) -> bool:
        return False

    def send(self, product: Callable[[slice], torch.Tensor], rows: int) -> Sent:
        raise AssertionError("it sends nothing")

    def takes_norm(self, x: torch.Tensor, residual: torch.Tensor) -> bool:
        return len(x) <= 2

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.num_norms += 1
        return ops.add_rms_norm(self(x), residual, weight, eps)


class SplitReducer(NormReducer):
    """Norms of many rows are split: each rank norms its own and gives them to the others. Of the residual it keeps
    nothing but these."""

    def takes_norm(self, x: torch.Tensor, residual: torch.Tensor) -> bool:
        return len(x) >= 3

    def add_rms_norm(
        self, x: torch.Tensor | Sent, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        self.num_norms += 1
        own = share(len(residual), self._context.tensor_rank, self._context.tensor_size)
        out = torch.zeros_like(residual)
        summed = x.own if isinstance(x, Sent) else self(x)[own]
        out[own] = ops.add_rms_norm(summed, residual[own], weight, eps)
        residual[: own.start] = residual[own.stop :] = float("nan")
        return self._ranks.all_reduce(out, self._context)


class SendingReducer(SplitReducer):
    """It takes products one share of the rows at a time, the other rank's first."""

    num_sent = 0

    def sends(self, rows: int, row_bytes: int) -> bool:
        return rows >= 3

    def send(self, product: Callable[[slice], torch.Tensor], rows: int) -> Sent:
        self.num_sent += 1
        rank = self._context.tensor_rank
        parts = {r: product(share(rows, r, 2)) for r in (1 - rank, rank)}
        return Sent(self(torch.cat([parts[0], parts[1]]))[share(rows, rank, 2)], self.num_sent, ())


@pytest.mark.parametrize("reducer_class", [None, NormReducer, SplitReducer, SendingReducer])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "bloom", "gguf"])
def test_two_ranks_compute_what_one_does(
    family: str, reducer_class: type[NormReducer] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"num_key_value_heads": 1} if family == "gemma3" else {"attention_bias": True, "vocab_size": 321}
    if family == "qwen2":
        changes = {"tie_word_embeddings": False, "vocab_size": 321}
    if family == "bloom":
        changes = {"vocab_size": 321}
    path = checkpoints.FAMILIES.get(family, checkpoints.llama)(tmp_path / "hf", **changes)
    if family == "gguf":
        path = checkpoints.write_gguf(path, tmp_path / "model.gguf")
    texts, logits = generate(PagedRun(load(path)), PROMPTS, num_tokens=4)
    ranks = ThreadedRanks(2)
    monkeypatch.setattr(collectives, "all_reduce", ranks.all_reduce)
    monkeypatch.setattr(collectives, "all_gather", ranks.all_gather)

    def run(rank: int) -> tuple[dict, dict]:
        reducer = None if reducer_class is None else reducer_class(ranks, rank)
        context = ParallelContext(rank, rank, 2, 0, 1, CPU, reducer=reducer)
        found = generate(PagedRun(load(path, context=context)), PROMPTS, num_tokens=4)
        assert reducer is None or (reducer.num_norms > 0) == (family not in ("gemma3", "bloom"))
        assert not isinstance(reducer, SendingReducer) or reducer.num_sent == reducer.num_norms
        return found

    with ThreadPoolExecutor(2) as pool:
        for found_texts, found_logits in pool.map(run, range(2)):
            assert found_texts == texts
            for name, expected in logits.items():
                torch.testing.assert_close(found_logits[name], expected, atol=1e-4, rtol=1e-4)


def test_loading_needs_little_more_than_the_weights(tmp_path: Path) -> None:
    """The process' own peak, in a process of its own: file pages that the kernel caches are not the loader's."""
    fields = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 40000}
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "head_dim": 64, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path, "dummy")
    num_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert num_bytes > 150e6
    save_hf(model, tmp_path / FILE)
    code = """
import resource, sys
from tests.models.paged import load
from raylm.models import gguf, safetensors, weights
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load(sys.argv[1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, env=env
    )
    assert int(done.stdout) < 1.3 * num_bytes


def save_hf(model: torch.nn.Module, path: Path) -> None:
    """A model of this package as a checkpoint of transformers."""
    fused = {"qkv_proj": "self_attn.{}_proj", "gate_up_proj": "mlp.{}_proj"}
    tensors = {}
    for (name, shard), slot in model.slots().items():
        for part, pattern in fused.items():
            block = "self_attn" if part == "qkv_proj" else "mlp"
            name = name.replace(f"{block}.{part}", pattern.format(shard))
        tensors[name if name.startswith("lm_head") else f"model.{name}"] = slot.destination
    save_file(tensors, path)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parts_of_a_tensor_are_its_own_rows_or_columns(
    folder: Path, num_threads: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of few values, and of more than a half of the pinned memory holds."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    whole = load_file(folder / FILE)
    tensors = {tensor.name: tensor for tensor in file_tensors(folder / FILE)}
    name = "model.layers.0.mlp.down_proj.weight"
    rows, columns = whole[name].shape
    expected = whole[name].to(device, dtype)
    monkeypatch.setattr(Staging, "num_bytes", columns * whole[name].itemsize * 3)
    for values in (100, 1 << 24):
        monkeypatch.setattr(filling, "_PART_VALUES", values)
        by_row = Slot(torch.zeros(rows - 9, columns, dtype=dtype, device=device), (rows, columns), start=5)
        by_column = Slot(torch.zeros(rows, 7, dtype=dtype, device=device), (rows, columns), dim=1, start=3)
        with_offset = Slot(torch.zeros_like(expected), (rows, columns), offset=1.0)
        before = torch.get_num_threads()
        jobs = [(tensors[name], slot) for slot in (by_row, by_column, with_offset)]
        filling.fill(jobs, progress=False, num_threads=num_threads)
        assert torch.get_num_threads() == before
        assert torch.equal(by_row.destination, expected[5 : rows - 4])
        assert torch.equal(by_column.destination, expected[:, 3:10])
        assert torch.equal(with_offset.destination, (whole[name].to(device).float() + 1).to(dtype))


def test_pieces_are_as_large_as_the_memory_they_are_read_into(folder: Path) -> None:
    (tensor,) = [each for each in file_tensors(folder / FILE) if each.name == "model.layers.0.mlp.down_proj.weight"]
    rows, columns = tensor.shape
    row_bytes = tensor.num_bytes // rows

    class Memory:
        def __init__(self, num_bytes: int) -> None:
            self.num_bytes = num_bytes
            self.bytes = np.empty(num_bytes, dtype=np.uint8)

        def take(self, num_bytes: int) -> np.ndarray:
            return self.bytes[:num_bytes]

    expected = load_file(folder / FILE)[tensor.name]
    memory = Memory(2 * row_bytes)
    for row, piece in tensor.pieces(0, rows, room=memory):
        assert len(piece) == min(2, rows - row) and piece.data_ptr() == memory.bytes.ctypes.data
        assert torch.equal(piece, expected[row : row + 2])
    for room in (Memory(row_bytes - 1), Memory(rows * row_bytes)):
        ((_, piece),) = tensor.pieces(0, rows, (1, columns), room)
        assert torch.equal(piece, expected[:, 1:])
    widened = tensor.rearranged(lambda piece: piece + 1)
    assert torch.equal(torch.cat([piece for _, piece in widened.pieces(0, rows, room=memory)]), expected + 1)


def test_a_rank_reads_its_own_rows_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of matrices that are split by rows half the bytes, of those split by columns half of each row."""
    read: list[int] = []
    given = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(sum(len(buffer) for buffer in buffers))
        return given(descriptor, buffers, offset)

    (tensor,) = [each for each in file_tensors(folder / FILE) if each.name == "model.layers.0.mlp.down_proj.weight"]
    rows, columns = tensor.shape
    monkeypatch.setattr(os, "preadv", counting)
    halves = [
        Slot(torch.zeros(rows // 2, columns), tensor.shape, start=rows // 2),
        Slot(torch.zeros(rows, columns // 2), tensor.shape, dim=1),
    ]
    for half in halves:
        read.clear()
        filling.fill([(tensor, half)], progress=False, num_threads=1)
        assert sum(read) == tensor.num_bytes // 2
