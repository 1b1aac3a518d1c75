"""How much of a step prefill may take beside running requests, how long steps take, and when to plan the next one."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from raylm.config.resolve import ResolvedScheduler

_AIM = 0.9
"""Share of the target that steps are planned for; the rest is for noise."""
_MIN_TOKENS = 16
"""A prompt gets so many tokens a step however slow steps are."""
_MEMORY = 0.9
"""Weight of a step when the next one comes: the pacer remembers some ten steps."""
_MAX_GROWTH = 2
"""A step is never planned for more than so many times the tokens of a recent one."""
_RECENT_MEMORY = 0.997
"""What the most tokens of a step are worth a step later: half after 230, so that a prompt now and then starts where the
last one was."""
_WAITING = 4
"""Up to so many waiting requests share a chunk; with more, each adds a share of a chunk to the step."""
_OUTLIER = 4
"""A step counts as at most so many times as long as it should be, so that one hiccup is not taken for the load."""
_DELAY_SHARE = 0.9
_HANDOVER_S = 2e-3
"""A plan is made so long, and a tenth of the running step, before that step ends: the time in which the host plans a
step, sends it and launches its first kernels, with room for noise."""
_SEEN_STEPS = 64
"""Steps that are remembered."""
_LIKE_STEPS = 8
"""Of those like the running one, so many of the last count."""
_ALIKE = 16
"""Steps are alike whose tokens differ by at most one in so many."""
_MIN_SPREAD = 0.05
_MIN_SPREAD_TOKENS = 4.0
"""Standard deviation of the tokens of recent steps, over their mean and in tokens, that a slope is read from."""
_MIN_SLOPE = 1e-9


class StepCost:
    """Seconds of a step as a line over its tokens: least squares over recent steps, exponentially weighted.

    A token of a prompt and one of a decode cost a model's linear layers the same; what else decodes cost changes as
    slowly as their number, and the line's height follows it. Once all steps are alike, which says nothing of a slope,
    the last slope stays and only the height is fitted.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._weight = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self.slope: float | None = None
        """Seconds a token more; None before steps of different sizes were seen."""

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a step."""
        if self.slope is not None:
            expected = self._seconds + (tokens - self._tokens) * self.slope
            seconds = min(seconds, _OUTLIER * max(expected, self._seconds))
        # Weighted means and central moments, updated in place: no difference of large sums.
        self._weight = self._memory * self._weight + 1
        away = tokens - self._tokens
        self._tokens += away / self._weight
        self._seconds += (seconds - self._seconds) / self._weight
        self._variance = self._memory * self._variance + away * (tokens - self._tokens)
        self._covariance = self._memory * self._covariance + away * (seconds - self._seconds)
        spread = max(_MIN_SPREAD_TOKENS, _MIN_SPREAD * self._tokens)
        if self._variance >= self._weight * spread**2:
            self.slope = max(self._covariance / self._variance, _MIN_SLOPE)

    def tokens_in(self, seconds: float) -> float:
        """Tokens of a step that takes so long; 0 before the first step was seen, less than that where none can."""
        if not self._weight:
            return 0.0
        slope = self.slope
        if slope is None:
            # Too steep, as if a step without tokens took no time: careful until a slope is known.
            slope = max(self._seconds / self._tokens, _MIN_SLOPE)
        return self._tokens + (seconds - self._seconds) / slope


class PlanDelay:
    """Until when the plan of the next step can wait for requests that are still to come.

    Two plans are in flight so that the device never waits for one. A plan that is sent as early as possible is made a
    whole step before it runs, and misses the requests that arrive in that time. So the plan is made shortly before the
    running step ends, by the shortest of the last steps of about as many tokens. It does not wait where steps are too
    short for that, nor behind a step that is like none before.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_SEEN_STEPS)

    def until(self, tokens: int, begin: float) -> float:
        """When to make the plan behind a step of so many tokens that began at `begin`."""
        like = [seconds for seen, seconds in self._seen if _ALIKE * abs(seen - tokens) <= tokens]
        return begin + _DELAY_SHARE * min(like[-_LIKE_STEPS:], default=0.0) - _HANDOVER_S

    def observe(self, tokens: int, seconds: float) -> None:
        """Say how long a step of so many tokens took."""
        self._seen.append((tokens, seconds))


