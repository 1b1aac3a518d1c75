"""From a prompt to one of the engines: what each has of it, what each has to do, and the policy's choice."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raylm.config.routing import RoutingConfig
from raylm.core.block_hash import PrefixForm
from raylm.engine.backlog import Backlog
from raylm.serving.routing.policy import Candidate, Policy, Request
from raylm.serving.routing.prefixes import Naming, PrefixIndex, PromptKeys

_EXPECTED_S = 30.0
"""How long a prompt counts as cached where it was sent, without a word of its engine."""


class EngineView:
    """What one ingress knows of one engine."""

    def __init__(self, engine_id: str, backlog: Backlog, form: PrefixForm | None, config: RoutingConfig) -> None:
        """`form`: how the engine names its blocks; None where it does not tell of them."""
        self.engine_id = engine_id
        self.backlog = backlog
        self.index = None if form is None else PrefixIndex(form, limit=config.max_index_blocks)


class Prompt(NamedTuple):
    """What decides about the way of a request."""

    token_ids: list[int]
    session: str = ""
    salt: str = ""
    adapter: str = ""


class Selected(NamedTuple):
    """The number of an engine among those that were offered, why it is that one, and the tokens of the prompt that it
    has or will have before it gets to it."""

    at: int
    reason: str
    matched_tokens: int


@dataclass(slots=True)
class RouteCounts:
    """Since the start: decisions by reason, tokens of the prompts and those of them believed to be cached, seconds that
    it took."""

    by_reason: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    matched_tokens: int = 0
    seconds: float = 0.0


class Selector:
    """Chooses, counts, and remembers what it has sent where until the engines say so themselves."""

    def __init__(self, config: RoutingConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self.counts = RouteCounts()
        self._config = config
        self._policy = Policy(config)
        self._clock = clock

    def select(self, views: Sequence[EngineView], prompt: Prompt) -> Selected:
        """One of at least one view."""
        begun = self._clock()
        selected = Selected(0, "only", 0) if len(views) == 1 else self._select(views, prompt, begun)
        counts = self.counts
        counts.by_reason[selected.reason] += 1
        counts.prompt_tokens += len(prompt.token_ids)
        counts.matched_tokens += selected.matched_tokens
        counts.seconds += self._clock() - begun
        return selected

    def _select(self, views: Sequence[EngineView], prompt: Prompt, now: float) -> Selected:
        by_naming = self._by_naming(views, now) if self._config.policy == "prefix" else {}
        matched = [0] * len(views)
        named: list[PromptKeys | None] = [None] * len(views)
        part = b""
        for naming, members in by_naming.items():
            keys = PromptKeys(
                prompt.token_ids,
                naming,
                adapter=prompt.adapter,
                salt=prompt.salt,
                limit=self._config.max_match_blocks,
            )
            counts = keys.matched([index for at in members if (index := views[at].index) is not None])
            for at, count in zip(members, counts, strict=True):
                matched[at] = count * keys.block_size
                named[at] = keys
            part = part or keys.after(max(counts))
        candidates = [
            Candidate(view.engine_id, view.backlog.num_tokens, view.backlog.num_sequences, tokens)
            for view, tokens in zip(views, matched, strict=True)
        ]
        at, reason = self._policy.pick(candidates, Request(len(prompt.token_ids), prompt.session, part))
        keys_there, index = named[at], views[at].index
        if keys_there is not None and index is not None:
            there = matched[at] // keys_there.block_size
            index.expect(keys_there.keys[there:], now=now, seconds=_EXPECTED_S)
        return Selected(at, reason, matched[at])

    def _by_naming(self, views: Sequence[EngineView], now: float) -> dict[Naming, list[int]]:
        """The engines that name a prompt's blocks alike, which are all as a rule."""
        found: dict[Naming, list[int]] = {}
        for at, view in enumerate(views):
            if view.index is not None:
                view.index.expire(now)
                found.setdefault(view.index.naming, []).append(at)
        return found
