"""The second half of a worker's start: how large the KV cache is, and the runner of steps over it.

size_cache -> build; raylm/worker/loading.py is the first half.
"""

from __future__ import annotations

from typing import NamedTuple

from raylm.config.resolve import ResolvedEngine
from raylm.grammar.compiled import CompiledGrammars
from raylm.grammar.matchers import GrammarMatchers
from raylm.log import get_logger
from raylm.model_files.source import locate
from raylm.models.cache_spec import cache_specs
from raylm.parallel.collectives import agree_on_min
from raylm.worker import memory, trial
from raylm.worker.agreement import Agreement
from raylm.worker.cache_groups import CacheGroups
from raylm.worker.device import cores_of_worker
from raylm.worker.draft_runner import DraftRunner
from raylm.worker.drafting import Drafting, cache_group
from raylm.worker.graph_runner import MOST_SHARING_GRAPHS, MOST_WIDE_GRAPHS, CudaCapture, graph_sizes
from raylm.worker.kv_store import KVStore
from raylm.worker.loading import Loaded
from raylm.worker.model_runner import ModelRunner
from raylm.worker.request_table import RequestTable, TableSizes
from raylm.worker.sampling.processors import LogitsProcessor

logger = get_logger(__name__)

_MASK_THREADS = 8
"""Threads that fill masks of grammars, at most. On a CPU the model has the cores."""


class CacheSize(NamedTuple):
    """How the KV cache is cut, and how long a request it holds."""

    groups: CacheGroups
    num_blocks: int
    num_host_blocks: int
    max_model_len: int


class SamplingParts(NamedTuple):
    """What sampling has of its own, whatever the size of the cache."""

    processors: dict[str, LogitsProcessor]
    """Users' own, by name."""
    grammars: CompiledGrammars | None
    """None where this worker does not sample."""


class Built(NamedTuple):
    """A runner of steps, and the cache that it fills."""

    store: KVStore
    runner: ModelRunner


def sampling_grammars(config: ResolvedEngine, loaded: Loaded) -> CompiledGrammars | None:
    """Compiled grammars, where the model's last stage is, whose logits are sampled from."""
    if not loaded.model.context.is_last_stage:
        return None
    return CompiledGrammars(locate(config.model.reference), loaded.arch.vocab_size)


def size_cache(config: ResolvedEngine, loaded: Loaded, parts: SamplingParts) -> CacheSize:
    """How the cache is cut, how many blocks it has and how long a request they hold. Raises ConfigError."""
    cache, chunk = config.cache, config.scheduler.max_num_batched_tokens
    arch, wanted = loaded.arch, config.model.max_model_len
    limit = arch.max_position
    context, num_workers = loaded.model.context, config.parallel.num_workers
    specs = cache_specs(arch, context, block_size=cache.block_size, dtype=loaded.cache_dtype)
    groups = CacheGroups.choose(specs, block_size=cache.block_size, max_len=limit)
    groups = groups.of_stage(loaded.model.layer_numbers)
    if loaded.drafting is not None:
        cache_group(groups)
        groups = groups._replace(drafts=loaded.drafting.layers)
    block_bytes = groups.block_bytes
    num_host_blocks = memory.num_host_blocks(cache, bytes_per_block=block_bytes, num_workers=num_workers)
    tables = TableSizes(config.scheduler.max_num_seqs, groups.layout, chunk, limit)
    num_blocks = memory.num_blocks(
        cache,
        bytes_per_block=block_bytes,
        num_workers=num_workers,
        device=loaded.device,
        profile=lambda: _profile(config, loaded, parts, groups, tables),
        tables=tables,
    )
    # All workers keep the same blocks, so the one with least room for them decides.
    num_blocks = agree_on_min(num_blocks, context)
    num_host_blocks = agree_on_min(num_host_blocks, context)
    max_len = memory.max_model_len(groups.layout, num_blocks, chunk=chunk, wanted=wanted, limit=limit)
    logger.info("%s", memory.describe(groups.layout, num_blocks, chunk=chunk, max_len=max_len))
    return CacheSize(groups, num_blocks, num_host_blocks, max_len)


