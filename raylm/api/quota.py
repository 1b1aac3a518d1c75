"""How much a tenant may ask for, as the API sees it: a request is counted when it comes, its tokens are reserved when
they are known, and settled when it has ended."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol

from raylm.errors import RaylmError
from raylm.generation.choices import Tally
from raylm.generation.job import Job, TokenLimit

Headers = tuple[tuple[bytes, bytes], ...]
OPEN_TOKENS = 1024
"""What is reserved for each answer to a request that does not say how long it may get. What it takes beyond that is
charged when it has ended."""


class Hold(Protocol):
    """Tokens that a request has reserved, and its place among the tenant's running ones."""

    def settle(self, prompt_tokens: int, generated_tokens: int) -> None:
        """The request has ended and used so many. Only the first call counts."""
        ...


class Quota(Protocol):
    """What one tenant may still ask for."""

    async def begin(self) -> None:
        """Count a request. Raises HttpError 429."""
        ...

    async def reserve(self, num_tokens: int) -> Hold:
        """Let a request run that may use so many tokens. Raises HttpError 429."""
        ...

    def headers(self) -> Headers:
        """What answers say of the limits."""
        ...


class _Nothing:
    """Of a request without limits."""

    def settle(self, prompt_tokens: int, generated_tokens: int) -> None:
        return


class _Unlimited:
    async def begin(self) -> None:
        return

    async def reserve(self, num_tokens: int) -> Hold:
        return _NOTHING

    def headers(self) -> Headers:
        return ()


_NOTHING = _Nothing()
UNLIMITED: Quota = _Unlimited()


@asynccontextmanager
async def reserved(quota: Quota, job: Job, limit: TokenLimit, tally: Tally) -> AsyncGenerator[None, None]:
    """What runs in here has reserved its tokens, and pays for those in `tally`; for none where an error ended it before
    it had any. Raises HttpError 429."""
    hold = await quota.reserve(most_tokens(job, limit))
    is_free = False
    try:
        yield
    except RaylmError:
        is_free = not tally.counts().completion
        raise
    finally:
        counts = tally.counts()
        hold.settle(*((0, 0) if is_free else (counts.prompt, counts.completion)))


def most_tokens(job: Job, limit: TokenLimit) -> int:
    """The most that a request may use: its prompts once, its answers as long as they may get."""
    is_open = limit.value is None and limit.default is None
    most = job.prompt_tokens
    for prompt in job.prompts:
        if not prompt.echo_only:
            longest = prompt.params.max_tokens or 0
            most += prompt.params.n * (min(longest, OPEN_TOKENS) if is_open else longest)
    return most
