"""Runs one step of the model."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from raylm import ops
from raylm.core.step import NewRow, Sampled, StepPlan
from raylm.grammar.matchers import GrammarMatchers
from raylm.layers.attention import LayerInput
from raylm.models.decoder import DecoderModel
from raylm.parallel.stages import StageLinks
from raylm.worker.agreement import Agreement
from raylm.worker.cache_groups import CacheGroups
from raylm.worker.draft_runner import DraftRunner
from raylm.worker.drawing import draw
from raylm.worker.graph_runner import Capture, GraphRunner
from raylm.worker.input_batch import DeviceArrays, InputBatch, StepArrays, StepRows, starts
from raylm.worker.kv_store import KVStore
from raylm.worker.pending import LogprobParts, Outputs, PendingStep
from raylm.worker.pipeline import PipelineStage
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling.logprobs import TokenLogprobs, join, likeliest
from raylm.worker.sampling.processors import LogitsProcessor
from raylm.worker.sampling.sampler import Sampler
from raylm.worker.sampling.stages import LogitRows

_PROMPT_LOGITS = 256
"""Tokens of a prompt whose logits are in memory at the same time, for prompt_logprobs."""


class ModelRunner:
    """Rows, copies, inputs, forward, sample, accept: the calls of a step, in this order.

    On a GPU they only queue work; nothing waits until the step's result is asked for. With `capture`, steps of few
    tokens run through graphs. Of several ranks only the one that answers has something in its results.
    """

    def __init__(
        self,
        model: DecoderModel,
        table: RequestTable,
        store: KVStore,
        groups: CacheGroups,
        *,
        max_tokens: int,
        capture: Capture | None = None,
        agreement: Agreement | None = None,
        processors: dict[str, LogitsProcessor] | None = None,
        processed_logprobs: bool = False,
        num_drafts: int = 0,
        drafts: DraftRunner | None = None,
        matchers: GrammarMatchers | None = None,
    ) -> None:
        """`max_tokens`: those of the largest step. `num_drafts`: what a row verifies at most. `drafts`: what drafts on
        the device, where plans bring none."""
        self._model = model
        self._table = table
        self._store = store
        self._forward = _Forward(model, store, groups)
        self._sampler = Sampler(
            table,
            model.context,
            model.arch.vocab_size,
            processors,
            matchers,
            processed=processed_logprobs,
            tells_forced=num_drafts > 0 and model.context.answers,
        )
        self._agreement = agreement
        self._drafts = drafts
        self._answers = model.context.answers
        self._pipeline = self._make_pipeline(model.context.links)
        self._graphs = self._make_graphs(capture, max_tokens, num_drafts) if capture is not None else None

    def execute(self, plan: StepPlan) -> Sampled:
        """Run one step and wait for what it gives."""
        result = self.submit(plan).result()
        if self._pipeline is not None:
            self._pipeline.drain()
        return result

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Compute the plan's tokens; every row that had none left samples, or reports candidates."""
        if self._pipeline is not None:
            self._pipeline.begin(plan)
        self._table.apply(plan)
        if plan.new_rows:
            self._begin(plan.new_rows)
        if self._agreement is not None:
            self._agreement.check(plan)
        if plan.copies is not None:
            self._store.copy(plan.copies)
        if self._drafts is not None and plan.rows:
            # Before anything looks at a row's drafts: a grammar's masks depend on them.
            self._prepare_drafts(self._drafts, plan)
        if self._model.context.is_last_stage:
            self._sampler.look_ahead(plan)
        outputs = self._outputs(plan) if plan.rows else Outputs()
        return PendingStep(plan.step, outputs if self._answers else Outputs(), self._table.device)

    def _begin(self, new_rows: list[NewRow]) -> None:
        self._sampler.begin(new_rows)
        if self._drafts is not None:
            self._drafts.begin([new.row for new in new_rows], [new.num_computed for new in new_rows])

    @torch.inference_mode()
    def warm_up_graphs(self) -> None:
        """Capture the graphs that take the most memory; nothing where there are no graphs."""
        if self._graphs is not None:
            self._graphs.warm_up()
        if self._drafts is not None:
            self._drafts.warm_up()

    def _make_pipeline(self, links: StageLinks | None) -> PipelineStage | None:
        if links is None:
            return None
        model = self._model
        return PipelineStage(model.context, links, self._table, hidden_size=model.arch.hidden_size, dtype=model.dtype)

    def _make_graphs(self, capture: Capture, max_tokens: int, num_drafts: int) -> GraphRunner:
        model, device = self._model, self._table.device
        return GraphRunner(
            self._forward,
            partial(draw, model),
            self._table,
            self._sampler.settings,
            hidden_size=model.arch.hidden_size,
            dtype=model.dtype,
            begins=model.context.is_first_stage,
            samples=model.context.is_last_stage and ops.sample_is_async(device, model.arch.vocab_size),
            capture=capture,
            max_tokens=max_tokens,
            num_drafts=num_drafts,
            follow=self._drafts.absorb if self._drafts is not None and not self._drafts.is_lazy else None,
        )

    def _prepare_drafts(self, drafts: DraftRunner, plan: StepPlan) -> None:
        table, rows = self._table, np.array(plan.rows, dtype=np.int64)
        ends = table.computed_bound[rows] + np.array(plan.num_tokens, dtype=np.int64)
        left = table.known_bound[rows] - table.computed_bound[rows]
        wanted = np.where(table.num_candidates[rows] > 0, 0, np.maximum(ends - table.known_bound[rows], 0))
        given = [one.row for one in plan.drafts]
        drafts.prepare(rows, wanted, left != 1, given=given, max_seq_len=int(ends.max()))

    def _outputs(self, plan: StepPlan) -> Outputs:
        step = StepRows.of(np.array(plan.rows, dtype=np.int64), np.array(plan.num_tokens, dtype=np.int64), self._table)
        if self._graphs is not None and self._graphs.takes(step):
            return self._replay(self._graphs, step)
        arrays = DeviceArrays(*self._table.upload(*StepArrays.build(step.rows, step.query_lens)))
        batch = InputBatch.gather(
            arrays,
            self._table,
            max_query_len=int(step.query_lens.max()),
            max_seq_len=step.max_seq_len,
            # A step with a chunk of a prompt takes so long that sharing hardly shortens it.
            shares=not step.is_wide and self._table.share_prefixes(step.rows),
        )
        received = self._pipeline.receive(len(batch.token_ids)) if self._pipeline is not None else None
        hidden = self._forward(batch, batch.token_ids if received is None else received)
        if not self._model.context.is_last_stage:
            return self._pass_on(hidden, step)
        return self._conclude(step, hidden, batch.positions, arrays)

    def _replay(self, graphs: GraphRunner, step: StepRows) -> Outputs:
        """A step through a graph."""
        given = self._pipeline.receive(int(step.query_lens.sum())) if self._pipeline is not None else None
        if not self._model.context.is_last_stage:
            return self._pass_on(graphs.run(step, given, samples=False).hidden.clone(), step)
        if not (graphs.samples(step) and self._sampler.are_plain(step.rows)):
            done = graphs.run(step, given, samples=False)
            return self._conclude(step, done.hidden, done.positions, done.arrays)
        done = graphs.run(step, given, samples=True)
        if self._drafts is not None and self._drafts.is_lazy:
            self._absorb(step, done.positions, done.arrays)
        if self._pipeline is not None:
            self._pipeline.send_tokens(done.token_ids.clone())
        return Outputs(done.token_ids, step.num_sampled, done.counts if step.verifies else None)

    def _pass_on(self, hidden: Tensor, step: StepRows) -> Outputs:
        assert self._pipeline is not None, "a stage that is not the last one has links"
        self._pipeline.pass_on(hidden, step)
        return Outputs()

    def _conclude(self, step: StepRows, hidden: Tensor, positions: Tensor, arrays: DeviceArrays) -> Outputs:
        """All that follows the last stage's hidden states [T, hidden_size]."""
        outputs = self._finish(step, hidden, positions, arrays)
        self._absorb(step, positions, arrays)
        prompts = self._prompt_logprobs(step, hidden, positions, arrays.token_rows)
        return outputs if prompts is None else outputs._replace(prompts=prompts)

    def _finish(self, step: StepRows, hidden: Tensor, positions: Tensor, arrays: DeviceArrays) -> Outputs:
        """Sample, report and count a step of which the last stage has hidden states [T, hidden_size]."""
        table, num_sampled = self._table, int(step.num_sampled.sum())
        sample_start, index = table.upload(starts(step.num_sampled), step.logit_index())
        outputs, token_ids = Outputs(), index[:0]
        if len(index):
            logits = self._model.logits(hidden.index_select(0, index))
            if num_sampled:
                own = index[:num_sampled]
                of = LogitRows(
                    step.sampled_rows, arrays.token_rows.index_select(0, own), positions.index_select(0, own) + 1
                )
                outputs = self._sample(step, logits[:num_sampled], of)
                assert outputs.token_ids is not None
                token_ids = outputs.token_ids
            if num_sampled < len(index):
                counts = table.num_candidates[step.rows[step.reports]].tolist()
                found = likeliest(logits[num_sampled:], max(counts))
                outputs = outputs._replace(likeliest=found, num_candidates=counts)
        counts = table.accept(arrays.rows, arrays.query_start, sample_start, token_ids)
        if self._pipeline is not None and num_sampled:
            self._pipeline.send_tokens(token_ids)
        if step.verifies:
            sampling = np.flatnonzero(step.num_sampled)
            kept = counts.index_select(0, *table.upload(sampling))
            outputs = outputs._replace(num_sampled=step.num_sampled[sampling], counts=kept)
        return outputs

    def _absorb(self, step: StepRows, positions: Tensor, arrays: DeviceArrays) -> None:
        """Let what drafts on the device follow a step that has been counted."""
        drafts = self._drafts
        if drafts is None or drafts.postpones(step.rows, step.query_lens, step.num_drafts):
            return
        drafts.absorb(arrays, positions, max_query_len=int(step.query_lens.max()), max_seq_len=step.max_seq_len)

    def _sample(self, step: StepRows, logits: Tensor, of: LogitRows) -> Outputs:
        drawn = self._sampler.sample(logits, of)
        outputs = Outputs(drawn.token_ids, forced=drawn.forced, failed=drawn.failed)
        if drawn.logprobs is None:
            return outputs
        sampling = step.num_sampled > 0
        num_top = self._sampler.logprobs.num_top(step.rows[sampling])
        parts = LogprobParts(drawn.logprobs, step.num_sampled[sampling], num_top)
        return outputs._replace(logprobs=parts)

    def _prompt_logprobs(
        self, step: StepRows, hidden: Tensor, positions: Tensor, token_rows: Tensor
    ) -> LogprobParts | None:
        """Of the tokens that follow those of the step in their prompts, for the rows that want them."""
        num_top = self._sampler.prompt_top[step.rows]
        ends = np.minimum(step.first + step.query_lens, self._table.num_prompt[step.rows] - 1)
        lens = np.where(num_top >= 0, np.maximum(ends - step.first, 0), 0)
        wanted = np.flatnonzero(lens)
        if not wanted.size:
            return None
        first = starts(step.query_lens)[wanted]
        index = np.concatenate([np.arange(at, at + count) for at, count in zip(first, lens[wanted], strict=True)])
        most, found = int(num_top[wanted].max()), []
        for part in self._table.upload(index)[0].split(_PROMPT_LOGITS):
            follow = self._table.next_tokens(token_rows.index_select(0, part), positions.index_select(0, part))
            logits = self._model.logits(hidden.index_select(0, part))
            found.append(TokenLogprobs(*ops.token_logprobs(logits, follow, min(most, logits.shape[1]))))
        return LogprobParts(join(found), lens[wanted], num_top[wanted])


class _Forward:
    """The model with its cache. It knows no runner, so that a runner's memory is free as soon as nobody holds it."""

    def __init__(self, model: DecoderModel, store: KVStore, groups: CacheGroups) -> None:
        self._model = model
        self._group_of = groups.of_layers()
        self._caches = store.layers

    def __call__(self, batch: InputBatch, given: Tensor) -> Tensor:
        """Hidden states [T, hidden_size]; the tokens' keys and values are in the cache from now on.

        `given` is what the model's stage begins with: the batch's token ids, or another stage's hidden states.
        """
        planned = [self._model.attention.plan(meta) for meta in batch.attention]
        places = zip(self._caches, self._group_of, strict=True)
        step = [LayerInput(batch.positions, cache, planned[group]) for cache, group in places]
        hidden: Tensor = self._model(given, step)
        return hidden
