"""Stop strings are found across any borders, and no text is lost or told too early."""

from __future__ import annotations

import string

from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.text.stop import StopStrings, StopTable

quick = settings(max_examples=300, deadline=None)
letters = st.text("ab", max_size=24)
stops_ = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def run(stops: list[str], parts: list[str]) -> tuple[str, bool, int]:
    """The text of all parts, whether it was stopped, and how many parts were taken."""
    watch = StopStrings(StopTable(stops))
    text = ""
    for count, part in enumerate(parts, start=1):
        decided, stopped = watch.push(part)
        text += decided
        if stopped:
            return text, True, count
    return text + watch.finish(), False, len(parts)


def plain_search(stops: list[str], text: str) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@quick
@given(stops_, st.lists(letters, max_size=8))
def test_equals_a_plain_search_however_the_text_is_cut(stops, parts):
    text, stopped, count = run(stops, parts)
    assert (text, stopped) == plain_search(stops, "".join(parts))
    if stopped:
        assert not plain_search(stops, "".join(parts[: count - 1]))[1]


@quick
@given(stops_, st.lists(letters, max_size=8))
def test_no_more_is_held_back_than_may_become_a_stop_string(stops, parts):
    watch, told, text = StopStrings(StopTable(stops)), "", ""
    for part in parts:
        decided, stopped = watch.push(part)
        told, text = told + decided, text + part
        if stopped:
            return
        held = text[len(told) :]
        assert text.startswith(told)
        beginnings = [stop[:length] for stop in stops for length in range(len(stop))]
        assert held == max((start for start in beginnings if text.endswith(start)), key=len)


def test_text_before_the_stop_string_comes_at_once():
    watch = StopStrings(StopTable(["\nUser:"]))
    assert watch.push("Hello") == ("Hello", False)
    assert watch.push("!\nUs") == ("!", False)
    assert watch.push("ual") == ("\nUsual", False)
    assert watch.push("\n") == ("", False)
    assert watch.push("User: hi") == ("", True)


def test_the_first_complete_stop_string_wins_and_the_longest_of_equals():
    assert run(["lo w", "o"], ["hello world"])[0] == "hell"
    assert run(["d", "world"], ["hello world"])[0] == "hello "
    assert run(["rl", "worl"], ["hello wor", "ld"])[0] == "hello "


def test_held_text_is_released_at_the_end():
    watch = StopStrings(StopTable(["STOP"]))
    assert watch.push("a STO") == ("a ", False)
    assert watch.finish() == "STO"
    assert watch.finish() == ""


def test_characters_that_mean_something_to_regular_expressions():
    for char in string.punctuation:
        assert run([char, char * 2 + "["], ["text", char, "more"]) == ("text", True, 2)


def test_a_very_long_stop_string_that_nearly_matches():
    stop = "a" * 50_000 + "b"
    text, stopped, _ = run([stop], ["a" * 1000] * 120)
    assert (text, stopped) == ("a" * 120_000, False)
    assert run([stop], ["a" * 1000] * 51 + ["b"]) == ("a" * 1000, True, 52)
