"""A request inside the engine: token in, token out."""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import TYPE_CHECKING

from raylm.core.block_hash import BlockKey
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.step import RowPenalties, RowSampling

if TYPE_CHECKING:
    from raylm.core.beam import BeamSearch


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
    that steps on their way sample, which stay on the worker until their result comes back.
    """

    __slots__ = (
        "arrived",
        "block_ids",
        "deadline",
        "forks",
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
        "options",
        "order",
        "params",
        "queue_deadline",
        "rank",
        "root_hash",
        "row",
        "sampling",
        "search",
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
    ) -> None:
        self.id = id
        self.token_ids = list(prompt_ids)
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
        self.sampling = _row_sampling(params, seed, len(prompt_ids))
        self.stop_ids = stop_ids
        self.max_len = max_len
        self.status = Status.WAITING
        self.row = -1
        self.num_known = len(prompt_ids)
        self.num_computed = 0
        self.num_cached = 0
        """Tokens of the prompt found in the cache; 0 again once the client has been told."""
        self.last_turn = 0
        """The step in which it last decoded, where running requests take turns."""
        self.is_new = False
        """It waits for its first step. Forks and beams never are: their prompt has had its turn."""
        self.num_charged = 0
        """Tokens of the prompt that the policy has counted."""

        self.forks: list[Request] = []
        """Sequences of the same prompt that wait for this one to compute it."""
        self.search: BeamSearch | None = None
        """The beam search that this is a beam of."""
        self.is_reporting = False
        """A step on its way reports candidates for this beam."""

        # The cache manager's.
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


def _row_sampling(params: SamplingParams, seed: int, num_prompt: int) -> RowSampling:
    return RowSampling(
        params.temperature,
        params.top_p,
        params.top_k,
        params.min_p,
        seed,
        params.logprobs is not None,
        2 * params.beam_width,
        _row_penalties(params, num_prompt),
    )


def _row_penalties(params: SamplingParams, num_prompt: int) -> RowPenalties | None:
    """None where they change nothing. A beam does not sample."""
    values = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return None if params.beam_width or values == (1, 0, 0) else RowPenalties(num_prompt, *values)
