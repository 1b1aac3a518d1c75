"""GrammarMatchers: masks of rows, behind drafts, after a sequence of tokens, and after a preemption."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from raylm.core.structure import StructuredOutput
from raylm.grammar import binding
from raylm.grammar.matchers import GrammarMatchers
from tests.grammar.walks import END, TOKENS, compiled

AB = StructuredOutput("grammar", 'root ::= "a" "b"+ "c"')


class Grammars:
    """CompiledGrammars without its process and thread."""

    pieces = TOKENS

    def get(self, structure: StructuredOutput) -> Future[binding.Compiled]:
        future: Future[binding.Compiled] = Future()
        future.set_result(compiled(structure))
        return future


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def matchers(request: pytest.FixtureRequest) -> GrammarMatchers:
    return GrammarMatchers(Grammars(), len(TOKENS), threads=request.param)  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return list(text.encode())


def filled(matchers: GrammarMatchers, rows: dict[int, str]) -> list[str | None]:
    """What each mask allows, as text; None where it does not count. `rows` gives the drafts of rows."""
    drafts = [ids(text) for text in rows.values()]
    masks = np.full((sum(1 + len(tokens) for tokens in drafts), matchers.num_words), 7, np.int32)
    counts = matchers.fill(list(rows), drafts, masks).counts
    return [shown(mask) if count else None for mask, count in zip(masks, counts, strict=True)]


def shown(mask: np.ndarray) -> str:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(TOKENS)]
    tokens = [token for token in np.flatnonzero(bits) if token < 256 or token == END]
    return "".join("." if token == END else TOKENS[token].decode() for token in tokens)


def test_masks_follow_the_text(matchers: GrammarMatchers) -> None:
    matchers.begin(3, AB, [END])
    assert filled(matchers, {3: ""}) == ["a"]
    matchers.accept(3, ids("abb"))
    assert filled(matchers, {3: ""}) == ["bc"]
    matchers.accept(3, ids("c"))
    assert filled(matchers, {3: ""}) == ["."]
    matchers.accept(3, [END])
    assert filled(matchers, {3: ""}) == [None]


def test_masks_behind_drafts_end_at_the_first_that_is_not_allowed(matchers: GrammarMatchers) -> None:
    for row in (0, 1, 2):
        matchers.begin(row, AB, [END])
    assert filled(matchers, {0: "abc", 1: "", 2: "abxb"}) == ["a", "b", "bc", ".", "a", "a", "b", "bc", None, None]
    assert filled(matchers, {0: "", 1: "", 2: ""}) == ["a", "a", "a"], "drafts leave no trace"


def test_a_draft_that_ends_the_text_ends_the_masks(matchers: GrammarMatchers) -> None:
    matchers.begin(0, AB, [END])
    matchers.accept(0, ids("abc"))
    masks = np.zeros((3, matchers.num_words), np.int32)
    assert matchers.fill([0], [[END, 97]], masks).counts.tolist() == [True, False, False]
    assert filled(matchers, {0: ""}) == ["."]


def test_a_row_that_was_preempted_goes_on_where_it_was(matchers: GrammarMatchers) -> None:
    matchers.begin(0, AB, [END], ids("ab"))
    assert filled(matchers, {0: ""}) == ["bc"]


def test_a_new_request_in_a_row_begins_anew(matchers: GrammarMatchers) -> None:
    matchers.begin(0, AB, [END], ids("ab"))
    matchers.forget(0)
    matchers.begin(0, StructuredOutput("choice", '["x", "y"]'), [END])
    assert filled(matchers, {0: ""}) == ["xy"]


def test_only_the_requests_own_tokens_end_it(matchers: GrammarMatchers) -> None:
    matchers.begin(0, AB, [ord("!"), ord("?"), 10**6], ids("abc"))
    assert filled(matchers, {0: ""}) == ["!?"]


def test_a_grammar_begins_after_a_sequence(matchers: GrammarMatchers) -> None:
    matchers.begin(0, StructuredOutput(AB.kind, AB.value, tuple(ids("</t>"))), [END])
    assert filled(matchers, {0: "x"}) == [None, None]
    matchers.accept(0, ids("so </</t"))
    assert filled(matchers, {0: "> b"}) == [None, "a", None, None]
    assert filled(matchers, {0: ">ab"}) == [None, "a", "b", "bc"]
    assert filled(matchers, {0: ""}) == [None], "a draft has not begun it"
    matchers.accept(0, ids(">"))
    assert filled(matchers, {0: ""}) == ["a"]
    matchers.accept(0, ids("a</t>"))
    assert filled(matchers, {0: ""}) == [None], "what the grammar does not allow breaks the text"
    assert "does not meet its grammar" in broken(matchers, 0)


def broken(matchers: GrammarMatchers, row: int) -> str:
    ((_, reason),) = matchers.fill([row], [[]], np.zeros((1, matchers.num_words), np.int32)).broken
    return reason


def forced(matchers: GrammarMatchers, rows: dict[int, str]) -> dict[int, tuple[int, list[bytes]]]:
    """What each row must say, and behind how many of its drafts."""
    drafts = [ids(text) for text in rows.values()]
    masks = np.zeros((sum(1 + len(tokens) for tokens in drafts), matchers.num_words), np.int32)
    told = matchers.fill(list(rows), drafts, masks, [True] * len(rows)).forced
    return {list(rows)[i]: (num, [TOKENS[token] for token in tokens]) for i, num, tokens in told}


def test_forced_tokens_are_the_longest_that_must_follow(matchers: GrammarMatchers) -> None:
    matchers.begin(0, StructuredOutput("choice", '["an abc name, first", "an abc name, second"]'), [END])
    matchers.begin(1, StructuredOutput("choice", '["ab", "ax"]'), [END])
    assert forced(matchers, {0: "", 1: ""}) == {
        0: (0, [b"a", b"n", b" ", b"abc", b" ", b"name", b",", b" "]),
        1: (0, [b"a"]),
    }
    assert forced(matchers, {1: "a"}) == {}, "there is a choice"
    assert forced(matchers, {1: "ab"}) == {}, "its end is no text"
    assert forced(matchers, {0: "an abc name, f"}) == {0: (14, [b"i", b"r", b"s", b"t"])}
    assert forced(matchers, {0: "an xx"}) == {0: (3, [b"abc", b" ", b"name", b",", b" "])}
    assert filled(matchers, {0: ""}) == ["a"], "looking ahead leaves no trace"


def test_a_token_that_ends_the_request_is_not_forced_though_it_has_text(matchers: GrammarMatchers) -> None:
    for text in ("", "a", "ab"):
        matchers.begin(0, StructuredOutput("choice", '["ab"]'), ids("!"), ids(text))
        assert forced(matchers, {0: ""}) == ({0: (0, [b"a", b"b"][len(text) :])} if text != "ab" else {})
    assert filled(matchers, {0: ""}) == ["!"]


def test_a_token_without_text_breaks_the_text(matchers: GrammarMatchers) -> None:
    matchers.begin(0, AB, ids("!"), [*ids("ab"), END])
    assert "does not meet its grammar" in broken(matchers, 0)


def test_forced_characters_may_begin_in_the_middle_of_one(matchers: GrammarMatchers) -> None:
    matchers.begin(0, StructuredOutput("choice", '["\u20ac", "\u20ad"]'), [END])
    assert forced(matchers, {0: ""}) == {0: (0, [b"\xe2\x82"])}
    matchers.begin(1, StructuredOutput("choice", '["\u20ac!"]'), [END])
    matchers.accept(1, [0xE2])
    assert forced(matchers, {1: ""}) == {1: (0, [b"\x82", b"\xac", b"!"])}


def test_a_grammar_that_does_not_compile_breaks_its_text(
    matchers: GrammarMatchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Grammars, structure: StructuredOutput) -> Future[binding.Compiled]:
        future: Future[binding.Compiled] = Future()
        future.set_exception(RuntimeError("no"))
        return future

    monkeypatch.setattr(Grammars, "get", fails)
    matchers.begin(0, AB, [END])
    assert filled(matchers, {0: "ab"}) == [None, None, None]
    assert "does not compile" in broken(matchers, 0)
