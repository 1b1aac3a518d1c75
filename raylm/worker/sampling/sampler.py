"""From logits to sampled tokens."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from torch import Tensor

from raylm import ops
from raylm.core.sampling import SamplingParams
from raylm.core.step import Forced, NewRow, StepPlan
from raylm.grammar.matchers import GrammarMatchers
from raylm.parallel.collectives import of_first
from raylm.parallel.context import ParallelContext
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling.grammar import GrammarStage
from raylm.worker.sampling.logprobs import LogprobWishes, TokenLogprobs, as_count, join
from raylm.worker.sampling.penalties import Penalties
from raylm.worker.sampling.processed import processed, truncates
from raylm.worker.sampling.processors import LogitsProcessor, Processors
from raylm.worker.sampling.stages import ROWS_AT_A_TIME, LogitRows, LogitsStage, RowNotes
from raylm.worker.sampling.thinking import Thinking
from raylm.worker.sampling.tokens import AllowedTokens, BadWords, LogitBias, MinTokens
from raylm.worker.sampling.typical import Typical

NO_STAGE = frozenset(
    (
        *("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "n", "length_penalty", "early_stopping"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("thinking", "skip_special_tokens", "spaces_between_special_tokens"),
    )
)
"""Fields of SamplingParams that by themselves ask for no stage and for no log probabilities. A request that sets no
other field skips the stages' set-up. A new field is not among them, so it cannot be forgotten here."""
_ASKING = [field for field in fields(SamplingParams) if field.name not in NO_STAGE]
_what_is_asked = attrgetter(*(field.name for field in _ASKING))
_settings_of = attrgetter("temperature", "top_k", "top_p", "min_p")
_NOTHING = tuple(field.default for field in _ASKING)


