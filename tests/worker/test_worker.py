"""What a worker says of itself when it has started."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raylm import ops
from raylm.config.engine import CacheConfig, EngineConfig, RuntimeConfig
from raylm.config.resolve import ResolvedEngine, resolve
from raylm.core.sampling import SamplingParams
from raylm.core.step import CacheLayout, Copies, ModelInfo, NewBlocks, NewRow, RowSampling, StepPlan
from raylm.core.structure import StructuredOutput
from raylm.errors import ConfigError
from raylm.executor.local import LocalExecutor
from raylm.grammar.compiled import CompiledGrammars
from raylm.layers.attention_backends import RAYLM, AttentionBackend
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.cache_spec import CacheSpec
from raylm.ops import extension
from raylm.worker import building, memory, trial
from raylm.worker.building import Built, CacheSize, SamplingParts
from raylm.worker.cache_groups import CacheGroups
from raylm.worker.kv_store import KVStore
from raylm.worker.loading import Loaded, captures_graphs, choose_attention, shares_prefixes
from raylm.worker.worker import Worker
from tests.support import checkpoints

SAMPLING = RowSampling(SamplingParams(temperature=0.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.gemma3(tmp_path_factory.mktemp("gemma"))


def make_config(folder: Path, *, max_model_len: int | None = None, **cache: object) -> ResolvedEngine:
    config = EngineConfig.model_validate(
        {
            "model": {"path": str(folder), "max_model_len": max_model_len},
            "cache": {"block_size": 4, **cache},
            "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 16},
            "runtime": {"device": "cpu", "num_threads": 1},
        }
    )
    return resolve(config, "cpu")


def make_worker(folder: Path, **options: Any) -> Worker:
    return Worker(make_config(folder, **options), progress=False)


def start(folder: Path, **options: object) -> ModelInfo:
    return make_worker(folder, **options).start()


def test_groups_and_the_line_of_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="raylm"):
        info = start(folder, num_blocks=101, max_model_len=128)
    assert info.layout == CacheLayout(4, [0, 8, 8])
    # Keys and values of 2 layers, 4 tokens, 2 heads of 16 floats.
    assert info.block_bytes == 2 * 2 * 4 * 2 * 16 * 4
    assert (info.num_host_blocks, info.prefill_tokens_per_s, info.swap_bytes_per_s) == (0, 0.0, 0.0)
    # Of 128 tokens: 32 blocks in the full group, 8 in each of the others.
    assert "KV cache: 266 tokens in 100 blocks; 2.1 requests of 128 tokens at once" in caplog.messages


def test_an_extension_of_older_sources_is_told_of(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = dataclasses.replace(extension.load(), path=Path("kernels.so"), ops={"cpu": ("linear",), "cuda": ()})
    monkeypatch.setattr(extension, "load", lambda: status)
    start(folder, num_blocks=33)
    assert status.outdated("cpu") in caplog.messages


def test_windows_as_long_as_the_requests_make_one_group(folder: Path) -> None:
    info = start(folder, num_blocks=9, max_model_len=8)
    assert info.layout == CacheLayout(4, [0])
    assert info.block_bytes == 2 * 6 * 4 * 2 * 16 * 4


def test_the_longest_request_is_what_the_groups_hold(folder: Path) -> None:
    assert start(folder, num_blocks=33).max_model_len == 64
    with pytest.raises(ConfigError, match="model.max_model_len 65 does not fit in the KV cache of 64 tokens"):
        start(folder, num_blocks=33, max_model_len=65)


def test_nothing_runs_beside_a_local_worker_that_was_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiler:
        def compile(self, structure: StructuredOutput) -> str:
            return threading.current_thread().name

    monkeypatch.setattr(CompiledGrammars, "_get_compiler", lambda self: Compiler())
    executor = LocalExecutor(make_config(folder), progress=False)
    before = set(threading.enumerate())
    executor.start()
    preparation = executor.prepare(StructuredOutput("grammar", 'root ::= "a"'))
    assert preparation is not None and preparation.wait(60)
    (thread,) = (thread for thread in set(threading.enumerate()) - before if thread.name.startswith("grammar"))
    executor.shutdown()
    thread.join(60)
    assert not thread.is_alive()


def test_speeds_are_measured_where_blocks_can_be_swapped(folder: Path) -> None:
    worker = make_worker(folder, num_blocks=33, swap_gib=1e-4)
    info = worker.start()
    assert info.num_host_blocks == int(1e-4 * 2**30) // info.block_bytes
    assert info.prefill_tokens_per_s > 0 and info.swap_bytes_per_s > 0
    # The pool takes its last block, and gives it back to another.
    prompt = [5, 6, 7]
    new_blocks = [NewBlocks(0, group, 0, [group + 1]) for group in range(3)]
    expected = worker.step(StepPlan(1, [NewRow(0, prompt, 0, SAMPLING)], new_blocks, [0], [3])).token_ids
    last = info.num_host_blocks - 1
    out = Copies([(1, last), (2, 0), (3, 4)], [], [])
    back = Copies([], [], [(last, 30), (0, 31), (4, 32)])
    worker.step(StepPlan(2, [], [], [], [], out))
    new_blocks = [NewBlocks(3, group, 0, [group + 30]) for group in range(3)]
    again = StepPlan(3, [NewRow(3, prompt, 2, SAMPLING)], new_blocks, [3], [1], back)
    assert worker.step(again).token_ids == expected


def test_a_cache_too_small_for_any_request_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the KV cache has 3 blocks, and a request of 2 tokens needs 3 beside"):
        start(folder, num_blocks=3)


def test_graphs_need_a_gpu_and_a_backend_that_supports_them() -> None:
    other = dataclasses.replace(RAYLM, name="other", supports_graphs=False)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert captures_graphs(RuntimeConfig(), cuda, RAYLM)
    assert not captures_graphs(RuntimeConfig(), cuda, other)
    assert not captures_graphs(RuntimeConfig(cuda_graphs=False), cuda, RAYLM)
    assert not captures_graphs(RuntimeConfig(), cpu, RAYLM)


def test_prefixes_are_read_once_where_there_are_kernels_for_it(folder: Path) -> None:
    arch = ArchConfig.from_source(locate(str(folder)))

    def shares(
        device: str = "cuda",
        attention: AttentionBackend = RAYLM,
        dtype: torch.dtype = torch.bfloat16,
        block_size: int = 16,
        cascade: bool = True,
        **changes: object,
    ) -> bool:
        sections = {"cache": {"block_size": block_size}, "runtime": {"cascade_attention": cascade, "device": "cpu"}}
        config = resolve(EngineConfig.model_validate({"model": {"path": str(folder)}, **sections}), "cpu")
        return shares_prefixes(config, torch.device(device), attention, dataclasses.replace(arch, **changes), dtype)

    assert shares() and shares(dtype=torch.float16)
    assert not shares("cpu") and not shares(attention=dataclasses.replace(RAYLM, name="other"))
    assert not shares(alibi=True) and not shares(head_dim=ops.PREFIX_HEAD_DIM + 8) and not shares(dtype=torch.float32)
    assert not shares(block_size=24) and not shares(cascade=False)


def test_a_gpu_without_the_extension_gives_the_command_that_builds_it(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "load", lambda: extension.ExtensionStatus(None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = EngineConfig.model_validate({"model": {"path": str(folder)}, "runtime": {"device": "cuda"}})
    arch = ArchConfig.from_source(locate(str(folder)))
    attention = choose_attention(resolve(config, "cuda"), torch.device("cuda"), arch, torch.float32)
    assert attention.name == "torch"
    [line] = caplog.messages
    assert line == (
        "attention: torch, no CUDA graphs; the other kernels are slow: "
        "the compiled extension is not installed; to build it, in raylm's repository: `make ext`"
    )


def test_block_0_holds_numbers_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, torch.nan, **options))
    spec = CacheSpec.of_attention(window=0, block_size=4, num_kv_heads=1, head_dim=2, dtype=torch.float32)
    groups = CacheGroups.choose([spec, spec], block_size=4, max_len=64)
    store = KVStore(groups, num_blocks=3, num_host_blocks=0, device=torch.device("cpu"))
    caches = [cache for pair in store.layers for cache in pair]
    assert len(caches) == 4
    for cache in caches:
        assert (cache[0] == 0).all() and cache[1:].isnan().all()


@pytest.mark.parametrize(("tokens", "rows", "last"), [(8192, 1024, 1), (14, 4, 1), (33, 2, 5), (41, 1, 11), (2, 3, 1)])
def test_a_trials_cache_is_small(tokens: int, rows: int, last: int) -> None:
    size = 4 if tokens < 100 else 16
    plan = trial.trial_plan(tokens, rows, CacheLayout(size, [0, 8]))
    assert plan.total_tokens == tokens and len(plan.new_blocks) == 2 * min(tokens, rows)
    assert trial.last_block(plan) == last
    assert [len(new.block_ids) for new in plan.new_blocks[::2]] == [-(-count // size) for count in plan.num_tokens]


@pytest.mark.parametrize(("blocks", "longest"), [(20, 76), (1000, 512), (0, 4)])
def test_a_trials_tables_are_as_long_as_a_cache_could_hold(
    blocks: int, longest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU with room for so many blocks, or fewer beside the table, would try."""
    folder = checkpoints.llama(tmp_path)
    block_bytes = start(folder, num_blocks=40).block_bytes
    lengths: list[int] = []
    build = building.build

    def built(config: ResolvedEngine, loaded: Loaded, parts: SamplingParts, size: CacheSize) -> Built:
        lengths.append(size.max_model_len)
        return build(config, loaded, parts, size)

    def profiled(device: torch.device, *, step: Callable[[], object], **_: object) -> memory.Profile:
        step()
        return memory.Profile(0, 0, 0)

    def found(config: CacheConfig, *, profile: Callable[[], memory.Profile], **_: object) -> int:
        assert profile() == (0, 0, 0)
        return 40

    total = int((blocks + 0.5) * block_bytes / CacheConfig().gpu_memory_utilization)
    monkeypatch.setattr(building, "build", built)
    monkeypatch.setattr(memory, "profile_steps", profiled)
    monkeypatch.setattr(memory, "num_blocks", found)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    start(folder)
    assert lengths[0] == longest
