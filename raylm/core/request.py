"""A request inside the engine: token in, token out."""

from __future__ import annotations

from enum import Enum, auto

from raylm.core.sampling import SamplingParams
from raylm.core.step import RowSampling


class Status(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """One sequence and its progress: computed <= known token counts, and nothing else says where it stands.

    `token_ids` are the tokens that the scheduler has seen (prompt, then output); `num_in_flight` more have been
    sampled, or will be by steps on their way, and stay on the worker until their result comes back.
    """

    __slots__ = (
        "block_ids",
        "id",
        "max_len",
        "num_computed",
        "num_in_flight",
        "num_prompt",
        "params",
        "row",
        "sampling",
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
    ) -> None:
        self.id = id
        self.token_ids = list(prompt_ids)
        self.num_prompt = len(prompt_ids)
        self.params = params
        self.sampling = RowSampling(params.temperature, params.top_p, params.top_k, params.min_p, seed)
        self.stop_ids = stop_ids
        self.max_len = max_len
        self.status = Status.WAITING
        self.row = -1
        self.block_ids: list[int] = []
        self.num_computed = 0
        self.num_in_flight = 0

    @property
    def num_known(self) -> int:
        """Tokens whose values the worker knows or will know when it runs the next step."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_to_compute(self) -> int:
        """Tokens that a step may compute now; 0 once every token it may generate is known or on its way."""
        return self.num_known - self.num_computed if self.num_known < self.max_len else 0

    def finish_reason(self, token_id: int) -> str | None:
        """Why the request ends with `token_id` as its newest token, or None when it goes on."""
        if token_id in self.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_len else None
