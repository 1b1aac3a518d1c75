from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from raylm.bench.cases import Dataset, Request, parse_case
from raylm.bench.client import Client
from raylm.bench.report import as_json
from raylm.bench.serve import Goodput, Load, Run, Target, Timing, summarize, sweep
from raylm.bench.sse import Answer, Body, ClientError
from raylm.errors import ConfigError, RaylmError
from raylm.sim.arrivals import arrivals
from tests.support.openai_server import FakeServer

LATENCIES = {f"{name}_ms_p{p}" for name in ("ttft", "itl", "tpot", "e2e") for p in (50, 90, 99)}
KEYS = LATENCIES | {
    "bench",
    "model",
    "case",
    "requests",
    "input_len",
    "output_len",
    "seconds",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "concurrency",
    "request_rate",
    "goodput",
    "failed",
}

UNLIMITED = Load()


def ask(url, body=None, *, times=1):
    """The answers to `times` requests, one after another over one client."""

    async def run():
        client = Client(url)
        try:
            path = "/chat/completions" if "messages" in (body or {}) else "/completions"
            request = {"max_tokens": 5, "stream": True} | (body or {})
            return [await client.stream(path, request, timeout_s=120) for _ in range(times)]
        finally:
            await client.close()

    return asyncio.run(run())


def load(server, cases=("a:6:4:5",), loads=(UNLIMITED,), *, goodput=None, **settings):
    results = []
    target = Target(server.url, "fake", timeout_s=120, **settings)
    sweep(target, [parse_case(case) if isinstance(case, str) else case for case in cases], loads, results.append,
          goodput=goodput)  # fmt: skip
    return results


@pytest.mark.parametrize("how", [{}, {"split": 7}, {"close": True}, {"close": True, "split": 50}], ids=str)
def test_the_client_reads_a_stream(how):
    with FakeServer(**how).running() as server:
        (answer,) = ask(server.url)
    assert (len(answer.arrivals), answer.output_tokens, answer.prompt_tokens) == (5, 5, 10)
    assert answer.sent <= answer.arrivals[0] <= answer.arrivals[-1] <= answer.finished
    assert answer.arrivals == sorted(answer.arrivals)


def test_connections_are_kept():
    with FakeServer().running() as server:
        answers = ask(server.url, times=3)
        assert server.connections == 1
    assert [answer.output_tokens for answer in answers] == [5, 5, 5]


def test_a_connection_that_closed_is_replaced():
    with FakeServer(close=True).running() as server:
        assert len(ask(server.url, times=2)) == 2
        assert server.connections == 2


def test_merged_chunks_are_fewer_arrivals_but_as_many_tokens():
    with FakeServer(merge=2).running() as server:
        (answer,) = ask(server.url)
    assert len(answer.arrivals) == 3
    assert Timing.of(answer).output_tokens == 5


def test_a_role_is_no_first_token():
    with FakeServer().running() as server:
        (answer,) = ask(server.url, {"messages": []})
    assert len(answer.arrivals) == 5
    assert answer.first_choice is not None and answer.first_choice <= answer.arrivals[0]


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"status": 503}, 'answered 503: {"error": {"message": "no"}}'),
        ({"fail_every": 1}, "the server sent an error.*the engine died"),
    ],
)
def test_failed_requests_say_why(how, problem):
    with FakeServer(**how).running() as server, pytest.raises(ClientError, match=problem):
        ask(server.url)


def test_no_server_and_wrong_addresses():
    with pytest.raises(ClientError, match="no connection"):
        ask("http://127.0.0.1:9/v1")
    for url in ("ftp://x/v1", "127.0.0.1:8000", "http://a:b/v1"):
        with pytest.raises(ConfigError, match="--url"):
            Client(url)


@pytest.mark.parametrize(
    ("data", "problem"),
    [(b"{", "no completion chunk"), (b'{"choices": 3}', "no completion chunk"), (b'{"error": "x"}', "sent an error")],
)
def test_events_that_are_no_chunks(data, problem):
    with pytest.raises(ClientError, match=problem):
        Answer().take(data, 0.0)


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_chunked_bodies_are_joined_wherever_they_are_cut(step):
    raw = b"5;x=1\r\nhello\r\n1\r\n!\r\n0\r\nTrailer: 1\r\n\r\n"
    body = Body({b"transfer-encoding": b"Chunked"})
    out = b"".join(body.feed(raw[place : place + step]) for place in range(0, len(raw), step))
    assert out == b"hello!" and body.done


def test_sized_bodies_end_with_their_last_byte():
    body = Body({b"content-length": b"4"})
    assert body.feed(b"ab") == b"ab" and not body.done
    assert body.feed(b"cd") == b"cd" and body.done
    assert Body({b"content-length": b"0"}).done


