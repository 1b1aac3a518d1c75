"""Beam search: which sequences go on, and which have ended.

Every beam is a request of its own, with blocks that it shares with the others. A step reports the likeliest next tokens
of each beam; once all beams have reported, the best 2 * width continuations are looked at in order: those that end are
kept as hypotheses, the first `width` others become the next beams (Graves, 2012; the length penalty is a power of the
length as in Wu et al., 2016).

Text is none of this package's business: whether a sequence has reached a stop string is asked of a TextEnds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from raylm.core.request import Request, Status
from raylm.core.sampling import ALL_TOKENS
from raylm.core.step import Candidates, Logprobs, TokenDelta, Waited

TextEnds = Callable[[list[int]], bool]
"""Whether the last of an output's tokens completes a stop string; those before it have been asked about."""


class Trace(NamedTuple):
    """Log probabilities of a beam's last token, and the trace of the tokens before it, which beams share."""

    before: Trace | None
    value: float
    rank: int
    report: Candidates
    """The likeliest tokens at its position."""


class Continuation(NamedTuple):
    """A beam and the token that it goes on with."""

    parent: Request
    token_id: int
    score: float
    rank: int
    """The token's place among all that could have followed; 1 is the likeliest."""
    trace: Trace | None = None


class _Hypothesis(NamedTuple):
    score: float
    order: int
    token_ids: list[int]
    reason: str
    trace: Trace | None


class BeamSearch:
    """One search: its beams with their scores (sums of log probabilities), and what has ended so far."""

    def __init__(self, first: Request, ids: Sequence[str], text_ends: TextEnds | None = None) -> None:
        """`first` holds the prompt; the best len(ids) sequences will be delivered under `ids`. `text_ends` looks for
        stop strings."""
        params = first.params
        self.ids = list(ids)
        self._text_ends = text_ends
        self._num_top = params.logprobs
        self._says_nothing = params.max_tokens == 0
        self._num_cached = 0
        self._prompt_logprobs: Logprobs | None = None
        self._waited: Waited | None = None
        self.num_beams_made = 0
        self._num_prompt = first.num_prompt
        self._max_len = first.max_len
        self._stop_ids = first.stop_ids
        self._width = params.beam_width
        self._penalty = params.length_penalty
        self._stops_early = params.early_stopping
        self._scores: dict[Request, float] = {first: 0.0}
        self._traces: dict[Request, Trace] = {}
        """Of beams with tokens, where log probabilities were asked for."""
        self._reports: dict[Request, Candidates] = {}
        self._ended: list[_Hypothesis] = []
        self._num_ended = 0

    @property
    def beams(self) -> list[Request]:
        return list(self._scores)

    def has_reported(self, beam: Request) -> bool:
        """Whether the beam waits for the others."""
        return beam in self._reports

    def report(self, beam: Request, candidates: Candidates, now: float) -> bool:
        """Take a beam's candidates; True when every beam has reported and advance() is due."""
        num_cached, prompt_logprobs, waited = beam.take_news(now)
        self._num_cached = self._num_cached or num_cached
        self._prompt_logprobs = self._prompt_logprobs or prompt_logprobs
        self._waited = self._waited or waited
        self._reports[beam] = candidates
        return len(self._reports) == len(self._scores)

    def advance(self) -> list[Continuation]:
        """Choose the next beams, the likeliest first; none when the search is over. replace() must follow."""
        ranked = sorted(
            (
                Continuation(beam, token, self._scores[beam] + logprob, rank)
                for beam, report in self._reports.items()
                for rank, (token, logprob) in enumerate(zip(*report, strict=True), start=1)
            ),
            key=lambda one: -one.score,
        )[: 2 * self._width]
        if self._num_top is not None:
            ranked = [one._replace(trace=self._traced(one)) for one in ranked]
        self._reports.clear()
        chosen: list[Continuation] = []
        for one in ranked:
            reason = self._end_of(one)
            if reason is not None:
                self._end(one, reason)
            else:
                chosen.append(one)
            if len(chosen) == self._width:
                break
        return [] if not chosen or self._is_over(chosen[0].score, len(chosen[0].parent.token_ids) + 1) else chosen

    def replace(self, beams: dict[Request, Continuation]) -> None:
        """The beams that go on, each with how it came about."""
        self._scores = {beam: one.score for beam, one in beams.items()}
        self._traces = {beam: one.trace for beam, one in beams.items() if one.trace is not None}

    def results(self) -> list[TokenDelta]:
        """The best sequences, once the search is over."""
        best = heapq.nlargest(len(self.ids), self._ended)
        deltas = [self._delta(id, found) for id, found in zip(self.ids, best, strict=False)]
        # Every token may be a stop token: then there are fewer sequences than were asked for.
        deltas += [TokenDelta(id, [], "stop") for id in self.ids[len(best) :]]
        deltas[0] = deltas[0]._replace(num_cached_tokens=self._num_cached, prompt_logprobs=self._prompt_logprobs)
        return [delta._replace(waited=self._waited) for delta in deltas]

    def _delta(self, id: str, found: _Hypothesis) -> TokenDelta:
        if self._says_nothing:
            # The step that computed the prompt reported candidates that nobody wants.
            return TokenDelta(id, [], "length")
        logprobs = None if self._num_top is None else _told(found.trace, self._num_top)
        return TokenDelta(id, found.token_ids, found.reason, logprobs=logprobs)

    def _traced(self, one: Continuation) -> Trace:
        before, report = self._traces.get(one.parent), self._reports[one.parent]
        return Trace(before, report.logprobs[one.rank - 1], one.rank, report)

    def _end_of(self, one: Continuation) -> str | None:
        if one.token_id in self._stop_ids:
            return "stop"
        if len(one.parent.token_ids) + 1 >= self._max_len:
            return "length"
        # Not "stop", which would say that the last token is no part of the text. Whoever makes the text finds the stop
        # string there and says so, as of sequences that no beam search made.
        return "length" if self._text_ends is not None and self._text_ends(self._output(one)) else None

    def _output(self, one: Continuation) -> list[int]:
        return [*one.parent.token_ids[self._num_prompt :], one.token_id]

    def _end(self, one: Continuation, reason: str) -> None:
        token_ids = self._output(one)
        score = self._normed(one.score, len(token_ids))
        # Equal scores: the one found first is the better.
        self._num_ended += 1
        heapq.heappush(self._ended, _Hypothesis(score, -self._num_ended, token_ids, reason, one.trace))
        if len(self._ended) > self._width:
            heapq.heappop(self._ended)

    def _is_over(self, best_score: float, length: int) -> bool:
        """Whether `width` sequences have ended that no running one can beat any more."""
        if len(self._ended) < self._width:
            return False
        if self._stops_early:
            return True
        # Log probabilities only fall; with a penalty over 0 a longer sequence is divided by more.
        longest = self._max_len if self._penalty > 0 else length
        return self._ended[0].score >= self._normed(best_score, longest - self._num_prompt)

    def _normed(self, score: float, num_tokens: int) -> float:
        return score / math.pow(max(num_tokens, 1), self._penalty)


