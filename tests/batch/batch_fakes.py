"""A batch without Ray and without a model: the fake worker's engine answers in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raylm.batch.answer import Answerer
from raylm.batch.job import BatchSettings
from raylm.batch.running import run_shard
from raylm.batch.shards import Shard
from raylm.batch.work import Report, WorkFolder
from raylm.config.engine import EngineConfig, ModelConfig, SchedulerConfig
from raylm.core.sampling import SamplingParams
from raylm.text.chat import ChatTemplate
from raylm.text.chat_options import ChatOptions
from raylm.text.definition import TokenizerInfo
from raylm.text.stop import StopTable
from tests.support.engines import make_engine
from tests.support.fakes import VOCAB, FakeExecutor

CONFIG = EngineConfig(
    model=ModelConfig(path="fake"), scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
)
LETTERS = "\0abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "
assert len(LETTERS) == VOCAB


class Piece(NamedTuple):
    text: str
    finish_reason: str | None
    num_tokens: int
    stop_reason: str | int | None = None


class LetterStream:
    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop

    def push(self, token_ids: list[int], finish_reason: str | None) -> Piece:
        text = "".join(LETTERS[token] for token in token_ids if token)
        for stop in self._stop:
            if stop in text:
                return Piece(text[: text.index(stop)], "stop", len(token_ids), stop)
        return Piece(text, finish_reason, len(token_ids))


class LetterText:
    """A token is a letter; what is none of them is a blank."""

    chat_template = ChatTemplate(None, {})

    def encode(self, prompt: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        return [max(LETTERS.find(letter), 1) for letter in prompt]

    def render(self, messages: Sequence[Mapping[str, object]], options: ChatOptions | None = None) -> str:
        return " ".join(str(message["content"]) for message in messages)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(LETTERS[token] for token in ids)

    def token_names(self, ids: Sequence[int]) -> list[str]:
        return [LETTERS[token] for token in ids]

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        return TokenizerInfo({}, None, (0,), None)

    def detokenizer(self, params: SamplingParams, *, continues_prompt: bool) -> LetterDetokenizer:
        return LetterDetokenizer()

    def token_bytes(self, token_id: int) -> bytes:
        return LETTERS[token_id].encode()

    def prepare(self, params: SamplingParams) -> SamplingParams:
        return params

    def stop_table(self, params: SamplingParams) -> StopTable | None:
        return StopTable(params.stop) if params.stop else None

    def stream(
        self, params: SamplingParams, *, continues_prompt: bool = False, stops: StopTable | None = None
    ) -> LetterStream:
        return LetterStream(params.stop)


class LetterDetokenizer:
    def push(self, token_id: int) -> str:
        return LETTERS[token_id]


def fake_answerer(executor: FakeExecutor | None = None, *, queue: int = 4, config: EngineConfig = CONFIG) -> Answerer:
    """An answerer whose engine has room for few requests at a time."""
    engine = make_engine(executor or FakeExecutor(), queue=queue)
    return Answerer(config, engine, max_tokens=6, text=LetterText())


def in_process(todo: list[Shard], settings: BatchSettings, folder: WorkFolder) -> Generator[Report]:
    """What on_ray_data does, without Ray: one shard after another."""
    with asyncio.Runner() as runner:
        answerer = fake_answerer()
        try:
            for shard in todo:
                yield runner.run(run_shard(answerer, folder, shard, keep_order=settings.keep_order))
        finally:
            answerer.close()


def settings(source: Path | str, output: Path | str, **changes: Any) -> BatchSettings:
    return BatchSettings(
        **{"input": str(source), "output": str(output), "config": CONFIG, "shard_size": 4, "progress": False, **changes}
    )


def chat_line(custom_id: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": 5, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion_line(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "prompt": "hello", "max_tokens": 5, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write_lines(path: Path, lines: Sequence[object]) -> Path:
    """JSON lines; bytes are written as they are."""
    data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in data))
    return path


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def answer_of(result: Mapping[str, Any]) -> object:
    """What of a result is the same in every run."""
    response = result["response"]
    if response is None:
        return result["custom_id"], result["error"]
    body = response["body"]
    tokens = body["usage"]["total_tokens"] if "usage" in body else 0
    return result["custom_id"], response["status_code"], body.get("choices"), body.get("error"), tokens
