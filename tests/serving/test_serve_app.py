"""The whole path with a real model: OpenAI's client, HTTP, Serve, the request channel, the engine, a worker."""

from __future__ import annotations

import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlparse

import httpx
import openai
import pytest
from openai import OpenAI

from raylm import LLM, SamplingParams

pytestmark = pytest.mark.serve
MODEL = "smollm2-135m"
PAGE = "https://chat.example.org"
FEW = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 2}
PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(serve_url: str):
    with OpenAI(base_url=f"{serve_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def offline(demo: None):
    llm = LLM(MODEL, max_model_len=512, progress=False)
    yield llm
    llm.close()


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def wait_for(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.1)


def test_models_health_and_version(serve_url, client):
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert httpx.get(f"{serve_url}/health", timeout=60).status_code == 200
    assert httpx.get(f"{serve_url}/version", timeout=60).json()["version"]


def test_a_web_page_may_call(serve_url):
    headers = {"origin": PAGE, "access-control-request-method": "POST"}
    preflight = httpx.options(f"{serve_url}/v1/chat/completions", headers=headers, timeout=60)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
    assert httpx.options(f"{serve_url}/v1/models", headers=headers | {"origin": "null"}, timeout=60).status_code == 403
    answer = httpx.get(f"{serve_url}/v1/models", headers={"origin": PAGE, "x-request-id": "mine"}, timeout=60)
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("path", ["/health", "/v1/nothing"])
def test_an_answer_has_one_request_id(serve_url, path):
    answer = httpx.get(serve_url + path, headers={"x-request-id": "mine"}, timeout=60)
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert len(httpx.get(serve_url + path, timeout=60).headers.get_list("x-request-id")) == 1


def test_a_chat_is_answered(client):
    answer = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0, max_tokens=32)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_sampling_that_a_request_leaves_open_is_the_demos_own(client):
    """At temperature 1, which is OpenAI's default, so small a model answers with nonsense."""

    def ask(**fields):
        answer = client.chat.completions.create(model=MODEL, messages=PARIS, max_tokens=16, n=8, seed=1, **fields)
        return [choice.message.content for choice in answer.choices]

    left_open = ask()
    assert sum("Paris" in text for text in left_open) >= 5, left_open
    assert left_open == ask(temperature=0.2, top_p=0.9)
    assert left_open != ask(temperature=1, top_p=1)


def test_streamed_and_whole_answers_are_the_same(client):
    options = {"model": MODEL, "messages": PARIS, "temperature": 0, "max_completion_tokens": 32}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_served_tokens_equal_offline_tokens(client, offline):
    prompts = ["The sea is", "Once upon a time", "def main():", "The three largest cities of Italy are"]
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = [completion.outputs[0].text for completion in offline.generate(prompts, params, progress=False)]
    served = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=24)
    assert [choice.text for choice in served.choices] == expected


def test_prompts_as_tokens_echo_and_choices(client, offline):
    ids = offline.text.encode("One two three four")
    one = client.completions.create(model=MODEL, prompt=ids, max_tokens=4, temperature=0, echo=True)
    assert one.choices[0].text.startswith("One two three four")
    many = client.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=4, n=2, seed=3, temperature=1.5)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    again = client.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=4, n=2, seed=3, temperature=1.5)
    assert [choice.text for choice in many.choices] == [choice.text for choice in again.choices]


def test_log_probabilities_are_the_offline_ones(client, offline):
    """Through the channel and from Ray workers: of sampled tokens, the likeliest, an echoed prompt, beams."""
    ids = offline.text.encode("One two three four")
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    expected = offline.generate([ids], params, progress=False)[0]
    options = {"model": MODEL, "prompt": ids, "max_tokens": 4, "temperature": 0, "logprobs": 2}
    found = client.completions.create(**options, echo=True).choices[0].logprobs
    tokens = [*ids, *expected.outputs[0].token_ids]
    listed = expected.prompt_logprobs + expected.outputs[0].logprobs
    values = [choices[token].logprob for token, choices in zip(tokens[1:], listed[1:], strict=True)]
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(values, abs=1e-3)
    likeliest = [{one.decoded_token: one.logprob for one in top.values()} for top in expected.outputs[0].logprobs]
    assert found.top_logprobs[len(ids) :] == [pytest.approx(top, abs=1e-3) for top in likeliest]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    assert "".join(token for chunk in chunks for token in chunk.logprobs.tokens) == expected.outputs[0].text
    beams = client.completions.create(**options, n=2, extra_body={"use_beam_search": True, "stop": ["five"]})
    for choice in beams.choices:
        assert sum(choice.logprobs.token_logprobs) < 0 and "five" not in choice.text


