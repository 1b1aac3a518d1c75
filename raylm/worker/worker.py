"""One device: loads the model, or its part of it, sizes the KV cache, runs steps."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch

from raylm.config.engine import RuntimeConfig
from raylm.config.resolve import ResolvedEngine
from raylm.config.source import ModelSource, locate
from raylm.core.step import ModelInfo, Sampled, StepPlan
from raylm.core.structure import StructuredOutput
from raylm.errors import ConfigError, TransferError
from raylm.grammar.binding import Compiled
from raylm.grammar.compiled import CompiledGrammars
from raylm.grammar.matchers import GrammarMatchers
from raylm.layers.attention_backends import AttentionBackend, Setting, choose_backend, raylm_lacks
from raylm.layers.linear import kv_heads_of_rank
from raylm.log import get_logger
from raylm.models.arch import ArchConfig
from raylm.models.check import target_arch
from raylm.models.decoder import DecoderModel
from raylm.models.from_peer import Peer, WeightSender, receive_weights
from raylm.models.load import checkpoint_digest, load_model
from raylm.models.registry import model_class
from raylm.ops import extension
from raylm.parallel.collectives import agree_on_min
from raylm.parallel.context import ParallelContext
from raylm.parallel.groups import Seat, connect
from raylm.parallel.peer_reduce import SplitLimits
from raylm.worker import memory, trial
from raylm.worker.agreement import Agreement
from raylm.worker.cache_groups import CacheGroups
from raylm.worker.draft_runner import DraftRunner
from raylm.worker.drafting import Drafting, DraftSettings, cache_group, load_drafting
from raylm.worker.graph_runner import MOST_VERIFYING_GRAPHS, CudaCapture, graph_sizes, largest_graph
from raylm.worker.kv_store import KVStore
from raylm.worker.model_runner import ModelRunner
from raylm.worker.pending import PendingStep
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling.processors import load_processors

logger = get_logger(__name__)

_MASK_THREADS = 8
"""Threads that fill masks of grammars, at most. On a CPU the model has the cores."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Described(NamedTuple):
    """What is known of the model before it is loaded."""

    source: ModelSource
    arch: ArchConfig
    dtype: torch.dtype


class _Loaded(NamedTuple):
    model: DecoderModel
    arch: ArchConfig
    dtype: torch.dtype
    captures: bool
    """Whether steps run as CUDA graphs."""
    drafting: Drafting | None


class _CacheSize(NamedTuple):
    groups: CacheGroups
    num_blocks: int
    num_host_blocks: int
    max_model_len: int