def build(config: ResolvedEngine, loaded: Loaded, parts: SamplingParts, cache: CacheSize) -> Built:
    """The cache and the runner over it. Raises ConfigError where the device has no room for them."""
    device, context, groups = loaded.device, loaded.model.context, cache.groups
    table = RequestTable(
        max_rows=config.scheduler.max_num_seqs,
        max_model_len=cache.max_model_len,
        block_size=config.cache.block_size,
        num_groups=len(groups.layers),
        device=device,
        shares_in=[group for group in groups.full_groups if groups.layers[group]] if loaded.shares_prefixes else (),
        key_bytes=groups.key_bytes,
    )
    store = KVStore(groups, num_blocks=cache.num_blocks, num_host_blocks=cache.num_host_blocks, device=device)
    capture = CudaCapture(device) if loaded.captures else None
    checks = config.parallel.check_ranks and context.world is not None
    runner = ModelRunner(
        loaded.model,
        table,
        store,
        groups,
        max_tokens=config.scheduler.max_num_batched_tokens,
        capture=capture,
        agreement=Agreement(context, context.world, table) if checks else None,
        processors=parts.processors,
        processed_logprobs=config.generation.logprobs == "processed",
        num_drafts=config.speculation.most,
        drafts=_make_drafts(config, loaded.drafting, table, store, groups, capture),
        matchers=_make_matchers(config, loaded, parts.grammars),
    )
    return Built(store, runner)


def measure(config: ResolvedEngine, built: Built, cache: CacheSize, loaded: Loaded) -> tuple[float, float]:
    """Tokens a second of prefill and bytes a second of swapping; (0, 0) where nothing is swapped."""
    if not cache.num_host_blocks:
        return 0.0, 0.0
    num_tokens = min(config.scheduler.max_num_batched_tokens, cache.max_model_len)
    prefill = trial.prefill_tokens_per_s(built.runner, trial.trial_plan(num_tokens, 1, cache.groups.layout))
    num_blocks = min(cache.num_blocks - 1, cache.num_host_blocks)
    swap = trial.swap_bytes_per_s(built.store, num_blocks=num_blocks, device=loaded.device)
    logger.info("prefill: %s tokens/s; swap: %.1f GB/s", f"{prefill:,.0f}", swap / 1e9)
    return prefill, swap


def _profile(
    config: ResolvedEngine, loaded: Loaded, parts: SamplingParts, groups: CacheGroups, tables: TableSizes
) -> memory.Profile:
    """Run the largest step there can be, with a cache just large enough for it, and capture the largest graphs."""
    budget, rows = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    # A request table for more tokens than any cache here could hold might not fit into memory itself.
    left = memory.bytes_left(config.cache, loaded.device)
    most = tables.blocks_beside(left, bytes_per_block=groups.block_bytes)
    max_len = max(tables.longest(most), min(tables.limit, groups.layout.block_size))
    max_len = agree_on_min(max_len, loaded.model.context)
    plan = trial.trial_plan(min(budget, rows * max_len), rows, groups.layout)
    size = CacheSize(groups, 1 + trial.last_block(plan), 0, max_len)
    advice = (
        f"the largest step did not fit: scheduler.max_num_batched_tokens {budget} and max_num_seqs {rows} "
        "may be lowered"
    )
    with memory.out_of_memory(loaded.device, advice):
        store, runner = build(config, loaded, parts, size)
        return memory.profile_steps(
            loaded.device,
            step=lambda: runner.execute(plan),
            graphs=runner.warm_up_graphs,
            graph_layers=_graph_layers(config, loaded, rows),
            beside=store.block_bytes * size.num_blocks + tables.bytes(max_len),
        )


def _graph_layers(config: ResolvedEngine, loaded: Loaded, rows: int) -> int:
    """The layers that all CUDA graphs that there may be have together."""
    if not loaded.captures:
        return 0
    # Each size of decodes may be captured twice: up to tokens, and up to hidden states.
    count = 2 * len(graph_sizes(rows)) + MOST_WIDE_GRAPHS + loaded.shares_prefixes * MOST_SHARING_GRAPHS
    layers = count * len(loaded.model.layer_numbers)
    if loaded.drafting is not None:
        layers += MOST_WIDE_GRAPHS * config.speculation.most * len(loaded.drafting.layers)
    return layers


def _make_matchers(config: ResolvedEngine, loaded: Loaded, grammars: CompiledGrammars | None) -> GrammarMatchers | None:
    if grammars is None:
        return None
    cores = cores_of_worker(config)
    threads = 1 if loaded.device.type == "cpu" else max(1, min(cores // 2, _MASK_THREADS))
    return GrammarMatchers(grammars, loaded.arch.vocab_size, threads=threads)


def _make_drafts(
    config: ResolvedEngine,
    drafting: Drafting | None,
    table: RequestTable,
    store: KVStore,
    groups: CacheGroups,
    capture: CudaCapture | None,
) -> DraftRunner | None:
    if drafting is None:
        return None
    group, max_tokens = cache_group(groups), config.scheduler.max_num_batched_tokens
    proposer = drafting.make(table, store.drafts, group)
    return DraftRunner(proposer, table, group=group, max_tokens=max_tokens, capture=capture)
