"""Runs one step of the model."""

from __future__ import annotations

import numpy as np
import torch

from raylm.core.step import StepPlan, StepResult
from raylm.models.decoder import DecoderModel
from raylm.worker.cache_groups import CacheGroups
from raylm.worker.input_batch import InputBatch
from raylm.worker.kv_store import KVStore
from raylm.worker.logprobs import likeliest, token_logprobs
from raylm.worker.request_table import RequestTable
from raylm.worker.sampler import SamplingBatch, sample


class ModelRunner:
    """Rows, copies, inputs, forward, sample, record: the calls of a step, in this order."""

    def __init__(self, model: DecoderModel, table: RequestTable, store: KVStore, groups: CacheGroups) -> None:
        self._model = model
        self._table = table
        self._store = store
        self._group_of = groups.group_of_layers()
        place = {layer: i for layers in groups.layers for i, layer in enumerate(layers)}
        self._caches = [store.pairs[place[layer]] for layer in range(len(place))]

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens; every row that had none left samples one more, or reports candidates for it."""
        self._table.apply(plan)
        if plan.copies is not None:
            self._store.copy(plan.copies)
        if not plan.rows:
            return StepResult(plan.step, [])
        batch = InputBatch.build(plan, self._table)
        metas = [batch.attention[group] for group in self._group_of]
        hidden = self._model(batch.token_ids, batch.positions, self._caches, metas)
        rows = batch.sample_rows
        if not rows.size:
            return StepResult(plan.step, [])
        logits = self._model.logits(hidden[batch.sample_index])
        if self._table.reports[rows].any():
            return self._report(plan.step, logits, rows)
        return StepResult(plan.step, self._sample(logits, rows).tolist())

    def _sample(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """One token for each of the rows [num_rows], which know it from now on. logits: [num_rows, vocab]."""
        token_ids = sample(logits, self._sampling(rows))
        self._table.append_tokens(rows, token_ids)
        return token_ids

    def _report(self, step: int, logits: torch.Tensor, rows: np.ndarray) -> StepResult:
        """The result of a step where some of the rows [num_rows] want more than a token, or candidates instead."""
        searching = self._table.num_candidates[rows] > 0
        token_ids: list[int] = []
        logprobs: list[float] = []
        if (sampling := np.flatnonzero(~searching)).size:
            own = logits[self._index(sampling)]
            tokens = self._sample(own, rows[sampling])
            token_ids = tokens.tolist()
            if (wants := np.flatnonzero(self._table.logprob[rows[sampling]])).size:
                index = self._index(wants)
                found = np.zeros(len(token_ids))
                found[wants] = token_logprobs(own[index], tokens[index]).cpu().numpy()
                logprobs = found.tolist()
        if not searching.any():
            return StepResult(step, token_ids, logprobs)
        reporting = np.flatnonzero(searching)
        counts = self._table.num_candidates[rows[reporting]].tolist()
        return StepResult(step, token_ids, logprobs, likeliest(logits[self._index(reporting)], counts))

    def _index(self, positions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(positions).to(self._table.device)

    def _sampling(self, rows: np.ndarray) -> SamplingBatch:
        table = self._table
        return SamplingBatch(
            temperature=table.temperature[rows],
            top_p=table.top_p[rows],
            top_k=table.top_k[rows],
            min_p=table.min_p[rows],
            seed=table.seed[rows],
            position=table.num_known[rows],
        )