def _told(last: Trace | None, num_top: int) -> Logprobs:
    """The log probabilities of a sequence that ends with `last`."""
    found: list[Trace] = []
    while last is not None:
        found.append(last)
        last = last.before
    found.reverse()
    most = None if num_top == ALL_TOKENS else num_top
    return Logprobs(
        [trace.value for trace in found],
        [trace.rank for trace in found],
        [trace.report.token_ids[:most] for trace in found],
        [trace.report.logprobs[:most] for trace in found],
    )


class Lifecycle(Protocol):
    """What the scheduler does for beams."""

    def enlist(self, request: Request) -> None:
        """Take a new request in."""

    def requeue(self, request: Request) -> None:
        """Queue a request before newcomers."""

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Let the child share the parent's blocks."""

    def finish(self, request: Request) -> None:
        """End a request and free what it holds."""


class Beams:
    """All beam searches of a scheduler."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._searches: dict[str, BeamSearch] = {}
        self._chosen: dict[int, int] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._searches

    @property
    def ids(self) -> list[str]:
        return list(self._searches)

    def begin(self, first: Request, ids: Sequence[str], text_ends: TextEnds | None = None) -> None:
        """Make a new request the only beam of a search."""
        first.search = BeamSearch(first, ids, text_ends)
        self._searches |= dict.fromkeys(ids, first.search)

    def end(self, id: str) -> list[str]:
        """End the search that delivers under this id; all its ids."""
        search = self._searches[id]
        for beam in search.beams:
            self._lifecycle.finish(beam)
        for one in search.ids:
            del self._searches[one]
        return search.ids

    def has_reported(self, request: Request) -> bool:
        """Whether it is a beam that waits for the others of its search."""
        return request.search is not None and request.search.has_reported(request)

    def take(self, beams: list[Request], candidates: list[Candidates], now: float) -> list[TokenDelta]:
        """What a step reported of these beams; the results of the searches that it ends."""
        deltas = []
        for beam, report in zip(beams, candidates, strict=True):
            search = beam.search
            if search is None or beam.status is Status.FINISHED:
                continue
            beam.is_reporting = False
            if search.report(beam, report, now):
                deltas += self._advance(search)
        return deltas

    def take_chosen(self) -> list[tuple[int, int]]:
        """The tokens chosen for rows since the last plan."""
        chosen, self._chosen = self._chosen, {}
        return list(chosen.items())

    def forget_chosen(self, row: int) -> None:
        """The row has another's tokens from now on."""
        self._chosen.pop(row, None)

    def _advance(self, search: BeamSearch) -> list[TokenDelta]:
        chosen = search.advance()
        if not chosen:
            self.end(search.ids[0])
            return search.results()
        beams = {}
        # Later continuations of a beam fork from it before its own token is appended.
        for index, one in reversed(list(enumerate(chosen))):
            is_first = all(one.parent is not other.parent for other in chosen[:index])
            beam = one.parent if is_first else self._forked(search, one)
            if is_first:
                self._append(beam, one.token_id)
            beams[beam] = one
        for beam in search.beams:
            if beam not in beams:
                self._lifecycle.finish(beam)
        search.replace(dict(reversed(beams.items())))
        return []

    def _forked(self, search: BeamSearch, one: Continuation) -> Request:
        parent = one.parent
        search.num_beams_made += 1
        child = Request(
            f"{search.ids[0]}/{search.num_beams_made}",
            [*parent.token_ids, one.token_id],
            parent.params,
            seed=0,
            stop_ids=parent.stop_ids,
            max_len=parent.max_len,
            options=parent.options,
            arrived=parent.arrived,
        )
        child.num_prompt = child.num_charged = parent.num_prompt
        child.sampling = parent.sampling  # Its prompt is the search's, whatever it knows already.
        child.search = search
        self._lifecycle.enlist(child)
        if parent.status is Status.RUNNING:
            self._lifecycle.fork(parent, child, parent.num_computed)
        self._lifecycle.requeue(child)
        return child

    def _append(self, beam: Request, token_id: int) -> None:
        beam.settle([token_id], 0)
        if beam.status is Status.RUNNING:
            self._chosen[beam.row] = token_id
        else:
            self._lifecycle.requeue(beam)
