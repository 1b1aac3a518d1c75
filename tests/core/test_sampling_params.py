"""What SamplingParams takes, and what of it goes to the workers."""

from __future__ import annotations

import msgspec
import pytest

from raylm.config.sampling import GenerationConfig
from raylm.core.options import RequestOptions
from raylm.core.request import Request
from raylm.core.sampling import SamplingParams
from raylm.core.step import RowSampling
from raylm.core.structure import StructuredOutput
from raylm.core.thinking import ThinkingSection
from raylm.engine.checks import check_params, check_prompt
from raylm.engine.messages import Submit, ToEngine
from raylm.errors import RequestRejected


@pytest.mark.parametrize(
    ("name", "bounds", "allowed", "refused"),
    [
        ("presence_penalty", "[-2, 2]", [-2, -0.5, 0, 2.0], [-2.001, 2.5, True, None, "1", float("nan")]),
        ("frequency_penalty", "[-2, 2]", [-2, -0.5, 0, 2.0], [-2.001, 2.5, False, None, "1", float("inf")]),
        ("repetition_penalty", "(0, 2]", [1e-9, 1, 2.0], [0, -1, 2.001, True, None, "1", float("nan")]),
        ("typical_p", "(0, 1]", [1e-9, 0.5, 1], [0, -1, 1.001, True, None, "1", float("nan")]),
    ],
)
def test_limits_of_numbers(name, bounds, allowed, refused):
    for value in allowed:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(RequestRejected) as error:
            SamplingParams(**{name: value})
        assert error.value.param == name
        assert str(error.value) == f"{name} must be a number in {bounds}, got {value!r}"


class Whole(int):
    """As numpy's and enums' values are: an int, but none that msgpack takes."""


class Broken(float):
    pass


class Text(str):
    pass


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"logprobs": True}, "logprobs must be an integer from -1 to 2147483647, got True"),
        ({"logprobs": -2}, "logprobs must be an integer from -1 to 2147483647, got -2"),
        ({"prompt_logprobs": 1.0}, "prompt_logprobs must be an integer from -1 to 2147483647, got 1.0"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids is only allowed together with logprobs"),
        (
            {"logprob_token_ids": [1] * 1025, "logprobs": 0},
            "logprob_token_ids has 1025 tokens, at most 1024 are allowed",
        ),
        (
            {"thinking_token_budget": -2},
            "thinking_token_budget must be an integer from -1 to 2147483647, got -2",
        ),
        (
            {"thinking_token_budget": 5, "beam_width": 2},
            "thinking_token_budget is not possible together with a beam search (beam_width)",
        ),
        (
            {
                "thinking_token_budget": 5,
                "thinking": ThinkingSection((), (4,), begun=True),
                "structure": StructuredOutput("json_object"),
            },
            "thinking_token_budget is only possible with structured output that begins after the thinking "
            "(structure.begin_after)",
        ),
        ({"thinking": "<think>"}, "thinking must be a ThinkingSection, got '<think>'"),
        ({"min_tokens": -1}, "min_tokens must be an integer from 0 to 2147483647, got -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, more than the 4 of max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens must be an integer from 0 to 2147483647, got -1"),
        ({"logit_bias": 5}, "logit_bias must map token ids to numbers, got 5"),
        ({"logit_bias": {1: 100.5}}, "logit_bias must be a number in [-100, 100], got 100.5"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias must be a number in [-100, 100], got nan"),
        ({"logit_bias": {"1": 1}}, "logit_bias must be an integer from 0 to 2147483647, got '1'"),
        ({"logit_bias": {-1: 1}}, "logit_bias must be an integer from 0 to 2147483647, got -1"),
        ({"logit_bias": [1]}, "logit_bias must hold pairs of a token id and a number, got 1"),
        ({"logit_bias": [(1, 2), (1, 3)]}, "logit_bias names the token 1 twice"),
        ({"logit_bias": dict.fromkeys(range(1025), 0)}, "logit_bias has 1025 entries, at most 1024 are allowed"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list of integers, got 5"),
        ({"allowed_token_ids": [2**31]}, "allowed_token_ids must be an integer from 0 to 2147483647, got 2147483648"),
        ({"allowed_token_ids": range(2)}, "allowed_token_ids must be a list of integers, got range(0, 2)"),
        ({"allowed_token_ids": [0] * (2**18 + 1)}, "allowed_token_ids has 262145 tokens, at most 262144 are allowed"),
        ({"bad_words": [""]}, "bad_words must hold non-empty strings, got ''"),
        ({"bad_words": ["a" * 1025]}, "bad_words holds a string of 1025 characters, at most 1024 are allowed"),
        ({"bad_words": ["a"] * 257}, "bad_words has 257 strings, at most 256 are allowed"),
        ({"bad_token_ids": [[1], []]}, "bad_token_ids must hold lists of at least one token, got an empty one"),
        ({"bad_token_ids": [5]}, "bad_token_ids must be a list of integers, got 5"),
        ({"bad_token_ids": [[1] * 65]}, "bad_token_ids has 65 tokens, at most 64 are allowed"),
        ({"bad_token_ids": [[1]] * 513}, "bad_token_ids has 513 lists, at most 512 are allowed"),
        ({"logits_processors": [len]}, "logits_processors must hold non-empty strings, got <built-in"),
        ({"logits_processors": ["a"] * 17}, "logits_processors has 17 strings, at most 16 are allowed"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be true or false, got 1"),
        ({"skip_special_tokens": None}, "skip_special_tokens must be true or false, got None"),
        ({"spaces_between_special_tokens": 0}, "spaces_between_special_tokens must be true or false, got 0"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false, got 'yes'"),
        ({"early_stopping": 1, "beam_width": 2}, "early_stopping must be true or false, got 1"),
        ({"temperature": 10**400}, "temperature must be a number in [0, 100], got 1000"),
        ({"temperature": "1"}, "temperature must be a number in [0, 100], got '1'"),
        ({"top_k": 2.0}, "top_k must be an integer from 0 to 2147483647, got 2.0"),
        ({"n": None}, "n must be an integer from 1 to 128, got None"),
        ({"seed": "7"}, "seed must be an integer from"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer from 0 to 2147483647, got 1.5"),
        ({"beam_width": True}, "beam_width must be an integer from 0 to 16, got True"),
        ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
        ({"stop": {"a": 1}}, "stop must be a string or a list of strings, got {'a': 1}"),
        ({"stop": [b"a"]}, "stop must hold non-empty strings, got b'a'"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of integers, got 5"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids must be an integer from 0 to 2147483647, got 1.0"),
    ],
    ids=str,
)
def test_a_value_of_a_wrong_type_is_refused_with_a_sentence(fields, sentence):
    with pytest.raises(RequestRejected) as error:
        SamplingParams(**fields)
    assert str(error.value).startswith(sentence) and len(str(error.value)) < 400
    assert error.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"priority": 1.0}, "priority"),
        ({"tenant": b"a"}, "tenant"),
        ({"deadline_s": 10**400}, "deadline_s"),
        ({"queue_timeout_s": "5"}, "queue_timeout_s"),
    ],
)
def test_options_of_a_wrong_type_are_refused(fields, name):
    with pytest.raises(RequestRejected, match=name) as error:
        RequestOptions(**fields)
    assert error.value.param == name