def test_a_prompt_that_came_before_is_cached(serve_url, client):
    options = {"model": MODEL, "prompt": [7, 8, 9, 10] * 20, "max_tokens": 2, "temperature": 0}
    first = client.completions.create(**options, extra_body={"cache_salt": "mine"})
    again = client.completions.create(**options, n=2, extra_body={"cache_salt": "mine"})
    other = client.completions.create(**options, extra_body={"cache_salt": "theirs"})
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, again, other)]
    assert cached == [0, 64, 0], "whole blocks of 16, but never all of the prompt"
    assert {choice.text for choice in again.choices} == {first.choices[0].text}
    assert metric(serve_url, "raylm:prefix_cache_hits_total") >= 64


def test_penalties_change_the_text(client, offline):
    prompt = "One, one, one, one, one"
    options = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 16}
    texts = [client.completions.create(**options, frequency_penalty=value).choices[0].text for value in (0, 1.5)]
    assert texts[0] != texts[1]
    params = SamplingParams(temperature=0, max_tokens=16, frequency_penalty=1.5)
    assert texts[1] == offline.generate([prompt], params, progress=False)[0].outputs[0].text
    with pytest.raises(
        openai.BadRequestError, match=r"frequency_penalty must be a number in \[-2, 2\], got 2.5"
    ) as error:
        client.chat.completions.create(model=MODEL, messages=PARIS, frequency_penalty=2.5)
    assert error.value.param == "frequency_penalty"


def test_what_is_asked_of_single_tokens_reaches_the_workers(client, offline):
    prompt = "The capital of France is"
    paris = offline.text.encode(" Paris", add_special_tokens=False)[0]
    fields = {"bad_words": ["Paris"], "min_tokens": 5, "typical_p": 0.9, "stop": ["."], "top_k": 1}
    params = SamplingParams(**fields, max_tokens=24, logit_bias={paris: 100}, include_stop_str_in_output=True)
    expected = offline.generate([prompt], params, progress=False)[0]
    answer = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=24,
        logit_bias={str(paris): 100},
        extra_body={**fields, "include_stop_str_in_output": True, "return_token_ids": True, "top_p": 1},
    )
    choice, output = answer.choices[0].model_dump(), expected.outputs[0]
    assert (choice["text"], choice["token_ids"]) == (output.text, output.token_ids)
    assert (choice["finish_reason"], choice["stop_reason"]) == (output.finish_reason, output.stop_reason)
    assert paris not in output.token_ids and len(output.token_ids) >= 5
    assert choice["prompt_token_ids"] == expected.prompt_token_ids
    with pytest.raises(openai.BadRequestError, match=r"logits_processors names 'mine'; this model has none"):
        client.completions.create(**FEW, extra_body={"logits_processors": ["mine"]})
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids holds the token id 10000000"):
        client.chat.completions.create(model=MODEL, messages=PARIS, extra_body={"allowed_token_ids": [10**7]})


def test_beams_and_the_best_of_several(client, offline):
    prompt = "The sea is"
    body = {"use_beam_search": True}
    beams = client.completions.create(model=MODEL, prompt=prompt, n=2, best_of=3, max_tokens=6, extra_body=body)
    params = SamplingParams(beam_width=3, n=2, max_tokens=6)
    expected = offline.generate([prompt], params, progress=False)[0].outputs
    assert [choice.text for choice in beams.choices] == [output.text for output in expected]
    options = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 1.5, "seed": 3}
    best = client.completions.create(**options, best_of=4)
    every = client.completions.create(**options, n=4)
    assert best.choices[0].text in [choice.text for choice in every.choices]
    assert best.usage.completion_tokens == every.usage.completion_tokens


def test_a_deadline_ends_a_request(serve_url):
    body = {"model": MODEL, "prompt": "A", "max_tokens": 2000, "ignore_eos": True, "deadline_s": 1.0, "stream": True}
    with httpx.stream("POST", f"{serve_url}/v1/completions", json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    if answer.status_code == 503:  # The engine has seen by now how long 2,000 tokens take.
        assert "deadline_s is 1" in lines[0]
    else:
        assert any("deadline_exceeded" in line for line in lines), lines[-3:]
    wait_for(lambda: metric(serve_url, "raylm:num_requests_running") == 0)


def test_stop_strings_end_the_text_and_the_request(serve_url, client):
    options = {"model": MODEL, "prompt": "1, 2, 3, 4, 5, 6, 7,", "temperature": 0, "max_tokens": 200}
    answer = client.completions.create(**options, stop=["11"])
    assert answer.choices[0].finish_reason == "stop"
    assert "10" in answer.choices[0].text and "11" not in answer.choices[0].text
    wait_for(lambda: metric(serve_url, "raylm:num_requests_running") == 0)


def test_length_ends_with_length(client):
    answer = client.completions.create(
        model=MODEL, prompt="A", max_tokens=5, temperature=0, extra_body={"ignore_eos": True}
    )
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 5)


def test_a_dropped_connection_frees_its_blocks(serve_url):
    """A raw socket, closed in the middle of an answer that would otherwise go on for 2,000 tokens."""
    where = urlparse(serve_url)
    body = b'{"model": "smollm2-135m", "prompt": "A", "max_tokens": 2000, "stream": true, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        connection.sendall(head % len(body) + body)
        assert b"200 OK" in connection.recv(1000)
        wait_for(lambda: metric(serve_url, "raylm:kv_cache_usage_perc") > 0)
    wait_for(lambda: metric(serve_url, "raylm:num_requests_running") == 0)
    assert metric(serve_url, "raylm:kv_cache_usage_perc") == 0


