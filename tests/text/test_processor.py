"""From the engine's tokens to the deltas of an answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.core.sampling import SamplingParams
from raylm.errors import RequestRejected
from raylm.text.chat_options import ChatOptions
from raylm.text.processor import TextDelta, TextProcessor

EOS = 2  # <|im_end|>
PLAIN = SamplingParams()


def test_chat_writes_the_models_own_template(smollm):
    ids = smollm.chat([{"role": "user", "content": "Hi"}])
    text = smollm.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ids[0] == 1 and ids.count(1) == 3
    assert smollm.chat([{"role": "user", "content": "Hi"}], ChatOptions(add_generation_prompt=False)) == ids[:-4]


def test_decode_and_encode_are_inverse(smollm):
    assert smollm.decode(smollm.encode("The cat sat on 2 mats.\n")) == "The cat sat on 2 mats.\n"


def test_the_token_that_stops_counts_but_is_no_text(smollm):
    ids = smollm.encode(" yes")
    assert smollm.stream(PLAIN).push([*ids, EOS], "stop") == TextDelta(" yes", "stop", len(ids) + 1)
    word = smollm.encode(" no")  # a stop token of the request may be an ordinary one
    assert smollm.stream(PLAIN).push(ids + word, "stop") == TextDelta(" yes", "stop", len(ids + word))


def test_all_tokens_are_text_when_the_length_ends_it(smollm):
    ids = smollm.encode("one two three")
    stream = smollm.stream(PLAIN)
    assert stream.push(ids[:1], None) == TextDelta("one", None, 1)
    assert stream.push(ids[1:], "length") == TextDelta(" two three", "length", len(ids) - 1)


def test_an_empty_push_may_end_an_answer(smollm):
    robot = smollm.encode("🤖")
    assert len(robot) > 1
    for reason in ("abort", "length", "stop", "error"):
        stream = smollm.stream(PLAIN)
        assert stream.push(robot[:-1], None) == TextDelta("", None, len(robot) - 1)
        assert stream.push([], reason) == TextDelta("\ufffd", reason, 0)


def test_a_stop_string_ends_the_answer_before_the_engine_does(smollm):
    ids = smollm.encode("red, green, blue, black")
    stream = smollm.stream(SamplingParams(stop=(", bl",)))
    delta = stream.push(ids, None)
    num_until = next(n for n in range(len(ids)) if ", bl" in smollm.decode(ids[:n]))
    assert delta == TextDelta("red, green", "stop", num_until, ", bl")
    assert stream.stopped
    assert stream.push(ids, None) == TextDelta("", None, 0)
    assert stream.push([], "abort") == TextDelta("", None, 0)


def test_a_stop_string_wins_over_the_engines_own_end(smollm):
    ids = smollm.encode("a b c")
    stream = smollm.stream(SamplingParams(stop=("c",)))
    assert stream.push(ids, "length") == TextDelta("a b ", "stop", len(ids), "c")
    assert stream.stopped


def test_text_held_back_comes_at_the_end(smollm):
    stream = smollm.stream(SamplingParams(stop=(" two three four",)))
    ids = smollm.encode("one two three")
    assert stream.push(ids, None).text == "one"
    assert stream.push([EOS], "stop") == TextDelta(" two three", "stop", 1)
    assert not stream.stopped


@pytest.mark.parametrize(
    ("fields", "last", "expected"),
    [
        ({}, EOS, None),
        ({"stop_token_ids": [7]}, 7, 7),
        ({"stop_token_ids": [7, EOS]}, EOS, None),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, EOS, EOS),
    ],
    ids=str,
)
def test_a_stop_token_is_the_reason_unless_it_is_the_models_own_end(smollm, fields, last, expected):
    ids = smollm.encode(" yes")
    delta = smollm.stream(SamplingParams(**fields)).push([*ids, last], "stop")
    assert delta == TextDelta(" yes", "stop", len(ids) + 1, expected)


def test_a_length_or_an_empty_end_has_no_stop_reason(smollm):
    params = SamplingParams(stop_token_ids=[7], stop=["never"])
    assert smollm.stream(params).push([7], "length").stop_reason is None
    assert smollm.stream(params).push([], "stop").stop_reason is None


def test_what_ends_the_answer_may_be_part_of_it(smollm):
    ids = smollm.encode("red, green, blue, black")
    whole = SamplingParams(stop=[", bl"], include_stop_str_in_output=True)
    delta = smollm.stream(whole).push(ids, None)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("red, green, bl", "stop", ", bl")
    word = smollm.encode(" no")
    params = SamplingParams(stop_token_ids=word, include_stop_str_in_output=True)
    assert smollm.stream(params).push(ids[:1] + word, "stop") == TextDelta("red no", "stop", 2, word[0])
    # The model's own end is a special token, and as such no text.
    assert smollm.stream(params).push([ids[0], EOS], "stop").text == "red"


def test_special_tokens_may_be_text(smollm):
    ids = [1, *smollm.encode(" yes"), EOS]
    assert smollm.stream(PLAIN).push(ids, "length").text == " yes"
    params = SamplingParams(skip_special_tokens=False)
    assert smollm.stream(params).push(ids, "length").text == "<|im_start|> yes<|im_end|>"
    assert smollm.stream(params).push(ids, "stop").text == "<|im_start|> yes"
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True, stop=["<|im_end|>"])
    assert smollm.stream(params).push([*ids, 5], "length") == TextDelta(
        "<|im_start|> yes<|im_end|>", "stop", len(ids), "<|im_end|>"
    )


def test_no_stop_string_ends_the_answer_within_min_tokens(smollm):
    ids = smollm.encode("a b c b c b")
    assert len(ids) == 6
    for count, text in ((0, "a"), (1, "a"), (2, "a b c"), (3, "a b c"), (4, "a b c b c"), (6, "a b c b c b")):
        for cut in range(len(ids)):
            stream = smollm.stream(SamplingParams(stop=[" b"], min_tokens=count))
            first = stream.push(ids[:cut], None)
            assert first.text + stream.push(ids[cut:], "length").text == text, (count, cut)


def test_a_stop_string_may_begin_within_min_tokens_and_inside_another(smollm):
    ids = smollm.encode("a b c d")
    assert smollm.stream(SamplingParams(stop=[" b c"], min_tokens=2)).push(ids, None).text == "a"
    both = SamplingParams(stop=["a b", " b c"], min_tokens=2)
    assert smollm.stream(both).push(ids, None) == TextDelta("a", "stop", 3, " b c")


def test_bad_words_become_tokens_with_and_without_a_space(smollm):
    cat, spaced = smollm.encode("cat"), smollm.encode(" cat")
    assert len(cat) == len(spaced) == 1 and cat != spaced
    params = smollm.prepare(SamplingParams(bad_words=[" cat", "cat sat on"], bad_token_ids=[[5]]))
    words = [cat, spaced, smollm.encode("cat sat on"), smollm.encode(" cat sat on")]
    assert params.bad_token_ids == ((5,), *map(tuple, words)) and params.bad_words == ()
    assert smollm.prepare(params) is params
    # After a space a digit has more tokens: its space is one of its own.
    assert smollm.prepare(SamplingParams(bad_words=["7"])).bad_token_ids == (tuple(smollm.encode("7")),)
    # Nothing but space is taken as it is.
    both = (*smollm.encode("\n"),), (*smollm.encode(" \n"),)
    assert smollm.prepare(SamplingParams(bad_words=["\n"])).bad_token_ids == both
    with pytest.raises(RequestRejected, match=r"of 65 tokens, at most 64 are allowed") as error:
        smollm.prepare(SamplingParams(bad_words=["7" * 65]))
    assert error.value.param == "bad_words"


words = st.lists(st.sampled_from([" cat", " sat", "🤖", "\n", ".", "<|im_end|>", " on", "on"]), max_size=20)


@settings(max_examples=100, deadline=None)
@given(words=words, data=st.data())
def test_pushes_may_be_cut_anywhere(smollm: TextProcessor, words, data):
    ids = smollm.encode("".join(words))
    params = SamplingParams(stop=tuple(data.draw(st.sets(st.sampled_from([" sat on", ".\n", "🤖🤖"])))))
    whole = smollm.stream(params).push(ids, "length")
    stream = smollm.stream(params)
    # Where two cuts are in one place, nothing is pushed.
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=12)))
    pieces = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    deltas = [stream.push(piece, None) for piece in pieces[:-1]]
    deltas.append(stream.push(pieces[-1], "length"))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert sum(delta.num_tokens for delta in deltas) == whole.num_tokens
    reasons = [delta.finish_reason for delta in deltas if delta.finish_reason]
    assert reasons == [whole.finish_reason]