def test_what_is_taken_is_what_an_engine_and_its_workers_take():
    """Everything that passes the checks comes through msgpack as it is: values of derived types too."""
    params = SamplingParams(
        temperature=Broken(0.5),
        top_p=Broken(0.9),
        top_k=Whole(3),
        n=Whole(2),
        seed=Whole(7),
        max_tokens=Whole(4),
        stop=[Text("x")],
        stop_token_ids={Whole(5)},
        repetition_penalty=Broken(1.5),
        typical_p=Broken(0.5),
        min_tokens=Whole(1),
        logprobs=Whole(5),
        prompt_logprobs=Whole(0),
        logprob_token_ids=[Whole(4)],
        logit_bias={Whole(3): Broken(-1.5), 4: Whole(2)},
        allowed_token_ids={Whole(6), 7},
        bad_words=[Text("y")],
        bad_token_ids=[[Whole(8), 9]],
        logits_processors=[Text("z")],
    )
    options = RequestOptions(tenant=Text("a"), priority=Whole(1), deadline_s=Broken(2.0), cache_salt=Text("s"))
    submit = Submit(["a"], [1, 2], params, options)
    assert params.logit_bias == ((3, -1.5), (4, 2.0)) and params.bad_token_ids == ((8, 9),)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=ToEngine) == submit
    sampling = Request("a", [1, 2], params, seed=7, stop_ids=frozenset(), max_len=9).sampling
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=RowSampling) == sampling


@pytest.mark.parametrize("wrong", [9, -1, 1 << 63, -(1 << 64)])
def test_a_prompt_holds_tokens_of_the_model(wrong):
    check_prompt([0, 8], SamplingParams(), max_model_len=9, vocab_size=9)
    with pytest.raises(RequestRejected, match=f"the prompt holds the token id {wrong}; this model has 0 to 8") as error:
        check_prompt([0, wrong, 8], SamplingParams(), max_model_len=9, vocab_size=9)
    assert error.value.param == "prompt"


@pytest.mark.parametrize("wrong", [1.0, True, "1", None, Whole(1)], ids=repr)
def test_a_prompt_holds_integers_and_nothing_like_them(wrong):
    with pytest.raises(RequestRejected, match=r"the prompt must hold integers, got .* at 1") as error:
        check_prompt([1, wrong, 2], SamplingParams(), max_model_len=9, vocab_size=9)
    assert error.value.param == "prompt"


