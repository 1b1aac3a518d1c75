"""Runs one step of the model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raylm import ops
from raylm.core.step import StepPlan, StepResult
from raylm.models.decoder import DecoderModel
from raylm.parallel.collectives import of_first
from raylm.parallel.stages import StageLinks
from raylm.worker.agreement import Agreement
from raylm.worker.cache_groups import CacheGroups
from raylm.worker.graph_runner import Capture, GraphRunner
from raylm.worker.input_batch import InputBatch, StepArrays
from raylm.worker.kv_store import KVStore
from raylm.worker.logprobs import likeliest, token_logprobs
from raylm.worker.pending import Outputs, PendingStep
from raylm.worker.pipeline import PipelineStage
from raylm.worker.request_table import RequestTable


class ModelRunner:
    """Rows, copies, inputs, forward, sample, record: the calls of a step, in this order.

    On a GPU they only queue work; nothing waits until the step's result is asked for. With `capture`, steps in which
    every row decodes run through graphs. Of several ranks only the one that answers has something in its results.
    """

    def __init__(
        self,
        model: DecoderModel,
        table: RequestTable,
        store: KVStore,
        groups: CacheGroups,
        *,
        capture: Capture | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self._model = model
        self._table = table
        self._store = store
        self._forward = _Forward(model, store, groups)
        self._agreement = agreement
        self._answers = model.context.answers
        self._pipeline = self._make_pipeline(model.context.links)
        self._graphs = self._make_graphs(capture) if capture is not None else None

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for what it gives."""
        result = self.submit(plan).result()
        if self._pipeline is not None:
            self._pipeline.drain()
        return result

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Compute the plan's tokens; every row that had none left samples one more, or reports candidates for it."""
        if self._pipeline is not None:
            self._pipeline.begin(plan)
        self._table.apply(plan)
        if self._agreement is not None:
            self._agreement.check(plan)
        if plan.copies is not None:
            self._store.copy(plan.copies)
        outputs = self._outputs(plan) if plan.rows else Outputs()
        return PendingStep(plan.step, outputs if self._answers else Outputs(), self._table.device)

    @torch.inference_mode()
    def warm_up_graphs(self) -> None:
        """Capture the graph that takes the most memory; nothing where there are no graphs."""
        if self._graphs is not None:
            self._graphs.warm_up()

    def _make_pipeline(self, links: StageLinks | None) -> PipelineStage | None:
        if links is None:
            return None
        model = self._model
        return PipelineStage(model.context, links, self._table, hidden_size=model.arch.hidden_size, dtype=model.dtype)

    def _make_graphs(self, capture: Capture) -> GraphRunner:
        model, device = self._model, self._table.device
        return GraphRunner(
            self._forward,
            model.logits,
            self._table,
            hidden_size=model.arch.hidden_size,
            dtype=model.dtype,
            begins=model.context.is_first_stage,
            samples=model.context.is_last_stage and ops.sample_is_async(device),
            capture=capture,
        )

    def _outputs(self, plan: StepPlan) -> Outputs:
        rows = np.array(plan.rows, dtype=np.int64)
        query_lens = np.array(plan.num_tokens, dtype=np.int64)
        if self._graphs is not None and self._graphs.takes(rows, query_lens):
            return self._decode(self._graphs, rows)
        arrays, sample_rows = StepArrays.build(rows, query_lens, self._table)
        batch = InputBatch.gather(
            self._table.upload(*arrays),
            self._table,
            max_query_len=int(query_lens.max()),
            max_seq_len=int(arrays.seq_lens.max()),
        )
        received = self._pipeline.receive(len(batch.token_ids)) if self._pipeline is not None else None
        hidden = self._forward(batch, batch.token_ids if received is None else received)
        if not self._model.context.is_last_stage:
            return self._pass_on(hidden, sample_rows)
        if not sample_rows.size:
            return Outputs()
        logits = self._model.logits(hidden.index_select(0, batch.sample_index))
        return self._sample_or_report(logits, sample_rows, batch.sample_cells)

    def _decode(self, graphs: GraphRunner, rows: np.ndarray) -> Outputs:
        """One token for each of the rows, through a graph."""
        given = self._pipeline.receive(len(rows)) if self._pipeline is not None else None
        if not self._model.context.is_last_stage:
            hidden, _ = graphs.decode(rows, given)
            return self._pass_on(hidden.clone(), rows)
        if graphs.samples and not self._table.needs_logits[rows].any():
            token_ids = graphs.sample(rows, given)
            if self._pipeline is not None:
                self._pipeline.send_tokens(token_ids.clone())
            return Outputs(token_ids)
        hidden, cells = graphs.decode(rows, given)
        return self._sample_or_report(self._model.logits(hidden), rows, cells)

    def _pass_on(self, hidden: Tensor, sample_rows: np.ndarray) -> Outputs:
        assert self._pipeline is not None, "a stage that is not the last one has links"
        self._pipeline.pass_on(hidden, sample_rows)
        return Outputs()

    def _sample_or_report(self, logits: Tensor, rows: np.ndarray, cells: Tensor) -> Outputs:
        """What the rows [num_rows] give. logits: [num_rows, vocab]; cells: [num_rows], for the tokens they sample."""
        reports = self._table.reports[rows].any()
        outputs = self._report(logits, rows, cells) if reports else Outputs(self._sample(logits, rows, cells))
        if self._pipeline is not None:
            self._pipeline.send_tokens(outputs.token_ids)
        return outputs

    def _sample(self, logits: Tensor, rows: np.ndarray, cells: Tensor) -> Tensor:
        """One token for each of the rows [num_rows], which know it from now on."""
        logits = self._table.penalize(logits, rows)
        token_ids = ops.sample(logits, *self._table.upload(*self._table.sampling(rows)))
        if not ops.sample_is_async(self._table.device):
            # torch's sums on a GPU may differ in the last bit from one time to the next.
            token_ids = of_first(token_ids, self._model.context)
        self._table.write_tokens(cells, token_ids)
        self._table.num_known[rows] += 1
        return token_ids

    def _report(self, logits: Tensor, rows: np.ndarray, cells: Tensor) -> Outputs:
        """The same where some of the rows want more than a token, or candidates instead."""
        searching = self._table.num_candidates[rows] > 0
        sampling, reporting = np.flatnonzero(~searching), np.flatnonzero(searching)
        wants = np.flatnonzero(self._table.logprob[rows[sampling]])
        own, asking, wanted = self._table.upload(sampling, reporting, wants)
        token_ids, logprobs, found = None, None, None
        if sampling.size:
            logits_of_own = logits.index_select(0, own)
            token_ids = self._sample(logits_of_own, rows[sampling], cells.index_select(0, own))
            if wants.size:
                values = token_logprobs(
                    logits_of_own.index_select(0, wanted).float(), token_ids.index_select(0, wanted)
                )
                logprobs = torch.zeros(sampling.size, dtype=values.dtype, device=values.device)
                logprobs.index_copy_(0, wanted, values)
        if reporting.size:
            counts = self._table.num_candidates[rows[reporting]].tolist()
            found = likeliest(logits.index_select(0, asking).float(), counts)
        return Outputs(token_ids, logprobs, found)


class _Forward:
    """The model with its cache. It knows no runner, so that a runner's memory is free as soon as nobody holds it."""

    def __init__(self, model: DecoderModel, store: KVStore, groups: CacheGroups) -> None:
        self._model = model
        places = groups.places()
        self._group_of = [group for group, _ in places]
        self._caches = [store.pairs[place] for _, place in places]

    def __call__(self, batch: InputBatch, given: Tensor) -> Tensor:
        """Hidden states [T, hidden_size]; the tokens' keys and values are in the cache from now on.

        `given` is what the model's stage begins with: the batch's token ids, or another stage's hidden states.
        """
        metas = [batch.attention[group] for group in self._group_of]
        hidden: Tensor = self._model(given, batch.positions, self._caches, metas)
        return hidden
