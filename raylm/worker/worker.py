"""One device: loads the model, sizes the KV cache, runs steps."""

from __future__ import annotations

import os
import time

import torch

from raylm.config.engine import EngineConfig
from raylm.config.source import locate
from raylm.core.step import ModelInfo, NewRow, RowSampling, StepPlan, StepResult
from raylm.errors import ConfigError
from raylm.log import get_logger
from raylm.models.arch import ArchConfig
from raylm.models.decoder import DecoderModel
from raylm.models.load import load_model
from raylm.parallel.context import ParallelContext
from raylm.worker import memory
from raylm.worker.model_runner import ModelRunner
from raylm.worker.request_table import RequestTable

logger = get_logger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Worker:
    """Owns one device from start to end; every step goes through the one ModelRunner."""

    def __init__(self, config: EngineConfig, *, progress: bool = True) -> None:
        self._config = config
        self._progress = progress
        self._device = choose_device(config.runtime.device)
        self._runner: ModelRunner | None = None

    def start(self) -> ModelInfo:
        """Load the model and make it ready for its first step. Raises ConfigError."""
        if self._device.type == "cpu":
            torch.set_num_threads(self._config.runtime.num_threads or len(os.sched_getaffinity(0)))
        phases = {}
        began = time.perf_counter()
        source = locate(self._config.model.path)
        arch = ArchConfig.from_source(source)
        dtype = choose_dtype(self._config.model.dtype, arch.dtype, self._device)
        model = load_model(
            source,
            arch,
            ParallelContext.single(self._device),
            dtype,
            self._config.model.load_format,
            seed=self._config.model.seed,
            progress=self._progress,
        )
        phases["weights"] = time.perf_counter() - began
        began = time.perf_counter()
        num_blocks, max_model_len = self._size_cache(model, arch, dtype)
        self._runner = self._make_runner(model, arch, dtype, num_blocks=num_blocks, max_model_len=max_model_len)
        phases["memory"] = time.perf_counter() - began
        began = time.perf_counter()
        self._runner.execute(_largest_plan(1, 1, self._config.cache.block_size))
        phases["warm_up"] = time.perf_counter() - began
        return ModelInfo(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=arch.vocab_size,
            eos_token_ids=list(arch.eos_token_ids),
            device=str(self._device),
            dtype=str(dtype).removeprefix("torch."),
            phases=phases,
        )

    def step(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        if self._runner is None:
            raise RuntimeError("step() before start()")
        return self._runner.execute(plan)

    def _size_cache(self, model: DecoderModel, arch: ArchConfig, dtype: torch.dtype) -> tuple[int, int]:
        """Blocks of the cache and the longest request that they hold."""
        block_size = self._config.cache.block_size
        wanted = self._config.model.max_model_len
        if wanted is not None and wanted > arch.max_position:
            raise ConfigError(f"model.max_model_len {wanted} is over the model's own limit of {arch.max_position}")
        count = memory.num_blocks(
            self._config.cache,
            bytes_per_block=memory.block_bytes(arch, block_size=block_size, dtype=dtype),
            device=self._device,
            profile=lambda: self._profile(model, arch, dtype, wanted or arch.max_position),
        )
        capacity = (count - 1) * block_size
        if wanted is not None and wanted > capacity:
            raise ConfigError(
                f"model.max_model_len {wanted} does not fit in the KV cache of {capacity} tokens: "
                "lower it or give the cache more memory (cache.cpu_memory_gib, cache.gpu_memory_utilization)"
            )
        max_model_len = wanted or min(arch.max_position, capacity)
        if max_model_len < arch.max_position and wanted is None:
            logger.warning(
                "max_model_len is %d, not the model's %d: the KV cache holds no more", max_model_len, arch.max_position
            )
        return count, max_model_len

    def _profile(self, model: DecoderModel, arch: ArchConfig, dtype: torch.dtype, max_model_len: int) -> None:
        """Run the largest step there can be, with a cache just large enough for it."""
        budget, rows = self._config.scheduler.max_num_batched_tokens, self._config.scheduler.max_num_seqs
        plan = _largest_plan(min(budget, rows * max_model_len), rows, self._config.cache.block_size)
        blocks = 1 + sum(len(added) for added in plan.new_blocks)
        self._make_runner(model, arch, dtype, num_blocks=blocks, max_model_len=max_model_len).execute(plan)

    def _make_runner(
        self, model: DecoderModel, arch: ArchConfig, dtype: torch.dtype, *, num_blocks: int, max_model_len: int
    ) -> ModelRunner:
        block_size = self._config.cache.block_size
        table = RequestTable(
            max_rows=self._config.scheduler.max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            device=self._device,
        )
        caches = memory.make_caches(
            arch, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=self._device
        )
        return ModelRunner(model, table, caches)


def choose_device(wanted: str) -> torch.device:
    """The device to run on: auto takes a GPU where there is one. Raises ConfigError."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("runtime.device 'cuda' was asked for, but torch sees no CUDA device here; allowed: auto, cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def choose_dtype(wanted: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The type of weights and activations: auto is float32 on a CPU; on a GPU the checkpoint's, at 16 bits."""
    if wanted != "auto":
        return _DTYPES[wanted]
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if checkpoint == "float16" else torch.bfloat16


def _largest_plan(num_tokens: int, num_rows: int, block_size: int) -> StepPlan:
    """A fabricated step that spreads `num_tokens` over at most `num_rows` new requests, all of which sample."""
    num_rows = min(num_rows, num_tokens)
    lens = [num_tokens // num_rows + (i < num_tokens % num_rows) for i in range(num_rows)]
    sampling = RowSampling(temperature=1.0, top_p=0.9, top_k=0, min_p=0.0, seed=0)
    rows = list(range(num_rows))
    new_blocks, next_block = [], 1
    for length in lens:
        count = -(-length // block_size)
        new_blocks.append(list(range(next_block, next_block + count)))
        next_block += count
    new_rows = [NewRow(row, [0] * length, 0, sampling) for row, length in zip(rows, lens, strict=True)]
    return StepPlan(0, new_rows, rows, lens, new_blocks)