def test_a_load_gives_the_keys():
    with FakeServer().running() as server:
        (result,) = load(server, loads=[Load(concurrency=2)])
        bodies = [body for path, body in server.requests]
        assert {path for path, _ in server.requests} == {"/v1/completions"}
    row = as_json(result)
    assert set(row) == KEYS
    assert (row["requests"], row["failed"], row["concurrency"], row["request_rate"]) == (6, 0, 2, "inf")
    assert row["goodput"] is None
    assert result.output_tokens_per_s * result.seconds == pytest.approx(30)
    assert result.total_tokens_per_s * result.seconds == pytest.approx(30 + 60)
    assert all(row[key] >= 0 for key in LATENCIES)
    # Four to warm up, then six; no prompt comes twice.
    assert len(bodies) == 10 and len({tuple(body["prompt"]) for body in bodies}) == 10
    last = bodies[-1]
    assert last["ignore_eos"] is True and last["stream_options"] == {"include_usage": True}
    assert all(len(body["prompt"]) == 4 and max(body["prompt"]) < 32000 for body in bodies)


def test_a_sweep_runs_every_case_under_every_load():
    with FakeServer().running() as server:
        results = load(server, ["a:2:4:5", "b:2:4:3-5"], [Load(1), Load(2, rate=1000.0)])
    assert [(r.case, r.concurrency, r.request_rate) for r in results] == [
        ("a", 1, "inf"),
        ("a", 2, 1000.0),
        ("b", 1, "inf"),
        ("b", 2, 1000.0),
    ]
    assert results[2].output_len == "3-5" and results[2].output_len_mean == 4


def test_failures_are_counted_and_are_not_good():
    with FakeServer(fail_every=5).running() as server:
        (result,) = load(server, goodput=Goodput(e2e=1e6))
    # Of ten requests the fifth and the tenth fail; both come after the four of the warm-up.
    assert result.failed == 2
    assert result.output_tokens_per_s * result.seconds == pytest.approx(20)
    assert result.goodput * result.seconds == pytest.approx(4)


def test_a_server_that_only_fails_is_an_error():
    with FakeServer(status=500).running() as server, pytest.raises(RaylmError, match="all 6 requests failed.*500"):
        load(server)


def test_chat_and_datasets():
    entries = (Request("one", 3), Request([{"role": "user", "content": "two"}], 4))
    with FakeServer(usage=False).running() as server:
        (result,) = load(server, [Dataset("mine", entries)], endpoint="chat", ignore_eos=False)
        bodies = [body for _, body in server.requests][-2:]
        assert {path for path, _ in server.requests} == {"/v1/chat/completions"}
    assert [body["messages"][0]["content"] for body in bodies] == ["one", "two"]
    assert all("ignore_eos" not in body for body in bodies)
    assert (result.requests, result.output_len) == (2, "3-4")
    # Without usage, chunks are counted.
    assert result.output_tokens_per_s * result.seconds == pytest.approx(7)


def test_poisson_arrivals_follow_the_seed():
    times = arrivals(2000, 4.0, 1)
    assert times == arrivals(2000, 4.0, 1) != arrivals(2000, 4.0, 2)
    assert times == sorted(times)
    assert times[-1] / 2000 == pytest.approx(0.25, rel=0.1)
    assert arrivals(3, None, 1) == [0.0, 0.0, 0.0]


def timing(**changes):
    return replace(Timing(ttft=100.0, e2e=400.0, gaps=[10.0, 60.0], tpot=30.0, prompt_tokens=4, output_tokens=11),
                   **changes)  # fmt: skip


def test_times_of_an_answer():
    answer = Answer(sent=1.0, finished=1.5, arrivals=[1.1, 1.2, 1.4], prompt_tokens=4, output_tokens=5)
    seen = Timing.of(answer)
    assert seen.ttft == pytest.approx(100) and seen.e2e == pytest.approx(500)
    assert seen.gaps == pytest.approx([100, 200]) and seen.tpot == pytest.approx(100)
    silent = Timing.of(Answer(sent=1.0, finished=1.5, first_choice=1.3, output_tokens=1))
    assert silent.ttft == pytest.approx(300) and silent.tpot is None and silent.gaps == []
    with pytest.raises(ClientError, match="no choices"):
        Timing.of(Answer(sent=1.0, finished=1.5))


def test_goodput_wants_every_limit_met():
    limits = Goodput.parse(["ttft:100", "itl:50.5"])
    assert limits == Goodput(ttft=100.0, itl=50.5)
    assert timing(gaps=[10.0]).meets(limits)
    assert not timing().meets(limits)
    assert not timing(ttft=100.1, gaps=[]).meets(limits)
    assert timing(tpot=None).meets(Goodput(tpot=1.0))
    assert Goodput.parse([]) is None
    for word in ("ttft", "ttft:", "ttft:-1", "speed:3", "itl:0"):
        with pytest.raises(ConfigError, match="--goodput"):
            Goodput.parse([word])


def test_a_summary_of_known_times():
    run = Run(seconds=2.0, timings=[timing(), timing(ttft=200.0, gaps=[])], errors=["x"])
    result = summarize(run, parse_case("a:3:4:11"), Load(None, 5.0), model="m", goodput=Goodput(ttft=150.0))
    assert (result.ttft_ms_p50, result.itl_ms_p50, result.tpot_ms_p99) == (150.0, 35.0, 30.0)
    assert (result.goodput, result.failed, result.request_rate, result.concurrency) == (0.5, 1, 5.0, 3)
    assert (result.output_tokens_per_s, result.total_tokens_per_s) == (11.0, 15.0)
