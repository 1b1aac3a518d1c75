"""Runs one step of the model."""

from __future__ import annotations

import numpy as np
import torch

from raylm.core.step import StepPlan, StepResult
from raylm.models.decoder import DecoderModel
from raylm.worker.input_batch import InputBatch
from raylm.worker.request_table import RequestTable
from raylm.worker.sampler import SamplingBatch, sample

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]


class ModelRunner:
    """Rows, inputs, forward, sample, record: the five calls of a step, in this order."""

    def __init__(self, model: DecoderModel, table: RequestTable, caches: KVCaches) -> None:
        self._model = model
        self._table = table
        self._caches = caches

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens; the result holds one sampled token for every row that had none left."""
        self._table.apply(plan)
        batch = InputBatch.build(plan, self._table)
        hidden = self._model(batch.token_ids, batch.positions, self._caches, batch.attention)
        if not batch.sample_rows.size:
            return StepResult(plan.step, [])
        logits = self._model.logits(hidden[batch.sample_index])
        token_ids = sample(logits, self._sampling(batch.sample_rows))
        self._table.record_sampled(batch.sample_rows, token_ids)
        return StepResult(plan.step, token_ids.tolist())

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