def test_what_float32_cannot_hold_keeps_its_meaning():
    """Workers compute in float32, where these numbers would be 0: neither greedy nor one token."""
    for tiny in (1e-39, 1e-46, 5e-324):
        params = SamplingParams(temperature=tiny, top_p=tiny, typical_p=tiny)
        assert params.is_greedy and params.temperature == 0.0
        assert 0 < params.top_p == params.typical_p < 1.2e-38
    params = SamplingParams(temperature=1e-37, top_p=0.9, typical_p=1e-37)
    assert (params.temperature, params.top_p, params.typical_p) == (1e-37, 0.9, 1e-37)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3]},
        {"bad_words": ["a"]},
        {"bad_token_ids": [[3]]},
        {"min_tokens": 1},
        {"logits_processors": ["a"]},
        {"logprob_token_ids": [3], "logprobs": 0},
    ],
    ids=str,
)
def test_what_a_beam_search_does_not_do_is_refused(fields):
    SamplingParams(**fields)
    name = next(iter(fields))
    with pytest.raises(RequestRejected, match=f"{name} is not possible together with a beam search") as error:
        SamplingParams(**fields, beam_width=2)
    assert error.value.param == name


def test_a_prompt_may_be_computed_for_its_log_probabilities_alone():
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {3: 1.0, 9: 1.0}},
        {"allowed_token_ids": [0, 9]},
        {"logprob_token_ids": [9], "logprobs": 0},
        {"bad_token_ids": [[1], [2, 9]]},
    ],
    ids=str,
)
def test_tokens_that_a_request_names_are_the_model_s(fields):
    params = SamplingParams(**fields)
    check_params(params, GenerationConfig(), vocab_size=10)
    with pytest.raises(RequestRejected, match="holds the token id 9; this model has 0 to 8") as error:
        check_params(params, GenerationConfig(), vocab_size=9)
    assert error.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "allowed", "sentence"),
    [
        ({"logprobs": 4}, {"max_logprobs": 4}, "logprobs is 4, but at most 3 tokens are reported"),
        ({"logprobs": -1}, {"max_logprobs": 50}, "logprobs is -1, but at most 3 tokens are reported"),
        ({"prompt_logprobs": 4}, {"max_logprobs": 4}, "prompt_logprobs is 4, but at most 3 tokens are reported"),
        (
            {"logprob_token_ids": [1, 2, 3, 4], "logprobs": 0},
            {"max_logprobs": 4},
            "logprob_token_ids has 4 tokens, but at most 3 are",
        ),
        (
            {"logits_processors": ["a", "b"]},
            {"logits_processors": ["b", "a"]},
            "logits_processors names 'a'; this model has 'b', 'c'",
        ),
    ],
    ids=str,
)
def test_what_a_request_may_ask_for_is_configured(fields, allowed, sentence):
    params = SamplingParams(**fields)
    check_params(params, GenerationConfig(**allowed), vocab_size=50)
    with pytest.raises(RequestRejected) as error:
        check_params(params, GenerationConfig(max_logprobs=3, logits_processors=["b", "c"]), vocab_size=50)
    assert str(error.value).startswith(sentence) and error.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"allowed_token_ids": [1, 2], "bad_token_ids": [[1], [2], [3, 4]]}, {"bad_token_ids": [[1], [2, 3]]}),
        ({"allowed_token_ids": [1, 7], "min_tokens": 1, "stop_token_ids": [1]}, {"ignore_eos": True}),
        ({"allowed_token_ids": [1, 7], "min_tokens": 1, "stop_token_ids": [1]}, {"min_tokens": 0}),
        ({"allowed_token_ids": [5, 7], "min_tokens": 3, "bad_token_ids": [[5]]}, {"bad_token_ids": [[5, 5]]}),
        ({"allowed_token_ids": [5, 7], "min_tokens": 3, "bad_token_ids": [[5]]}, {"min_tokens": 0}),
    ],
    ids=str,
)
def test_some_token_must_be_left_to_sample(fields, kept):
    eos = frozenset([7])
    check_params(SamplingParams(**{**fields, **kept}), GenerationConfig(), vocab_size=9, eos=eos)
    with pytest.raises(RequestRejected, match="allowed_token_ids leaves no token") as error:
        check_params(SamplingParams(**fields), GenerationConfig(), vocab_size=9, eos=eos)
    assert error.value.param == "allowed_token_ids"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"begin": (1,), "end": ()}, "thinking.end must have at least 1 token, got none"),
        ({"begin": (), "end": (1,)}, "thinking.begin must have at least 1 token unless it has begun"),
        ({"begin": (1,) * 17, "end": (1,)}, "thinking.begin has 17 tokens, at most 16 are allowed"),
        ({"begin": (1,), "end": (-1,)}, "thinking.end must be an integer from 0 to 2147483647, got -1"),
        ({"begin": (1,), "end": (2,), "begun": 1}, "thinking.begun must be true or false, got 1"),
    ],
)
def test_marks_of_thinking_are_checked(fields, sentence):
    with pytest.raises(RequestRejected) as error:
        ThinkingSection(**fields)
    assert str(error.value) == sentence


def test_a_budget_needs_marks_of_the_model():
    with pytest.raises(RequestRejected, match="thinking_token_budget needs a model whose thinking has marks"):
        check_params(SamplingParams(thinking_token_budget=5), GenerationConfig(), vocab_size=10)
    marks = ThinkingSection((3,), (10,))
    with pytest.raises(RequestRejected, match="thinking holds the token id 10; this model has 0 to 9"):
        check_params(SamplingParams(thinking_token_budget=5, thinking=marks), GenerationConfig(), vocab_size=10)
