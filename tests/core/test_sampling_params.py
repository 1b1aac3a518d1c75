"""What SamplingParams takes, and what of it goes to the workers."""

from __future__ import annotations

import msgspec
import pytest

from raylm.core.options import RequestOptions
from raylm.core.request import Request
from raylm.core.sampling import SamplingParams
from raylm.core.step import RowPenalties, RowSampling
from raylm.engine.engine import check_prompt
from raylm.engine.messages import Submit, ToEngine
from raylm.errors import RequestRejected


@pytest.mark.parametrize(
    ("name", "bounds", "allowed", "refused"),
    [
        ("presence_penalty", "[-2, 2]", [-2, -0.5, 0, 2.0], [-2.001, 2.5, True, None, "1", float("nan")]),
        ("frequency_penalty", "[-2, 2]", [-2, -0.5, 0, 2.0], [-2.001, 2.5, False, None, "1", float("inf")]),
        ("repetition_penalty", "(0, 2]", [1e-9, 1, 2.0], [0, -1, 2.001, True, None, "1", float("nan")]),
    ],
)
def test_limits_of_penalties(name, bounds, allowed, refused):
    for value in allowed:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(RequestRejected) as error:
            SamplingParams(**{name: value})
        assert error.value.param == name
        assert str(error.value) == f"{name} must be a number in {bounds}, got {value!r}"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": -0.0}, None),
        ({"repetition_penalty": 1.5}, RowPenalties(3, 1.5, 0, 0)),
        ({"frequency_penalty": -1}, RowPenalties(3, 1, -1, 0)),
        ({"presence_penalty": 2, "frequency_penalty": 0.5}, RowPenalties(3, 1, 0.5, 2)),
        ({"presence_penalty": 2, "beam_width": 2}, None),
    ],
    ids=str,
)
def test_only_penalties_that_do_something_go_to_the_workers(fields, expected):
    request = Request("a", [5, 6, 7], SamplingParams(**fields), seed=0, stop_ids=frozenset(), max_len=9)
    assert request.sampling.penalties == expected


class Whole(int):
    """As numpy's and enums' values are: an int, but none that msgpack takes."""


class Broken(float):
    pass


class Text(str):
    pass


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"logprobs": 5}, "logprobs must be true or false, got 5"),
        ({"logprobs": None}, "logprobs must be true or false, got None"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false, got 'yes'"),
        ({"early_stopping": 1, "beam_width": 2}, "early_stopping must be true or false, got 1"),
        ({"temperature": 10**400}, "temperature must be a number in [0, 100], got 1000"),
        ({"temperature": "1"}, "temperature must be a number in [0, 100], got '1'"),
        ({"top_k": 2.0}, "top_k must be an integer from 0 to 2147483647, got 2.0"),
        ({"n": None}, "n must be an integer from 1 to 128, got None"),
        ({"seed": "7"}, "seed must be an integer from"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer from 1 to 2147483647, got 1.5"),
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
    )
    options = RequestOptions(tenant=Text("a"), priority=Whole(1), deadline_s=Broken(2.0), cache_salt=Text("s"))
    submit = Submit(["a"], [1, 2], params, options)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=ToEngine) == submit
    sampling = Request("a", [1, 2], params, seed=7, stop_ids=frozenset(), max_len=9).sampling
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=RowSampling) == sampling


@pytest.mark.parametrize("wrong", [1.0, True, "1", None, Whole(1)], ids=repr)
def test_a_prompt_holds_integers_and_nothing_like_them(wrong):
    with pytest.raises(RequestRejected, match=r"the prompt must hold integers, got .* at 1") as error:
        check_prompt([1, wrong, 2], SamplingParams(), max_model_len=9, vocab_size=9)
    assert error.value.param == "prompt"
