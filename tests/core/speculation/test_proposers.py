"""Proposers against references that search the whole text anew each time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylm.core.speculation import NgramProposer, ReplayProposer, SuffixProposer
from raylm.core.speculation.automaton import SuffixAutomaton
from raylm.core.speculation.suffix import OutputPool

TOKENS = st.integers(0, 3)
TEXTS = st.lists(TOKENS, max_size=60)


def drafts_by_search(tokens: list[int], min_n: int, max_n: int, count: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        for at in range(len(tokens) - 1, n - 1, -1):
            if tokens[at - n : at] == tokens[len(tokens) - n :]:
                text = list(tokens)
                for position in range(at, at + count):
                    text.append(text[position])
                return text[len(tokens) :]
    return []


@given(TEXTS, st.lists(st.lists(TOKENS, min_size=1, max_size=12), max_size=5), st.integers(1, 3), st.integers(0, 2))
def test_ngrams_are_found_as_by_a_search(prompt, pieces, min_n, more):
    proposer = NgramProposer(min_n, min_n + more)
    tokens = list(prompt)
    proposer.begin("a", tokens, "")
    for piece in [[], *pieces]:
        tokens += piece
        while proposer.prepare("a", 5):
            pass
        for count in (1, 3, 20):
            assert proposer.propose("a", count).token_ids == drafts_by_search(tokens, min_n, min_n + more, count)
    assert proposer.num_indexed == max(0, len(tokens) - 1)
    proposer.end("a")
    assert proposer.num_indexed == 0


def test_a_long_match_is_stronger_evidence_than_a_short_one():
    classes = []
    for shared in (2, 3, 5, 8, 12, 20, 40):
        proposer = NgramProposer(1, 3)
        common = list(range(100, 100 + shared))
        proposer.begin("a", [1, *common, 2, 3, *common], "")
        proposer.prepare("a", 1000)
        classes.append(proposer.propose("a", 2).evidence)
    assert classes == sorted(set(classes))


def test_nothing_is_drafted_before_all_is_indexed():
    proposer = NgramProposer(1, 2)
    proposer.begin("a", [1, 2] * 10, "")
    proposer.prepare("a", 10)
    assert not proposer.propose("a", 2).token_ids
    proposer.prepare("a", 10)
    assert proposer.propose("a", 2).token_ids == [1, 2]


def test_the_index_of_ngrams_is_bounded():
    proposer = NgramProposer(1, 2, max_tokens=30)
    for key in "abc":
        proposer.begin(key, [1, 2] * 10, "")
        proposer.prepare(key, 1000)
    assert proposer.num_indexed == 30
    assert proposer.propose("a", 1).token_ids and not proposer.propose("c", 1).token_ids
    proposer.end("a")
    proposer.prepare("c", 1000)
    assert proposer.propose("c", 1).token_ids


def test_an_ngram_needs_sound_orders():
    for orders in ((0, 2), (3, 2)):
        with pytest.raises(ValueError, match="min_n"):
            NgramProposer(*orders)


def occurrences(texts: list[list[int]], part: tuple[int, ...]) -> int:
    return sum(tuple(text[i : i + len(part)]) == part for text in texts for i in range(len(text) - len(part) + 1))


@given(st.lists(st.lists(TOKENS, max_size=25), max_size=4))
def test_an_automaton_knows_every_substring_and_counts_it(texts):
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.begin_text()
        for token in text:
            automaton.add(token)
    assert automaton.num_states <= max(1, 2 * sum(map(len, texts)))
    parts = {tuple(text[i:j]) for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    for part in parts:
        state = 0
        for token in part:
            state = automaton.next[state][token]
        assert automaton.count[state] == occurrences(texts, part)
    paths = [(0, 0)]
    for state, depth in paths:  # Nothing else is accepted.
        paths += [(target, depth + 1) for target in automaton.next[state].values()]
    assert len(paths) == len(parts) + 1


def longest_suffix_inside(tokens: list[int], texts: list[list[int]]) -> int:
    for length in range(len(tokens), 0, -1):
        if occurrences(texts, tuple(tokens[len(tokens) - length :])):
            return length
    return 0


@given(st.lists(st.tuples(st.booleans(), TOKENS), max_size=60))
def test_a_match_follows_an_automaton_that_grows(events):
    automaton = SuffixAutomaton()
    text: list[int] = []
    tokens: list[int] = []
    state = length = 0
    for grows, token in events:
        if grows:
            automaton.add(token)
            text.append(token)
        else:
            state, length = automaton.follow(state, length, token)
            tokens.append(token)
            longest = longest_suffix_inside(tokens, [text])
            # A suffix that only the growth made longer is found again token by token.
            assert length <= longest
            assert occurrences([text], tuple(tokens[len(tokens) - length :])) == automaton.count[state] or not length


def suffix_drafts_by_search(tokens: list[int], count: int) -> list[int]:
    """What most often followed the longest suffix that occurred before, while that is one token only."""
    length = next(
        (n for n in range(len(tokens) - 1, 0, -1) if occurrences([tokens[:-1]], tuple(tokens[len(tokens) - n :]))), 0
    )
    if length < 2:
        return []
    context = tokens[len(tokens) - length :]
    drafts: list[int] = []
    while len(drafts) < count:
        followers = Counter(
            tokens[i + len(context)]
            for i in range(len(tokens) - len(context))
            if tokens[i : i + len(context)] == context
        )
        if len(followers) != 1:
            break
        drafts.append(next(iter(followers)))
        context = [*context, drafts[-1]]
    return drafts


@given(st.lists(TOKENS, max_size=80))
def test_suffix_drafts_go_on_as_the_text_did(tokens):
    proposer = SuffixProposer()
    proposer.begin("a", tokens, "")
    proposer.prepare("a", 1000)
    drafts = proposer.propose("a", 6).token_ids
    certain = suffix_drafts_by_search(tokens, 6)
    assert drafts[: len(certain)] == certain


def end_with(proposer: SuffixProposer, key: str, space: str, output: list[int]) -> None:
    tokens = [9]
    proposer.begin(key, tokens, space)
    tokens += output
    proposer.end(key)


def test_outputs_of_others_are_drafted_from_in_the_same_space_only():
    proposer = SuffixProposer()
    end_with(proposer, "old", "tenant a", [1, 2, 3, 4, 5, 6])
    for key, space, expected in (("one", "tenant a", [4, 5, 6]), ("two", "tenant b", []), ("three", "", [])):
        proposer.begin(key, [8, 7, 1, 2, 3], space)
        for _ in range(3):
            proposer.prepare(key, 1000)
        assert proposer.propose(key, 8).token_ids == expected


def test_the_likelier_continuation_is_drafted_and_an_unlikely_one_ends_the_draft():
    proposer = SuffixProposer()
    for i, tail in enumerate(([3, 4], [3, 5], [3, 6], [3, 7], [3, 8], [3, 11], [0, 0])):
        end_with(proposer, str(i), "", [1, 2, *tail])
    proposer.begin("new", [1, 2], "")
    proposer.prepare("new", 1000)
    assert proposer.propose("new", 8).token_ids == [3]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(TOKENS, min_size=1, max_size=40)), max_size=40), st.integers(1, 30)
)
def test_the_pool_of_outputs_is_bounded(outputs, piece):
    pool = OutputPool(100)
    for space, output in outputs:
        pool.put(str(space), output)
        while pool.index(piece):
            assert pool.num_tokens <= 100
    held = {id(g): g for space in range(4) for g in pool.generations(str(space))}.values()
    assert pool.num_tokens == sum(g.automaton.num_tokens for g in held)
    if outputs:
        newest = str(outputs[-1][0])
        assert pool.generations(newest)[-1].automaton.num_tokens >= len(outputs[-1][1])


def test_outputs_that_nobody_takes_in_are_bounded_too():
    pool = OutputPool(100)
    for _ in range(50):
        pool.put("", list(range(40)))
    assert pool.index(10_000) <= 100


def test_own_automata_are_bounded():
    proposer = SuffixProposer(max_tokens=50)
    proposer.begin("a", [1, 2] * 100, "")
    assert proposer.prepare("a", 1000) == 50
    assert proposer.propose("a", 3).token_ids == []
    proposer.end("a")
    assert proposer.num_indexed == 0


def test_replayed_drafts_are_right_with_the_probability_asked_for():
    output = [i % 50 for i in range(20_000)]
    proposer = ReplayProposer({(1, 2): output}, 0.8, seed=3)
    tokens = [1, 2]
    proposer.begin("a", tokens, "")
    drafts = proposer.propose("a", len(output)).token_ids
    right = [draft == token for draft, token in zip(drafts, output, strict=True)]
    assert 0.79 < sum(right) / len(right) < 0.81
    pairs = sum(a and b for a, b in zip(right, right[1:], strict=False))
    assert 0.62 < pairs / len(right) < 0.66  # Independent: 0.8 squared.
    tokens += output[:7]
    assert proposer.propose("a", 5).token_ids == drafts[7:12]
    proposer.begin("b", [5], "")
    assert not proposer.propose("b", 3).token_ids
    proposer.end("a")
    assert not proposer.propose("a", 3).token_ids
