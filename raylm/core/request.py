"""A request inside the engine: token in, token out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from raylm.core.block_hash import BlockKey
from raylm.core.options import RequestOptions
from raylm.core.sampling import ALL_TOKENS, SamplingParams
from raylm.core.sampling_checks import MAX_TOKEN_ID
from raylm.core.step import Forced, Logprobs, RowSampling, Waited

if TYPE_CHECKING:
    from raylm.core.beam import BeamSearch


class Begun(NamedTuple):
    """A sequence that another engine began: its number among those of its prompt, and the tokens that it has."""

    number: int
    token_ids: list[int]


class Status(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    """In the queue."""
    PARKED = auto()
    """Waits for another sequence: a fork for the prompt, a beam for the other beams."""
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """One sequence and its progress: computed <= known token counts, and nothing else says where it stands.

    `token_ids` are the tokens that the scheduler has seen (prompt, then output); `num_known` counts those and the ones
    that steps on their way sample, which stay on the worker until their result comes back. While a step on its way
    verifies drafts, both counts are upper bounds: all drafts accepted. Progress is written by plan() and settle();
    begin_at() says where a request begins (again).
    """

    __slots__ = (
        "arrived",
        "block_ids",
        "deadline",
        "forced",
        "forks",
        "has_news",
        "horizon",
        "host_blocks",
        "id",
        "is_fork",
        "is_new",
        "is_reporting",
        "keys",
        "last_turn",
        "max_len",
        "num_cached",
        "num_charged",
        "num_computed",
        "num_known",
        "num_prompt",
        "num_slots",
        "num_stored",
        "num_unsure",
        "options",
        "order",
        "params",
        "prompt_logprobs",
        "queue_deadline",
        "rank",
        "root_hash",
        "row",
        "sampling",
        "search",
        "started",
        "status",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        stop_ids: frozenset[int],
        max_len: int,
        options: RequestOptions | None = None,
        arrived: float = 0.0,
        generated: Sequence[int] = (),
    ) -> None:
        """`generated`: tokens that another engine gave it."""
        self.id = id
        self.token_ids = [*prompt_ids, *generated]
        self.num_prompt = len(prompt_ids)
        self.params = params
        self.options = options or RequestOptions()
        self.arrived = arrived
        self.deadline = arrived + (self.options.deadline_s or math.inf)
        self.queue_deadline = arrived + (self.options.queue_timeout_s or math.inf)
        self.order = 0
        """Counts requests in the order of their arrival."""
        self.rank: tuple[int, ...] = ()
        """Among running requests the greatest gives way first; set by the policy."""
        self.sampling = _row_sampling(params, seed, len(prompt_ids), stop_ids)
        self.stop_ids = stop_ids
        self.max_len = max_len
        self.status = Status.WAITING
        self.row = -1
        self.num_known = len(self.token_ids)
        self.num_computed = 0
        self.num_unsure = 0
        """Drafts being verified by steps in flight. num_known and num_computed may each turn out lower by as many."""
        self.num_cached = 0
        """Tokens of the prompt found in the cache; 0 again once the client has been told."""
        self.has_news = False
        """Its next delta says more than tokens: see take_news()."""
        self.last_turn = 0
        """The step in which it last decoded, where running requests take turns."""
        self.is_new = False
        """It waits for its first step. Forks and beams never are: their prompt has had its turn."""
        self.started: float | None = None
        """When its first step was planned."""
        self.num_charged = 0
        """Tokens of the prompt that the policy has counted."""

        self.forks: list[Request] = []
        """Sequences of the same prompt that wait for this one to compute it."""
        self.search: BeamSearch | None = None
        """The beam search that this is a beam of."""
        self.is_reporting = False
        """A step on its way reports candidates for this beam."""
        self.forced: Forced | None = None
        """What its grammar forces it to say next, as far as a step has told."""
        self.prompt_logprobs: Logprobs | None = None
        """What steps have given of params.prompt_logprobs, until the client has it."""

        self._hold_nothing()

    def _hold_nothing(self) -> None:
        """What the cache manager keeps of a request."""
        self.block_ids: list[list[int]] = []
        self.host_blocks: list[list[int]] = []
        self.num_slots = 0
        """Positions that the blocks have room for."""
        self.is_fork = False
        """Its last block may be another's too."""
        self.keys: list[BlockKey] = []
        self.root_hash = b""
        self.num_stored = 0
        """Tokens whose blocks others can find."""
        self.horizon = 0
        """Below this many computed tokens, a decode step of this request needs no thought: see set_horizon."""

    @property
    def num_in_flight(self) -> int:
        """Tokens that steps on their way sample."""
        return self.num_known - len(self.token_ids)

    @property
    def num_to_compute(self) -> int:
        """Tokens that a step may compute now; 0 once every token it may generate is known or on its way."""
        return self.num_known - self.num_computed if self.num_known < self.max_len else 0

    @property
    def reports_prompt(self) -> bool:
        """Whether its next step gives log probabilities of tokens of its prompt."""
        return self.params.prompt_logprobs is not None and self.num_computed < self.num_prompt - 1

    def forced_tokens(self) -> list[int]:
        """What follows token_ids by its grammar, as far as a step has told."""
        if self.forced is None:
            return []
        _, first, forced = self.forced
        num_seen = len(self.token_ids) - first
        if num_seen < 0:
            return []
        if num_seen < len(forced) and self.token_ids[first:] == forced[:num_seen]:
            return forced[num_seen:]
        # All of them were sampled, or others: a text can be cut into tokens in several ways.
        self.forced = None
        return []

    def plan(self, num_tokens: int) -> bool:
        """A step computes its next `num_tokens` tokens, what is past the known ones as drafts. True when no known token
        is left: the step samples, unless this is a beam."""
        # Called for every decode: as few looks at fields as there can be.
        self.num_computed = computed = self.num_computed + num_tokens
        num_drafts = computed - self.num_known
        if num_drafts < 0:
            return False
        if num_drafts:
            self.num_unsure += num_drafts
        if self.search is None:
            self.num_known = computed + 1
        return True

    def settle(self, token_ids: list[int], num_planned: int) -> None:
        """A step's result is here: `token_ids` follow the tokens seen so far, where plan() has counted on
        `num_planned`."""
        self.token_ids += token_ids
        self.num_known += len(token_ids) - num_planned
        self.num_unsure -= max(num_planned - 1, 0)
        # Of a decoding request all known tokens but the last one are computed; one that was preempted has fewer.
        self.num_computed = min(self.num_computed, self.num_known - 1)

    def begin_at(self, num_computed: int) -> None:
        """The first `num_computed` tokens need not be computed (again)."""
        self.num_computed = num_computed

    def begin(self, started: float) -> None:
        """Its first step, or that of the sequence which computes its prompt, was planned then."""
        if self.started is None:
            self.started = started
            self.has_news = True

    def take_news(self, now: float) -> tuple[int, Logprobs | None, Waited | None]:
        """What the next delta says beside tokens: tokens found in the cache, log probabilities of the prompt, and how
        long the first token took."""
        if not self.has_news:
            return 0, None, None
        waited = None
        if self.started is not None:
            waited = Waited(self.started - self.arrived, now - self.started)
        news = self.num_cached, self.prompt_logprobs, waited
        self.num_cached, self.prompt_logprobs, self.has_news = 0, None, False
        return news

    def set_horizon(self) -> None:
        """Note how far it can decode: it has slots, and one token more is still wanted. A beam never just decodes, nor
        does a prompt's last token."""
        just_decodes = self.search is None and self.num_computed >= self.num_prompt
        self.horizon = min(self.num_slots, self.max_len - 1) if just_decodes else 0

    def finish_reason(self, token_id: int) -> str | None:
        """Why the request ends with `token_id` as its newest token, or None when it goes on."""
        if token_id in self.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_len else None


def _row_sampling(params: SamplingParams, seed: int, num_prompt: int, stop_ids: frozenset[int]) -> RowSampling:
    ends = sorted(stop_ids) if params.min_tokens or params.structure is not None else []
    return RowSampling(params, seed, num_prompt, ends, _num_candidates(params))


def _num_candidates(params: SamplingParams) -> int:
    """Tokens that a beam reports: enough to go on with, and those whose log probabilities were asked for."""
    if not params.beam_width:
        return 0
    wanted = params.logprobs or 0
    return MAX_TOKEN_ID if wanted == ALL_TOKENS else max(2 * params.beam_width, wanted)