class PrefillBudget(NamedTuple):
    """Tokens that a step may compute of prompts."""

    tokens: int
    of_one: int
    """Of one prompt, at most."""


class PrefillPacer:
    """How many tokens of prompts a step gets beside running requests.

    Without a target that is `prefill_chunk`, or what the budget leaves. Where requests pile up, it is a quarter of a
    chunk for each of them: the sooner they run too, the more of them share the reading of weights. One prompt gets at
    most a chunk, so that a long prompt does not take what a step has for the requests behind it.

    With `target_itl_ms` it plans for nine tenths of the target by the cost of recent steps (StepCost). That finds the
    budget in a few steps, where raising and cutting it by rule would take dozens and pass the target again and again.
    Growth to at most twice a recent step bounds what a wrong line can do; a floor of 16 tokens keeps prompts going when
    decodes alone take longer than the target.
    """

    def __init__(self, config: ResolvedScheduler) -> None:
        self._full = config.max_num_batched_tokens
        self._aim = None if config.target_itl_ms is None else _AIM * config.target_itl_ms / 1000
        chunk = config.prefill_chunk if self._aim is None else None
        self._chunk = chunk or self._full
        self._protects_decodes = self._aim is not None or chunk is not None
        self._least = min(_MIN_TOKENS, self._full)
        self._share = config.max_prompt_share
        self._cost = StepCost(_MEMORY)
        self._recent = 0.0
        """The most tokens of a step, less with every step since."""

    def budget(self, *, num_decodes: int, num_prompts: int, num_waiting: int) -> PrefillBudget:
        """Prompt tokens of the next step, in which `num_decodes` requests decode. `num_prompts` prompts have begun, and
        `num_waiting` requests could begin. Without decodes prompts get the whole step."""
        tokens = self._tokens(num_decodes, num_waiting)
        of_one = min(tokens, self._chunk) if num_decodes else tokens
        if num_prompts + num_waiting > 1:
            of_one = min(of_one, max(self._least, int(self._share * tokens)))
        return PrefillBudget(tokens, of_one)

    def fills_step(self, tokens: int) -> bool:
        """Whether prompts of so many tokens fill a step, and neither prefill_chunk nor target_itl_ms limits them."""
        return tokens >= self._full and not self._protects_decodes

    def _tokens(self, num_decodes: int, num_waiting: int) -> int:
        if not num_decodes:
            return self._full
        if self._aim is None:
            return min(self._full, self._chunk * max(num_waiting, _WAITING) // _WAITING)
        tokens = min(self._cost.tokens_in(self._aim), _MAX_GROWTH * self._recent)
        return max(self._least, min(self._full, int(tokens) - num_decodes))

    def observe(self, tokens: int, seconds: float) -> None:
        """Say how long a step of so many tokens took: of prompts, of decodes and of drafts."""
        if self._aim is None or not tokens:
            return
        self._cost.observe(tokens, seconds)
        self._recent = max(float(tokens), _RECENT_MEMORY * self._recent)


class StepTimer:
    """How long each step takes when several are under way: the worker computes one after the other, so a step begins
    when it is submitted or when the one before it is done, whichever is later."""

    def __init__(self) -> None:
        self._submitted: deque[float] = deque()
        self._last_end = float("-inf")

    def submitted(self, now: float) -> None:
        """A step went to the workers."""
        self._submitted.append(now)

    def finished(self, now: float) -> float:
        """The result of the oldest step came; the seconds that the step took."""
        begin = max(self._submitted.popleft(), self._last_end)
        self._last_end = now
        return now - begin

    @property
    def began(self) -> float:
        """When the step that runs began. There must be one."""
        return max(self._submitted[0], self._last_end)
