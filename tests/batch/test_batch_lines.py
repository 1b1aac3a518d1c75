"""A batch's lines: what is taken, what becomes an error, and that each has one result."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raylm.batch import shards
from raylm.batch.files import Place
from raylm.batch.job import run_batch
from raylm.batch.running import answer_all
from raylm.core.sampling import SamplingParams
from raylm.errors import ConfigError
from tests.batch.batch_fakes import (
    LETTERS,
    LetterText,
    answer_of,
    chat_line,
    completion_line,
    in_process,
    read_results,
    settings,
    write_lines,
)
from tests.support.fakes import expected_tokens


def said(prompt: str, max_tokens: int) -> str:
    """What the fake model answers to a prompt."""
    tokens, _ = expected_tokens(LetterText().encode(prompt), SamplingParams(max_tokens=max_tokens), 64)
    return "".join(LETTERS[token] for token in tokens if token)


def run(tmp_path: Path, lines: list[object], **changes) -> list[dict]:
    source = write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    summary = run_batch(settings(source, output, **changes), in_process)
    results = read_results(output)
    assert summary.totals.lines == len(results)
    assert summary.totals.errors == sum(
        result["response"] is None or result["response"]["status_code"] >= 400 for result in results
    )
    return results


def test_every_kind_of_line_is_answered_as_the_server_would(tmp_path):
    lines = [
        chat_line("a"),
        completion_line("b"),
        "tell me",
        {"prompt": "go on", "max_tokens": 3, "custom_id": "own"},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
        completion_line("two", n=2, prompt="again"),
    ]
    results = run(tmp_path, lines)
    assert [result["custom_id"] for result in results] == ["a", "b", "line-3", "own", "line-5", "two"]
    assert all(result["error"] is None and result["response"]["status_code"] == 200 for result in results)
    assert len({result["id"] for result in results}) == len({r["response"]["request_id"] for r in results}) == 6
    bodies = [result["response"]["body"] for result in results]
    assert bodies[0]["choices"][0]["message"]["content"] == said("hello", 5)
    assert bodies[0]["object"] == "chat.completion"
    assert [body["choices"][0]["text"] for body in bodies[1:4]] == [
        said("hello", 5),
        said("tell me", 6),
        said("go on", 3),
    ]
    assert bodies[1]["usage"]["prompt_tokens"] == 5
    assert bodies[4]["choices"][0]["message"]["content"] == said("hi", 4)
    assert [choice["text"] for choice in bodies[5]["choices"]] == [said("again", 5)] * 2


LINE_ENDS = "a\x85b\u2028c\u2029d\x0be\x0cf\x1cg"
"""Whatever str.splitlines takes for the end of a line, besides \\n and \\r."""


def test_a_result_is_one_line_for_readers_that_split_at_unicodes_line_ends(tmp_path):
    asked = completion_line(LINE_ENDS, prompt="hello", stop=[LINE_ENDS[1:2]], max_tokens=3)
    refused = completion_line("x" + LINE_ENDS, model=LINE_ENDS)
    # As written by a client that leaves in JSON what may be left in it.
    lines = [json.dumps(line, ensure_ascii=False).encode() for line in (asked, refused)]
    assert all(len(line.decode().splitlines()) > 1 for line in lines)
    results = run(tmp_path, lines)
    assert [result["custom_id"] for result in results] == [LINE_ENDS, "x" + LINE_ENDS]
    assert [result["response"]["status_code"] for result in results] == [200, 404]
    assert results[0]["response"]["body"]["choices"][0]["text"] == said("hello", 3)
    text = (tmp_path / "out.jsonl").read_bytes().decode()
    assert [json.loads(line) for line in text.splitlines()] == results


def test_a_prompt_of_a_text_file_ends_at_newlines_alone(tmp_path):
    (tmp_path / "in.txt").write_bytes("one\x85two\u2028three\n".encode())
    run_batch(settings(tmp_path / "in.txt", tmp_path / "out.jsonl"), in_process)
    (result,) = read_results(tmp_path / "out.jsonl")
    assert result["response"]["body"]["choices"][0]["text"] == said("one\x85two\u2028three", 6)


@pytest.mark.parametrize(
    ("line", "custom_id", "code"),
    [
        (b"{not json", None, "invalid_json"),
        (b'{"custom_id": "\xff"}', None, "invalid_json"),
        (b"17", None, "invalid_line"),
        ({"url": "/v1/completions", "body": {}}, None, "missing_custom_id"),
        (chat_line("x") | {"method": "GET"}, "x", "invalid_method"),
        (chat_line("x") | {"url": "/v1/images"}, "x", "unknown_url"),
        (chat_line("x") | {"url": ["/v1"]}, "x", "unknown_url"),
        (chat_line("x") | {"url": "/v1/embeddings"}, "x", "unsupported_url"),
        (chat_line("x") | {"url": "/v1/score"}, "x", "unsupported_url"),
        (chat_line("first"), "first", "duplicate_custom_id"),
    ],
)
def test_a_line_that_cannot_be_asked_is_an_error_alone(tmp_path, line, custom_id, code):
    results = run(tmp_path, [chat_line("first"), line, chat_line("last")])
    assert [result["error"] is None for result in results] == [True, False, True]
    assert results[1]["custom_id"] == custom_id
    assert results[1]["response"] is None
    assert results[1]["error"]["code"] == code


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        (chat_line("x", "long" * 20), 400, "context_length_exceeded"),
        (completion_line("x", max_tokens=100), 400, "context_length_exceeded"),
        (chat_line("x", model="other"), 404, "model_not_found"),
        (chat_line("x", stream=True), 400, "unsupported_parameter"),
        (chat_line("x", lora_path="adapter"), 400, "unsupported_parameter"),
        (chat_line("x", temperature="hot"), 400, None),
        (chat_line("x") | {"body": []}, 400, "invalid_json"),
        (chat_line("x") | {"body": "{"}, 400, "invalid_json"),
    ],
)
def test_a_request_that_the_server_would_refuse_is_refused_alone(tmp_path, line, status, code):
    results = run(tmp_path, [chat_line("first"), line, chat_line("last")])
    assert [result["response"]["status_code"] for result in results] == [200, status, 200]
    assert results[1]["error"] is None
    assert results[1]["response"]["body"]["error"]["code"] == code


def test_log_probabilities_of_answers_and_prompts(tmp_path):
    lines = [
        chat_line("chat", logprobs=True, top_logprobs=2),
        completion_line("text", logprobs=1, echo=True, max_tokens=2, prompt_logprobs=0),
    ]
    chat, text = (result["response"]["body"]["choices"][0] for result in run(tmp_path, lines))
    content = chat["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).startswith(chat["message"]["content"])
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] < 0 for entry in content)
    tokens, values = text["logprobs"]["tokens"], text["logprobs"]["token_logprobs"]
    assert len(tokens) == len(values) and values[0] is None and None not in values[1:]
    assert text["prompt_logprobs"][0] is None
    assert [next(iter(one.values()))["logprob"] for one in text["prompt_logprobs"][1:]] == values[1:-2]


def test_a_stop_string_ends_an_answer(tmp_path):
    text = said("hello", 5)
    result = run(tmp_path, [completion_line("x", stop=[text[2]])])[0]["response"]["body"]
    assert result["choices"][0]["text"] == text[: text.index(text[2])]
    assert result["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("keep_order", [True, False])
def test_order_is_kept_or_only_each_line_once(tmp_path, keep_order):
    lines = [completion_line(str(number), max_tokens=1 + 40 * (number % 2 == 0)) for number in range(37)]
    results = run(tmp_path, lines, shard_size=16, keep_order=keep_order)
    ids = [result["custom_id"] for result in results]
    ordered = [str(number) for number in range(37)]
    assert sorted(ids, key=int) == ordered
    assert ids == ordered or not keep_order


@pytest.mark.parametrize("keep_order", [True, False])
async def test_results_come_in_the_order_of_the_lines_or_of_their_ends(keep_order):
    class LaterIsFaster:
        async def answer(self, line):
            for _ in range(10 * (3 - line)):
                await asyncio.sleep(0)
            return line

    results = await answer_all(LaterIsFaster(), [0, 1, 2], keep_order=keep_order)
    assert results == ([0, 1, 2] if keep_order else [2, 1, 0])


def test_duplicates_are_found_across_shards_and_blank_lines_are_none(tmp_path):
    lines = [chat_line("a"), b"", chat_line("b"), b"  ", chat_line("c"), chat_line("b"), chat_line("d"), chat_line("a")]
    results = run(tmp_path, lines, shard_size=2)
    assert [(result["custom_id"], result["error"] is None) for result in results] == [
        ("a", True),
        ("b", True),
        ("c", True),
        ("b", False),
        ("d", True),
        ("a", False),
    ]
    assert "Line 6 " in results[3]["error"]["message"]


def test_a_line_that_is_too_long_is_an_error_and_the_next_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_LINE_BYTES", 400)
    results = run(tmp_path, [chat_line("a"), chat_line("b", "x" * 1000), chat_line("c")])
    assert results[1]["error"]["code"] == "line_too_long"
    assert results[1]["custom_id"] is None
    assert [result["custom_id"] for result in (results[0], results[2])] == ["a", "c"]


def test_shards_are_cut_by_their_bytes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_SHARD_BYTES", 600)
    source = write_lines(tmp_path / "in.jsonl", [chat_line(str(number)) for number in range(20)])
    plan = shards.plan_shards([Place(str(source))], "lines", 1000)
    assert len(plan.shards) == 5
    assert plan.num_requests == 20
    found = [request.custom_id for shard in plan.shards for request in shards.requests_of(shard, model="fake")]
    assert found == [str(number) for number in range(20)]


def test_no_lines_give_no_results(tmp_path):
    assert run(tmp_path, [b""]) == []


def test_a_text_file_has_a_prompt_a_line_and_a_folder_many_files(tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n\ntwo\r\n")
    (folder / "b.txt").write_bytes(b"\xff\nthree")
    run_batch(settings(folder, tmp_path / "out.jsonl"), in_process)
    results = read_results(tmp_path / "out.jsonl")
    assert [result["custom_id"] for result in results] == ["line-1", "line-3", None, "line-5"]
    assert results[2]["error"]["code"] == "invalid_utf8"
    assert results[3]["response"]["body"]["choices"][0]["text"] == said("three", 6)


def test_parquet_in_and_out(tmp_path):
    rows = [
        {"custom_id": "a", "url": "/v1/completions", "body": json.dumps(completion_line("")["body"]), "prompt": None},
        {"custom_id": "b", "url": None, "body": None, "prompt": "tell me"},
        {"custom_id": None, "url": None, "body": None, "prompt": None},
    ]
    table = pa.Table.from_pylist([row | {"n": 1, "label": b"\xff"} for row in rows])
    pq.write_table(table, tmp_path / "in.parquet")
    summary = run_batch(settings(tmp_path / "in.parquet", tmp_path / "out.parquet"), in_process)
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["custom_id"] for row in found] == ["a", "b", None]
    texts = [json.loads(row["response"]["body"])["choices"][0]["text"] for row in found[:2]]
    assert texts == [said("hello", 5), said("tell me", 6)]
    assert found[2]["response"] is None and found[2]["error"]["code"] == "invalid_line"
    assert (summary.totals.lines, summary.totals.errors) == (3, 1)


def test_any_fsspec_url_does(tmp_path):
    source, output = Place("memory://batch/in.jsonl"), Place("memory://batch/out.jsonl")
    with source.writer() as file:
        file.write(b'"one"\n"two"\n' * 5)
    run_batch(settings(source.url, output.url), in_process)
    assert len(output.read().splitlines()) == 10
    assert Place("memory://batch/out.jsonl.batch").names() == {"manifest.json"}


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("in.csv", b"a", "must end with .jsonl"),
        ("in.parquet", b"a", "cannot be read as Parquet"),
    ],
)
def test_a_wrong_input_is_a_sentence(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        run_batch(settings(tmp_path / name, tmp_path / "out.jsonl"), in_process)
    with pytest.raises(ConfigError, match="no such file"):
        run_batch(settings(tmp_path / "nothing.jsonl", tmp_path / "out.jsonl"), in_process)
    with pytest.raises(ConfigError, match="cannot be opened"):
        run_batch(settings("nowhere://x/in.jsonl", tmp_path / "out.jsonl"), in_process)


def test_a_table_without_a_column_of_ours_is_refused(tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match="has the columns text; one of body, prompt and messages is needed"):
        run_batch(settings(tmp_path / "in.parquet", tmp_path / "out.jsonl"), in_process)


def test_the_same_answers_whatever_the_shards(tmp_path):
    lines = [completion_line(str(number), prompt="abcdefghijkl"[: 1 + number % 12]) for number in range(30)]
    found = []
    for size in (1, 7, 100):
        folder = tmp_path / str(size)
        folder.mkdir()
        found.append([answer_of(result) for result in run(folder, lines, shard_size=size)])
    assert found[0] == found[1] == found[2]
