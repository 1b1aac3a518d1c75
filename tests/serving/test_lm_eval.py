"""lm-eval's local-completions, emulated: what it asks of a server, how it reads the answers, against transformers.

The requests and the reading are those of lm_eval 0.4 (models/openai_completions.py: LocalCompletionsAPI); its packages
are too many to install for two tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from raylm.batch.answer import OneModel
from raylm.config.engine import EngineConfig
from raylm.config.serving import HttpConfig
from raylm.engine.factory import local_engine
from raylm.engine.local_client import LocalClient
from raylm.generation.served_model import ServedModel
from raylm.model_files.source import locate
from raylm.serving.http import build_http_app
from raylm.text.processor import TextProcessor
from tests.support import checkpoints


class Pair(NamedTuple):
    """A task's context and one continuation of it."""

    context: str
    continuation: str


CHOICES = [
    Pair(f"Question: which of the {thing} is {quality}?\nAnswer:", f" {answer}")
    for thing, quality in (("birds", "blue"), ("houses — there", "öld"), ("numbers", "even"))
    for answer in ("the first", "the one that is", "zwölf 🐦 of them", "no")
]
"""A task of multiple choice: the likeliest continuation is the answer."""
ENDINGS = [
    Pair("hello hello hello hello", " hello"),
    Pair("The lazy dog sleeps while the quick", " fox"),
    Pair("one two three one two three one", " two three"),
    Pair("é" * 9, "é"),
]
"""A task like LAMBADA: how likely the last words are, and whether greedy decoding gives them."""


class App(NamedTuple):
    """A server of a random model in this process."""

    folder: Path
    text: TextProcessor
    app: Any


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """Blocks of 4 tokens and chunks of 16, so that prompts are computed in pieces."""
    folder = checkpoints.llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=256)
    config = EngineConfig.model_validate(
        {
            "model": {"path": str(folder), "max_model_len": 256},
            "cache": {"block_size": 4, "num_blocks": 200},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
            "runtime": {"device": "cpu"},
        }
    )
    engine = local_engine(config, progress=False)
    client, text = LocalClient(engine), TextProcessor.load(locate(str(folder)))
    model = ServedModel("random", 1, engine.info.max_model_len, engine.info.vocab_size, text, client)
    yield App(folder, text, build_http_app(OneModel(model), HttpConfig(strict=True)))
    client.close()


def encoded(text: TextProcessor, pair: Pair) -> tuple[list[int], list[int]]:
    """As TemplateLM._encode_pair: the continuation's tokens are what the whole has more than the context."""
    whole = text.encode(pair.context + pair.continuation, add_special_tokens=False)
    context = text.encode(pair.context, add_special_tokens=False)
    return context, whole[len(context) :]


def read(answer: dict[str, Any], context_lens: list[int]) -> list[tuple[float, bool]]:
    """As LocalCompletionsAPI.parse_logprobs: the continuation's log probability, and whether it is the greedy one."""
    found = []
    for choice, start in zip(sorted(answer["choices"], key=itemgetter("index")), context_lens, strict=True):
        tokens = choice["logprobs"]["token_logprobs"][start:-1]
        top = choice["logprobs"]["top_logprobs"][start:-1]
        greedy = all(token == max(likeliest.values()) for token, likeliest in zip(tokens, top, strict=True))
        found.append((sum(tokens), greedy))
    return found


@pytest.mark.parametrize("max_tokens", [1, 0])
@pytest.mark.parametrize("task", [CHOICES, ENDINGS], ids=["choices", "endings"])
@pytest.mark.parametrize("batch_size", [1, 4])
async def test_loglikelihoods_are_those_of_transformers(
    served: App, task: list[Pair], batch_size: int, max_tokens: int
) -> None:
    reference = checkpoints.reference(served.folder)
    pairs = [encoded(served.text, pair) for pair in task]
    found = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://raylm") as http:
        for start in range(0, len(pairs), batch_size):
            batch = pairs[start : start + batch_size]
            prompts = [context + continuation for context, continuation in batch]
            payload = {"prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234}
            response = await http.post("/v1/completions", json={"model": "random", "echo": True, **payload}, timeout=60)
            assert response.status_code == 200, response.text
            answer = response.json()
            if max_tokens == 0:
                # lm-eval leaves the last token out, which is the generated one.
                for choice in answer["choices"]:
                    choice["logprobs"]["token_logprobs"].append(None)
                    choice["logprobs"]["top_logprobs"].append(None)
            found += read(answer, [len(context) for context, _ in batch])
    for (context, continuation), (logprob, is_greedy) in zip(pairs, found, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])
        assert logprob == pytest.approx(own.sum().item(), abs=1e-3 * len(continuation))
        assert is_greedy == bool((logits.argmax(-1) == torch.tensor(continuation)).all())
    assert {greedy for _, greedy in found} >= {False}


async def test_texts_and_places_of_an_echoed_prompt(served: App) -> None:
    """A real tokenizer, whose tokens split characters: tokens stand where text_offset says."""
    text = "Zwölf 🐦 hello"
    fields = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://raylm") as http:
        choice = (await http.post("/v1/completions", json={"model": "random", **fields})).json()["choices"][0]
    found = choice["logprobs"]
    assert choice["text"].startswith(text)
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith("bytes:") and not token.startswith("<"):
            assert choice["text"].startswith(token, offset), (token, offset)
    assert any(token.startswith("bytes:") for token in found["tokens"])
    assert found["text_offset"] == sorted(found["text_offset"])
