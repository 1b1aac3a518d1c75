"""Prompts cut to their last tokens, where a request asks for it."""

from __future__ import annotations

from raylm.core.sampling_checks import integer
from raylm.errors import RequestRejected

FIELD = "truncate_prompt_tokens"
ALL_THAT_FIT = -1
MAX_TOKENS = 2**18
"""A longer prompt is refused and not truncated: as many tokens are made before the first of them are dropped."""


class Truncation:
    """How many of a prompt's last tokens are kept. Special tokens at its beginning are tokens like the others."""

    def __init__(self, wanted: int) -> None:
        """`wanted` tokens, or -1 for as many as the model has room for. Raises RequestRejected."""
        if wanted == 0:
            raise RequestRejected(f"{FIELD} must be -1 or at least 1, got 0", param=FIELD)
        self._wanted = integer(FIELD, wanted, ALL_THAT_FIT, 2**31 - 1)

    def kept(self, token_ids: list[int], *, room: int) -> list[int]:
        """The last tokens; `room` is what -1 keeps."""
        return token_ids[-max(1, room if self._wanted == ALL_THAT_FIT else self._wanted) :]
