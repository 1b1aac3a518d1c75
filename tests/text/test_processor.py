"""From the engine's tokens to the deltas of an answer."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.core.sampling import SamplingParams
from raylm.text.processor import TextDelta, TextProcessor

EOS = 2  # <|im_end|>
PLAIN = SamplingParams()


def test_chat_writes_the_models_own_template(smollm):
    ids = smollm.chat([{"role": "user", "content": "Hi"}])
    text = smollm.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ids[0] == 1 and ids.count(1) == 3
    assert smollm.chat([{"role": "user", "content": "Hi"}], add_generation_prompt=False) == ids[:-4]


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
    assert delta == TextDelta("red, green", "stop", num_until)
    assert stream.stopped
    assert stream.push(ids, None) == TextDelta("", None, 0)
    assert stream.push([], "abort") == TextDelta("", None, 0)


def test_a_stop_string_wins_over_the_engines_own_end(smollm):
    ids = smollm.encode("a b c")
    stream = smollm.stream(SamplingParams(stop=("c",)))
    assert stream.push(ids, "length") == TextDelta("a b ", "stop", len(ids))
    assert stream.stopped


def test_text_held_back_comes_at_the_end(smollm):
    stream = smollm.stream(SamplingParams(stop=(" two three four",)))
    ids = smollm.encode("one two three")
    assert stream.push(ids, None).text == "one"
    assert stream.push([EOS], "stop") == TextDelta(" two three", "stop", 1)
    assert not stream.stopped


words = st.lists(st.sampled_from([" cat", " sat", "🤖", "\n", ".", "<|im_end|>", " on", "on"]), max_size=20)


@settings(max_examples=100, deadline=None)
@given(words=words, data=st.data())
def test_pushes_may_be_cut_anywhere(smollm: TextProcessor, words, data):
    ids = smollm.encode("".join(words))
    params = SamplingParams(stop=tuple(data.draw(st.sets(st.sampled_from([" sat on", ".\n", "🤖🤖"])))))
    whole = smollm.stream(params).push(ids, "length")
    stream = smollm.stream(params)
    deltas = []
    rest = ids
    while len(rest) > 1:
        size = data.draw(st.integers(0, len(rest)))
        deltas.append(stream.push(rest[:size], None))
        rest = rest[size:]
    deltas.append(stream.push(rest, "length"))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert sum(delta.num_tokens for delta in deltas) == whole.num_tokens
    reasons = [delta.finish_reason for delta in deltas if delta.finish_reason]
    assert reasons == [whole.finish_reason]
