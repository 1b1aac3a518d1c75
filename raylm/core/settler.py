"""What becomes of a step's result: each request's progress, and what its client is told."""

from __future__ import annotations

from raylm.core.drafting import Drafter
from raylm.core.plan import PlanBuilder
from raylm.core.policies import Policy
from raylm.core.request import Request, Status
from raylm.core.step import Logprobs, Sampled, TokenDelta, join_logprobs

_new = tuple.__new__
_LOGPROBS = TokenDelta._fields.index("logprobs")


class Settler:
    """Gives requests the tokens that a step sampled for them."""

    def __init__(self, policy: Policy, drafter: Drafter | None) -> None:
        self._policy = policy
        self._drafter = drafter
        self.rejected: dict[Request, None] = {}
        """Requests of which a step rejected drafts: the workers' bounds on what they know are too high, until a plan
        says the new ones."""

    def settle(self, builder: PlanBuilder, result: Sampled, now: float) -> list[TokenDelta]:
        """The deltas of all requests that sampled and live. One with a finish reason has still to be ended."""
        self._take_prompt_logprobs(builder, result)
        if builder.verifying:
            deltas = self._take_several(builder, result, now)
        else:
            deltas = self._take_one_each(builder.sampling, result.token_ids, now)
        for forced in result.forced:
            builder.sampling[forced.nth].forced = forced
        if result.logprobs:
            deltas = _with_logprobs(deltas, builder.sampling, result.logprobs)
        return _with_failures(deltas, builder.sampling, result.failed) if result.failed else deltas

    def _take_one_each(self, sampling: list[Request], token_ids: list[int], now: float) -> list[TokenDelta]:
        """Every request has one token, as its plan said: its counts stand."""
        deltas = []
        finished = Status.FINISHED
        self.charge(sampling)
        for request, token_id in zip(sampling, token_ids, strict=True):
            if request.status is finished:
                continue
            tokens = request.token_ids
            tokens.append(token_id)
            if token_id in request.stop_ids or len(tokens) >= request.max_len or request.has_news:
                deltas.append(_notable(request, [token_id], now))
            else:
                # As TokenDelta(request.id, [token_id]), whose own constructor costs as much as the rest of this loop.
                deltas.append(_new(TokenDelta, (request.id, [token_id], None, None, 0, None, None, None)))
        return deltas

    def _take_several(self, builder: PlanBuilder, result: Sampled, now: float) -> list[TokenDelta]:
        """Every request has the drafts that were accepted, and one token more."""
        deltas, end = [], 0
        for index, request in enumerate(builder.sampling):
            start, end = end, end + result.counts[index]
            if request.status is Status.FINISHED:
                continue
            proposal = builder.verifying.get(index)
            num_drafts = proposal.num_drafts if proposal is not None else 0
            token_ids = _up_to_stop(result.token_ids[start:end], request.stop_ids)
            request.settle(token_ids, 1 + num_drafts)
            if len(token_ids) <= num_drafts:
                self.rejected[request] = None
            if self._drafter is not None and proposal is not None:
                self._drafter.settle(request, proposal, len(token_ids) - 1)
            self.charge([request], len(token_ids))
            deltas.append(_notable(request, token_ids, now))
        return deltas

    def _take_prompt_logprobs(self, builder: PlanBuilder, result: Sampled) -> None:
        """Keep what the step says of prompts; a request that was preempted computes some of it again."""
        for (request, first), found in zip(builder.reporting_prompts, result.prompt_logprobs, strict=True):
            if len(request.token_ids) > request.num_prompt:
                continue  # The client has them: it was preempted later.
            # The token at position 0 follows none, so the first one said is that of position 1.
            num_told = len(request.prompt_logprobs.values) if request.prompt_logprobs is not None else 0
            request.prompt_logprobs = join_logprobs([request.prompt_logprobs, found.since(num_told - first)])
            request.has_news = True

    def charge(self, requests: list[Request], num_tokens: int = 1) -> None:
        """Tell the policy of so many tokens for each of these."""
        if self._policy.counts_tokens:
            for request in requests:
                if request.status is not Status.FINISHED:
                    self._policy.served(request, 0, num_tokens)


def _notable(request: Request, token_ids: list[int], now: float) -> TokenDelta:
    """The delta of tokens that are the first, or the last, or several."""
    num_cached, prompt_logprobs, waited = request.take_news(now)
    reason = request.finish_reason(token_ids[-1])
    if request.params.max_tokens == 0:
        # The step that computed the prompt sampled a token that nobody wants.
        token_ids, reason = [], "length"
    return TokenDelta(request.id, token_ids, reason, None, num_cached, None, prompt_logprobs, waited)


def _up_to_stop(token_ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    """The tokens up to the first that ends a request."""
    for index, token in enumerate(token_ids):
        if token in stop_ids:
            return token_ids[: index + 1]
    return token_ids


def _with_logprobs(
    deltas: list[TokenDelta], sampling: list[Request], logprobs: list[tuple[int, Logprobs]]
) -> list[TokenDelta]:
    wanted = {sampling[index].id: found for index, found in logprobs}
    return [_said(delta, wanted.get(delta.request_id)) for delta in deltas]


def _with_failures(
    deltas: list[TokenDelta], sampling: list[Request], failed: list[tuple[int, str]]
) -> list[TokenDelta]:
    """The deltas, where those of rows that failed say so and bring no token."""
    reasons = {sampling[index].id: reason for index, reason in failed}
    return [
        TokenDelta(delta.request_id, [], "error", reasons[delta.request_id]) if delta.request_id in reasons else delta
        for delta in deltas
    ]


def _said(delta: TokenDelta, found: Logprobs | None) -> TokenDelta:
    if found is None:
        return delta
    count = len(delta.token_ids)
    if count < len(found.values):
        found = found.first(count)
    # As delta._replace(logprobs=found), which takes five times as long.
    return _new(TokenDelta, (*delta[:_LOGPROBS], found, *delta[_LOGPROBS + 1 :]))