def test_a_stream_that_waits_in_the_queue_has_begun_and_shows_that_it_lives(serve_url):
    """The engine runs four sequences at a time; a comment comes after a second here."""
    chats, completions = f"{serve_url}/v1/chat/completions", f"{serve_url}/v1/completions"
    chat = {"model": MODEL, "messages": PARIS, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", chats, json=chat | {"n": 4}, timeout=120) as busy:
        running = busy.iter_lines()
        assert next(line for line in running if line.startswith("data") and '"role"' not in line)
        with (
            httpx.stream("POST", chats, json=chat, timeout=120) as waits,
            httpx.stream("POST", completions, json=FEW | {"stream": True}, timeout=120) as waits_too,
        ):
            wait_for(lambda: metric(serve_url, "raylm:num_requests_waiting") == 2)
            lines = filter(None, waits.iter_lines())
            assert '"delta":{"role":"assistant","content":""}' in next(lines)
            assert next(lines) == next(filter(None, waits_too.iter_lines())) == ": keep-alive"
    wait_for(lambda: metric(serve_url, "raylm:num_requests_running") == 0)


def test_many_clients_at_once(client):
    def ask(index: int) -> str:
        answer = client.completions.create(model=MODEL, prompt=f"{index} plus one is", max_tokens=8, temperature=0)
        return answer.choices[0].text

    alone = [ask(index) for index in range(3)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, [0, 1, 2] * 3))[:3] == alone


def test_a_full_queue_answers_503_and_the_engine_goes_on(serve_url, client):
    def ask(_: int) -> httpx.Response:
        body = {"model": MODEL, "prompt": "A", "max_tokens": 30, "ignore_eos": True}
        return httpx.post(f"{serve_url}/v1/completions", json=body, timeout=120)

    # Four sequences that go on for long have all rows: eight wait and the others are refused, however late they come.
    chat = {"model": MODEL, "messages": PARIS, "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 4}
    with ThreadPoolExecutor(30) as pool:
        with httpx.stream("POST", f"{serve_url}/v1/chat/completions", json=chat, timeout=120) as busy:
            running = busy.iter_lines()
            assert next(line for line in running if line.startswith("data") and '"role"' not in line)
            asked = [pool.submit(ask, index) for index in range(30)]
            wait_for(lambda: sum(each.done() for each in asked) >= 22)
        answers = [each.result() for each in asked]
    codes = Counter(answer.status_code for answer in answers)
    assert codes == {200: 8, 503: 22}
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert int(refused.headers["retry-after"]) >= 1
    assert "requests are waiting" in refused.json()["error"]["message"]
    assert client.completions.create(model=MODEL, prompt="A", max_tokens=1).choices


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, ["gpt-9"]),
        ({"prompt": [1] * 3000}, openai.BadRequestError, ["3000", "2048"]),
        ({"temperature": -1}, openai.BadRequestError, ["temperature", "-1"]),
        ({"top_p": 0}, openai.BadRequestError, ["top_p"]),
        ({"prompt": [49152]}, openai.BadRequestError, ["49152"]),
        ({"max_tokens": "many"}, openai.BadRequestError, ["max_tokens"]),
    ],
)
def test_bad_input_is_refused_and_loses_nobody(client, options, error, parts):
    good = {"model": MODEL, "prompt": "The sea is", "max_tokens": 12, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: client.completions.create(**good))
        with pytest.raises(error) as caught:
            client.completions.create(**{**good, **options})
        for part in parts:
            assert part in caught.value.message
        assert other.result().choices[0].text


@pytest.mark.nightly
def test_a_dead_engine_is_replaced(serve_url, client):
    """Kill the worker's process in the middle of a stream: it goes on with the successor, and so does the server.

    Every run has its parts: a killed worker ends its engine (test_faults.py), and streams of a killed engine go on
    (test_failover_served.py).
    """
    import os
    import signal

    import psutil

    body = {"model": MODEL, "prompt": "A", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{serve_url}/v1/completions", json=body, timeout=60) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert "error" not in next(lines)
        ours = {child.pid for child in psutil.Process().children(recursive=True)}
        # A process that ends meanwhile has no command line.
        first_words = {p.pid: (p.info["cmdline"] or [""])[0] for p in psutil.process_iter(["cmdline"])}
        victims = [pid for pid, word in first_words.items() if pid in ours and "ray::WorkerActor" in word]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        rest = list(lines)
    assert victims
    assert rest[-1] == "data: [DONE]" and not any('"error"' in line for line in rest), rest[-3:]

    def served() -> bool:
        try:
            return bool(client.completions.create(model=MODEL, prompt="A", max_tokens=1).choices)
        except openai.APIStatusError as error:
            assert error.status_code in (500, 503)
            return False

    wait_for(served, seconds=180)