class Settings(NamedTuple):
    """How some logits are sampled from, in the order of ops.sample's arguments; each [M], on the host."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray


class Drawn(NamedTuple):
    """What was sampled from M rows of logits, on the device."""

    token_ids: Tensor
    """int64 [M]."""
    logprobs: TokenLogprobs | None
    forced: list[Forced] = []
    failed: list[tuple[int, str]] = []
    """Of rows, as Sampled has them."""


class Sampler:
    """Samples tokens of rows, each as its request wants: stages change the logits, then a token is drawn.

    Log probabilities are the model's own, of the logits before all stages at temperature 1; with `processed` they are
    those of the distribution that the token is drawn from.
    """

    def __init__(
        self,
        table: RequestTable,
        context: ParallelContext,
        vocab_size: int,
        processors: dict[str, LogitsProcessor] | None = None,
        matchers: GrammarMatchers | None = None,
        *,
        processed: bool = False,
        tells_forced: bool = False,
    ) -> None:
        """`processed`: log probabilities are those of the distribution that is sampled from. `tells_forced`: what
        grammars force rows to say is told."""
        self._table = table
        self._processed = processed
        self._context = context
        self._notes = RowNotes()
        self._grammar = GrammarStage(table, matchers, self._notes, tells_forced=tells_forced)
        self._stages = make_stages(table, vocab_size, Processors(table, processors or {}, self._notes), self._grammar)
        self._needs_stage = np.zeros((len(self._stages), table.num_rows), dtype=np.bool_)
        self.logprobs = LogprobWishes(table)
        self.prompt_top = np.full(table.num_rows, -1, dtype=np.int64)
        """Likeliest tokens that a row wants beside each token of its prompt; -1 where it wants nothing of it."""
        self._is_plain = np.ones(table.num_rows, dtype=np.bool_)
        self._asking: set[int] = set()
        """Rows whose last request has set up stages or log probabilities; in all others these are void."""
        self._settings = Settings(
            np.zeros(table.num_rows, dtype=np.float32),
            np.zeros(table.num_rows, dtype=np.int64),
            np.ones(table.num_rows, dtype=np.float32),
            np.zeros(table.num_rows, dtype=np.float32),
            np.zeros(table.num_rows, dtype=np.int64),
        )

    def begin(self, new_rows: list[NewRow]) -> None:
        """Requests take rows."""
        rows = [new.row for new in new_rows]
        settings = [(*_settings_of(new.sampling.params), new.sampling.seed) for new in new_rows]
        for array, values in zip(self._settings, zip(*settings, strict=True), strict=True):
            array[rows] = values
        for new in new_rows:
            asks = new.sampling.num_candidates or _what_is_asked(new.sampling.params) != _NOTHING
            if asks or new.row in self._asking:
                self._set_up(new)
                (self._asking.add if asks else self._asking.discard)(new.row)

    def _set_up(self, new: NewRow) -> None:
        """Tell everything that a row may ask for about its request; what the row's last one asked for is void."""
        row, sampling = new.row, new.sampling
        for index, stage in enumerate(self._stages):
            self._needs_stage[index, row] = stage.set_row(row, sampling)
        self.prompt_top[row] = as_count(sampling.params.prompt_logprobs)
        wants_logprobs = self.logprobs.set_row(row, sampling)
        self._is_plain[row] = not (wants_logprobs or sampling.num_candidates or self._needs_stage[:, row].any())

    def look_ahead(self, plan: StepPlan) -> None:
        """Ask the device for what the sampling of a plan's rows needs on the host; to be called once the table has
        taken the plan, and before its forward is queued."""
        self._grammar.ask(plan)

    def are_plain(self, rows: np.ndarray) -> bool:
        """Whether the rows want nothing but tokens, sampled from the logits as they are."""
        return bool(self._is_plain[rows].all())

    def settings(self, rows: np.ndarray) -> Settings:
        """How the rows sample."""
        return Settings(*(values[rows] for values in self._settings))

    def sample(self, logits: Tensor, of: LogitRows) -> Drawn:
        """A token from each of the logits [M, vocab], which may be overwritten."""
        most = self.logprobs.most(of.rows)
        wants_logprobs = most >= 0
        keeps_raw = wants_logprobs and not self._processed and self._needs_stage[:, of.rows].any()
        told = logits.clone() if keeps_raw else logits
        logits = self.staged(logits, of)
        host = self.settings(of.rows)
        settings = self._table.upload(*host)
        token_ids = ops.sample(logits, *settings, of.positions)
        if not ops.sample_is_async(logits.device, logits.shape[1]):
            # torch's sums on a GPU may differ in the last bit from one time to the next.
            token_ids = of_first(token_ids, self._context)
        notes = self._notes.take(of.rows)
        if not wants_logprobs:
            return Drawn(token_ids, None, *notes)
        if self._processed:
            return Drawn(token_ids, self._processed_logprobs(logits, token_ids, host, of.rows), *notes)
        return Drawn(token_ids, self.logprobs.of_sampled(told, token_ids, of.rows, most), *notes)

    def _processed_logprobs(
        self, logits: Tensor, token_ids: Tensor, settings: Settings, rows: np.ndarray
    ) -> TokenLogprobs:
        """Log probabilities of the sampled tokens [M] in the distributions that they were drawn from."""
        parts, most = [], self.logprobs.most(rows)
        for start in range(0, len(rows), ROWS_AT_A_TIME):
            own = slice(start, start + ROWS_AT_A_TIME)
            host = [values[own] for values in settings[:4]]
            temperature, *truncation = self._table.upload(*host)
            told = processed(logits[own], temperature, truncation if truncates(*host[1:]) else None)
            parts.append(self.logprobs.of_sampled(told, token_ids[own], rows[own], most))
        return join(parts)

    def staged(self, logits: Tensor, of: LogitRows) -> Tensor:
        """The logits [M, vocab] that are sampled from; `logits` may be overwritten."""
        for stage, needs in zip(self._stages, self._needs_stage, strict=True):
            if needs[of.rows].any():
                logits = stage.apply(logits, of)
        return logits


def make_stages(
    table: RequestTable, vocab_size: int, processors: LogitsStage, grammar: LogitsStage
) -> list[LogitsStage]:
    """All stages, in the order in which they change logits: a mask must come after what could lift it."""
    return [
        Penalties(table),
        LogitBias(table),
        processors,
        BadWords(table),
        AllowedTokens(table, vocab_size),
        grammar,
        MinTokens(table),
        Typical(table),
        Thinking(table),
    ]