class Worker:
    """Owns one device from start to end; every step goes through the one ModelRunner."""

    def __init__(
        self,
        config: ResolvedEngine,
        *,
        seat: Seat | None = None,
        peer: Peer | None = None,
        progress: bool = True,
    ) -> None:
        """`seat`: this worker's place among those that share the model; None for the only one. `peer`: the worker of
        the same place in a live engine, for load.from_peer. Raises ConfigError."""
        self._config = config
        self._seat = seat
        self._peer = peer
        self._progress = progress
        self._device = choose_device(config.runtime.device)
        if seat is not None and self._device.type == "cuda":
            self._device = torch.device("cuda", seat.gpu)
        self._processors = load_processors(config.generation.logits_processors)
        self._grammars: CompiledGrammars | None = None
        self._runner: ModelRunner | None = None
        self.weights: WeightSender | None = None
        """What a new replica's worker of this place gets its weights from; with load.from_peer, once they are here."""

    @property
    def overlaps(self) -> bool:
        """Whether a step that was submitted runs while the host does something else."""
        return self._device.type == "cuda"

    def start(self) -> ModelInfo:
        """Load the model and make it ready for its first step. Raises ConfigError."""
        phases = Phases()
        with phases.timed("device"):
            self._prepare_device()
        if self._device.type != "cpu":
            return self._make_ready(phases)
        # OpenMP keeps threads for every thread that computes. With more of them than cores they sleep between two loops
        # instead of waiting awake, which costs a tenth of all tokens, and steps may run in another thread than this. A
        # thread that ends gives its own back.
        with ThreadPoolExecutor(1, "raylm-start") as thread:
            return thread.submit(self._make_ready, phases).result()

    def _make_ready(self, phases: Phases) -> ModelInfo:
        with phases.timed("device"):
            described = self._describe()
            context = self._join(described)
        with phases.timed("weights"):
            loaded = self._load(described, context)
        with phases.timed("memory"):
            cache = self._size_cache(loaded)
            with memory.out_of_memory(
                self._device, f"a KV cache of {cache.num_blocks} blocks (cache.num_blocks) did not fit"
            ):
                store, runner = self._make_runner(loaded, cache)
        with phases.timed("warm_up"):
            runner.execute(trial.trial_plan(1, 1, cache.groups.layout))
            prefill_speed, swap_speed = self._measure(runner, store, cache)
        with phases.timed("graphs"):
            runner.warm_up_graphs()
        self._runner = runner
        return ModelInfo(
            num_blocks=cache.num_blocks,
            num_host_blocks=cache.num_host_blocks,
            layout=cache.groups.layout,
            block_bytes=store.block_bytes,
            prefill_tokens_per_s=prefill_speed,
            swap_bytes_per_s=swap_speed,
            max_model_len=cache.max_model_len,
            vocab_size=loaded.arch.vocab_size,
            eos_token_ids=list(loaded.arch.eos_token_ids),
            device=str(self._device),
            dtype=_name(loaded.dtype),
            phases=phases.seconds,
        )

    def prepare(self, structure: StructuredOutput) -> Future[Compiled] | None:
        """Compile a grammar in a thread, ahead of the rows that need it. Called from any thread, after start()."""
        return None if self._grammars is None else self._grammars.get(structure)

    def close(self) -> None:
        """End what runs beside the steps. No step may follow."""
        if self._grammars is not None:
            self._grammars.close()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Run one step; on a GPU, start it."""
        if self._runner is None:
            raise RuntimeError("submit() before start()")
        return self._runner.submit(plan)

    def step(self, plan: StepPlan) -> Sampled:
        """Run one step to its end."""
        return self.submit(plan).result()

    def _prepare_device(self) -> None:
        if self._device.type == "cpu":
            cores = len(os.sched_getaffinity(0)) // self._config.parallel.num_workers
            torch.set_num_threads(self._config.runtime.num_threads or max(cores, 1))
            return
        torch.cuda.init()
        if self._device.index is not None:
            torch.cuda.set_device(self._device)
        if misfit := extension.load().misfit(torch.cuda.get_device_capability(self._device)):
            raise ConfigError(misfit)

    def _describe(self) -> _Described:
        source = locate(self._config.model.path)
        arch = target_arch(ArchConfig.from_source(source), self._config.speculation)
        return _Described(source, arch, choose_dtype(self._config.model.dtype, arch.dtype, self._device))

    def _join(self, described: _Described) -> ParallelContext:
        """Meet the other workers of the model."""
        if self._seat is None:
            return ParallelContext.single(self._device)
        split = None
        # A rank that norms its share of the rows alone does not have the others' hidden states.
        whole = self._config.speculation.reads_hidden_states
        if not whole and model_class(described.arch.architecture).LAYER.NORMS_SUM:
            row_bytes = described.arch.hidden_size * described.dtype.itemsize
            split = SplitLimits(self._config.scheduler.max_num_batched_tokens, row_bytes)
        timeout = self._config.runtime.start_timeout_s
        return connect(self._config.parallel, self._seat, self._device, timeout_s=timeout, split=split)

    def _load(self, described: _Described, context: ParallelContext) -> _Loaded:
        config = self._config.model
        source, arch, dtype = described
        attention = self._choose_attention(arch, dtype)
        digest = None
        if self._config.load.from_peer:
            digest = checkpoint_digest(source, arch, config.load_format, seed=config.seed)
        with memory.out_of_memory(self._device, f"the weights of {config.served_name}, {_name(dtype)}, did not fit"):
            model = load_model(
                source,
                arch,
                context,
                dtype,
                config.load_format,
                attention=attention,
                seed=config.seed,
                progress=self._progress,
                fill=lambda model: digest is not None and self._receive(model, digest),
            )
        if digest is not None:
            self.weights = WeightSender(model, digest)
        captures = captures_graphs(self._config.runtime, self._device, attention)
        return _Loaded(model, arch, dtype, captures, self._load_drafting(model))

    def _load_drafting(self, model: DecoderModel) -> Drafting | None:
        """What drafts on the device; None where nothing does."""
        speculation, config = self._config.speculation, self._config.model
        if not speculation.on_device:
            return None
        limits = self._config.scheduler
        settings = DraftSettings(
            speculation.method,
            speculation.model,
            dummy=config.load_format == "dummy",
            seed=config.seed,
            # A graph's padding may be more than the budget.
            max_tokens=max(limits.max_num_batched_tokens, largest_graph(limits.max_num_seqs, speculation.most)),
        )
        with memory.out_of_memory(self._device, f"what drafts (speculation.method {speculation.method}) did not fit"):
            return load_drafting(settings, model, self._choose_attention, progress=self._progress)

    def _receive(self, model: DecoderModel, digest: str) -> bool:
        """Get the weights from the peer; where they do not come from it, the log says why."""
        peer, self._peer = self._peer, None
        if peer is None:
            logger.info("weights: not from a live peer (load.from_peer): there is none")
            return False
        try:
            receive_weights(model, digest, peer, limit_s=self._config.load.peer_timeout_s)
        except TransferError as error:
            logger.warning("weights: not from a live peer (load.from_peer): %s", error)
            return False
        return True

    def _choose_attention(self, arch: ArchConfig, dtype: torch.dtype) -> AttentionBackend:
        """What attention runs on. Raises ConfigError."""
        setting = Setting(self._device, dtype, arch.head_dim, self._config.cache.block_size, arch.alibi)
        attention, reason = choose_backend(self._config.runtime.attention, setting)
        graphs = "" if attention.supports_graphs else ", no CUDA graphs"
        if self._device.type == "cuda" and (missing := raylm_lacks(self._device)):
            logger.warning("attention: %s%s; the other kernels are slow: %s", attention.name, graphs, missing)
        else:
            logger.info("attention: %s (%s)%s", attention.name, reason, graphs if self._device.type == "cuda" else "")
        return attention

    def _size_cache(self, loaded: _Loaded) -> _CacheSize:
        """How the cache is cut, how many blocks it has and how long a request they hold."""
        config, chunk = self._config.cache, self._config.scheduler.max_num_batched_tokens
        arch, wanted = loaded.arch, self._config.model.max_model_len
        if wanted is not None and wanted > arch.max_position:
            raise ConfigError(f"model.max_model_len {wanted} is over the model's own limit of {arch.max_position}")
        limit = wanted or arch.max_position
        context, num_workers = loaded.model.context, self._config.parallel.num_workers
        groups = CacheGroups.choose(arch, block_size=config.block_size, max_len=limit)
        groups = groups.of_stage(loaded.model.layer_numbers)
        block_bytes = memory.block_bytes(
            arch,
            group_size=groups.size,
            block_size=config.block_size,
            num_kv_heads=kv_heads_of_rank(arch.num_kv_heads, context),
            dtype=loaded.dtype,
        )
        if loaded.drafting is not None:
            cache_group(groups)
            block_bytes += config.block_size * loaded.drafting.shape.bytes_per_token(loaded.dtype)
        num_host_blocks = memory.num_host_blocks(config, bytes_per_block=block_bytes, num_workers=num_workers)
        num_blocks = memory.num_blocks(
            config,
            bytes_per_block=block_bytes,
            num_workers=num_workers,
            device=self._device,
            profile=lambda: self._profile(loaded, groups, limit),
        )
        # All workers keep the same blocks, so the one with least room for them decides.
        num_blocks = agree_on_min(num_blocks, context)
        num_host_blocks = agree_on_min(num_host_blocks, context)
        max_len = memory.max_model_len(groups.layout, num_blocks, chunk=chunk, wanted=wanted, limit=arch.max_position)
        logger.info("%s", memory.describe(groups.layout, num_blocks, chunk=chunk, max_len=max_len))
        return _CacheSize(groups, num_blocks, num_host_blocks, max_len)

    def _profile(self, loaded: _Loaded, groups: CacheGroups, max_len: int) -> memory.Profile:
        """Run the largest step there can be, with a cache just large enough for it, and capture the largest graph."""
        budget, rows = self._config.scheduler.max_num_batched_tokens, self._config.scheduler.max_num_seqs
        plan = trial.trial_plan(min(budget, rows * max_len), rows, groups.layout)
        size = _CacheSize(groups, 1 + trial.last_block(plan), 0, max_len)
        advice = (
            f"the largest step did not fit: scheduler.max_num_batched_tokens {budget} and max_num_seqs {rows} "
            "may be lowered"
        )
        with memory.out_of_memory(self._device, advice):
            store, runner = self._make_runner(loaded, size)
            return memory.profile_steps(
                self._device,
                step=lambda: runner.execute(plan),
                graphs=runner.warm_up_graphs,
                num_graphs=self._num_graphs(loaded, rows),
                cache_bytes=store.block_bytes * size.num_blocks,
            )

    def _num_graphs(self, loaded: _Loaded, rows: int) -> int:
        """CUDA graphs that there may be."""
        if not loaded.captures:
            return 0
        # Each size may be captured twice: up to tokens, and up to hidden states.
        count = 2 * len(graph_sizes(rows))
        kinds = (self._config.speculation.most > 0) + (loaded.drafting is not None)
        return count + kinds * MOST_VERIFYING_GRAPHS

    def _measure(self, runner: ModelRunner, store: KVStore, cache: _CacheSize) -> tuple[float, float]:
        """Tokens a second of prefill and bytes a second of swapping; (0, 0) where nothing is swapped."""
        if not cache.num_host_blocks:
            return 0.0, 0.0
        num_tokens = min(self._config.scheduler.max_num_batched_tokens, cache.max_model_len)
        prefill = trial.prefill_tokens_per_s(runner, trial.trial_plan(num_tokens, 1, cache.groups.layout))
        num_blocks = min(cache.num_blocks - 1, cache.num_host_blocks)
        swap = trial.swap_bytes_per_s(store, num_blocks=num_blocks, device=self._device)
        logger.info("prefill: %s tokens/s; swap: %.1f GB/s", f"{prefill:,.0f}", swap / 1e9)
        return prefill, swap

    def _make_runner(self, loaded: _Loaded, cache: _CacheSize) -> tuple[KVStore, ModelRunner]:
        block_size = self._config.cache.block_size
        table = RequestTable(
            max_rows=self._config.scheduler.max_num_seqs,
            max_model_len=cache.max_model_len,
            block_size=block_size,
            num_groups=len(cache.groups.layers),
            device=self._device,
        )
        store = KVStore(
            group_size=cache.groups.size,
            num_blocks=cache.num_blocks,
            num_host_blocks=cache.num_host_blocks,
            block_shape=(
                block_size,
                kv_heads_of_rank(loaded.arch.num_kv_heads, loaded.model.context),
                loaded.arch.head_dim,
            ),
            dtype=loaded.dtype,
            device=self._device,
            draft=loaded.drafting.shape if loaded.drafting is not None else None,
        )
        capture = CudaCapture(self._device) if loaded.captures else None
        context = loaded.model.context
        checks = self._config.parallel.check_ranks and context.world is not None
        agreement = Agreement(context, context.world, table) if checks else None
        drafts = self._make_drafts(loaded.drafting, table, store, cache.groups, capture)
        return store, ModelRunner(
            loaded.model,
            table,
            store,
            cache.groups,
            capture=capture,
            agreement=agreement,
            processors=self._processors,
            processed_logprobs=self._config.generation.logprobs == "processed",
            num_drafts=self._config.speculation.most,
            drafts=drafts,
            matchers=self._make_matchers(loaded),
        )

    def _make_matchers(self, loaded: _Loaded) -> GrammarMatchers | None:
        """Where the model's last stage is, whose logits are sampled from."""
        if not loaded.model.context.is_last_stage:
            return None
        vocab_size = loaded.arch.vocab_size
        if self._grammars is None:
            self._grammars = CompiledGrammars(locate(self._config.model.path), vocab_size)
        cores = len(os.sched_getaffinity(0)) // self._config.parallel.num_workers
        threads = 1 if self._device.type == "cpu" else max(1, min(cores // 2, _MASK_THREADS))
        return GrammarMatchers(self._grammars, vocab_size, threads=threads)

    def _make_drafts(
        self,
        drafting: Drafting | None,
        table: RequestTable,
        store: KVStore,
        groups: CacheGroups,
        capture: CudaCapture | None,
    ) -> DraftRunner | None:
        if drafting is None:
            return None
        group, max_tokens = cache_group(groups), self._config.scheduler.max_num_batched_tokens
        proposer = drafting.make(table, store.draft_pairs, group)
        return DraftRunner(proposer, table, group=group, max_tokens=max_tokens, capture=capture)


class Phases:
    """Seconds of each phase of a start, which may have several parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


def choose_device(wanted: str) -> torch.device:
    """The device to run on: auto takes a GPU where there is one. Raises ConfigError."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("runtime.device 'cuda' was asked for, but torch sees no CUDA device here; allowed: auto, cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def captures_graphs(config: RuntimeConfig, device: torch.device, attention: AttentionBackend) -> bool:
    """Whether decode steps run as CUDA graphs."""
    return device.type == "cuda" and config.cuda_graphs and attention.supports_graphs


def choose_dtype(wanted: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The type of weights and activations: auto is float32 on a CPU; on a GPU the checkpoint's, at 16 bits."""
    if wanted != "auto":
        return _DTYPES[wanted]
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if checkpoint == "float16" else torch.bfloat16


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
