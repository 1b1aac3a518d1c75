"""A ModelRunner over a small cache, and a scheduler of a few lines for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from raylm.core.sampling import SamplingParams
from raylm.core.step import Copies, Drafts, NewBlocks, NewRow, RowSampling, Sampled, StepPlan
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.cache_spec import cache_specs
from raylm.models.load import load_model
from raylm.parallel.context import ParallelContext
from raylm.worker.cache_groups import CacheGroups
from raylm.worker.graph_runner import Capture
from raylm.worker.kv_store import KVStore
from raylm.worker.model_runner import ModelRunner
from raylm.worker.request_table import RequestTable

BLOCK = 4
MAX_LEN = 64
GREEDY = RowSampling(SamplingParams(temperature=0.0))
CPU = torch.device("cpu")


class Rig:
    """A runner whose cache holds NaN wherever nothing was written."""

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int = 32,
        num_host_blocks: int = 0,
        capture: Capture | None = None,
        max_tokens: int = 64,
        num_drafts: int = 0,
        shares: bool = False,
    ) -> None:
        source = locate(str(folder))
        arch = ArchConfig.from_source(source)
        context, dtype = ParallelContext.single(CPU), torch.float32
        model = load_model(source, arch, context, dtype, "auto", progress=False)
        specs = cache_specs(arch, context, block_size=BLOCK, dtype=dtype)
        self.groups = CacheGroups.choose(specs, block_size=BLOCK, max_len=MAX_LEN)
        table = RequestTable(
            max_rows=4,
            max_model_len=MAX_LEN,
            block_size=BLOCK,
            num_groups=len(self.groups.layers),
            device=CPU,
            shares_in=self.groups.full_groups if shares else (),
            key_bytes=self.groups.key_bytes,
        )
        self.store = KVStore(self.groups, num_blocks=num_blocks, num_host_blocks=num_host_blocks, device=CPU)
        self.poison(list(range(num_blocks)))
        self.runner = ModelRunner(
            model, table, self.store, self.groups, max_tokens=max_tokens, capture=capture, num_drafts=num_drafts
        )
        self._steps = 0

    def poison(self, blocks: list[int]) -> None:
        for cache in (cache for pair in self.store.layers for cache in pair):
            cache[blocks] = math.nan

    def step(
        self,
        num_tokens: dict[int, int],
        *,
        new_rows: list[NewRow] | None = None,
        new_blocks: list[NewBlocks] | None = None,
        copies: Copies | None = None,
        chosen: list[tuple[int, int]] | None = None,
        drafts: list[Drafts] | None = None,
        bounds: list[tuple[int, int]] | None = None,
    ) -> Sampled:
        """Run one step in which rows compute so many tokens."""
        self._steps += 1
        counts = list(num_tokens.values())
        deltas = copies, chosen or [], drafts or [], bounds or []
        plan = StepPlan(self._steps, new_rows or [], new_blocks or [], list(num_tokens), counts, *deltas)
        result = self.runner.execute(plan)
        assert result.step == self._steps
        return result


class WindowScheduler:
    """Gives rows blocks as they grow and takes those that left a group's window at once: their columns become 0, what
    was in them NaN, and the next row that grows gets them first."""

    def __init__(self, rig: Rig, *, num_blocks: int) -> None:
        self.texts: dict[int, list[int]] = {}
        self.freed: set[int] = set()
        self.given_again: set[int] = set()
        self._rig = rig
        self._windows = rig.groups.layout.windows
        self._free = list(range(num_blocks - 1, 0, -1))
        self._computed: dict[int, int] = {}
        self._tables: dict[int, list[list[int]]] = {}
        self._fresh: list[NewRow] = []

    def add(self, row: int, prompt: list[int]) -> None:
        self.texts[row] = list(prompt)
        self._computed[row] = 0
        self._tables[row] = [[] for _ in self._windows]
        self._fresh.append(NewRow(row, prompt, 0, GREEDY))

    def step(self, num_tokens: dict[int, int]) -> None:
        """Let rows compute so many tokens; those that sample get their token."""
        new_blocks = [block for row, count in num_tokens.items() for block in self._grow(row, count)]
        fresh, self._fresh = self._fresh, []
        result = self._rig.step(num_tokens, new_rows=fresh, new_blocks=new_blocks)
        sampled = iter(result.token_ids)
        for row in num_tokens:
            if self._computed[row] == len(self.texts[row]):
                self.texts[row].append(next(sampled))
        assert next(sampled, None) is None

    def _grow(self, row: int, count: int) -> list[NewBlocks]:
        found = []
        for group, window in enumerate(self._windows):
            table = self._tables[row][group]
            unread = max(self._computed[row] - window + 1, 0) // BLOCK if window else 0
            for column in range(min(unread, len(table))):
                if table[column]:
                    self._rig.poison([table[column]])
                    self._free.append(table[column])
                    self.freed.add(table[column])
                    table[column] = 0
                    found.append(NewBlocks(row, group, column, [0]))
            first = len(table)
            while len(table) * BLOCK < self._computed[row] + count:
                table.append(self._free.pop())
            self.given_again |= self.freed & set(table[first:])
            found.append(NewBlocks(row, group, first, table[first:]))
        self._computed[row] += count
        return found


def sampling(*, seed: int = 0, num_prompt: int = 0, num_candidates: int = 0, **fields: Any) -> RowSampling:
    """Greedy but for these fields of SamplingParams."""
    params = SamplingParams(**{"temperature": 0.0, **fields})
    return RowSampling(params, seed, num_prompt, num_candidates=num_candidates)


def tokens(count: int, *, seed: int = 7) -> list[int]:
    """A prompt of small made-up token ids."""
    return [(seed * i * i + 13 * i + seed) % 300 + 10 for i in range(count)]
