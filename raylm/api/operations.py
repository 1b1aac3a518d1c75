"""The table of operations: every route, every url of a batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from raylm.api.answering import Answering, Draft
from raylm.api.call import Call, Events
from raylm.api.completions import Completions
from raylm.api.dialect import OPENAI, Dialect
from raylm.api.identity import ADMIN, INFERENCE
from raylm.api.metrics import HttpMetrics
from raylm.api.models import ModelListing
from raylm.api.openai_chat import OpenAIChat
from raylm.api.preparation import Models, Preparation
from raylm.api.render import Rendering
from raylm.api.running_requests import Aborting, RunningRequests
from raylm.api.sagemaker import SageMaker
from raylm.api.tokenise import Tokenising
from raylm.config.serving import HttpConfig
from raylm.generation.served_model import ModelCatalog

Parse = Callable[[Call], Draft]


class Operation(NamedTuple):
    """One thing that the server can be asked.

    path: starlette's, with its parameters in braces. scope: what a key must be good for; None: no key is wanted.
    run: gives JSON, or the events of a stream; its errors are exceptions of raylm.
    in_batches: lines of a batch may ask for it. dialect: how errors and streams are written.
    is_refused: clients know it and this server does not do it; the answer always says so.
    """

    method: str
    path: str
    scope: str | None
    run: Callable[[Call], Awaitable[bytes | Events]]
    in_batches: bool = False
    dialect: Dialect = OPENAI
    is_refused: bool = False


def operations(catalog: ModelCatalog, config: HttpConfig, metrics: HttpMetrics) -> list[Operation]:
    """All operations on the models of a catalog."""
    models = Models(catalog)
    requests = RunningRequests()
    preparation, answering = Preparation(config), Answering(metrics, requests)
    chat, completions = OpenAIChat(models, config), Completions(models, config)
    listing = ModelListing(models)
    sagemaker = SageMaker(catalog, chat, completions)

    def generating(path: str, parse: Parse, *, in_batches: bool = False) -> Operation:
        run = partial(generate, preparation, answering, parse)
        return Operation("POST", path, INFERENCE, run, in_batches)

    return [
        generating("/v1/chat/completions", chat.parse, in_batches=True),
        generating("/v1/completions", completions.parse, in_batches=True),
        Operation("GET", "/v1/models", INFERENCE, listing.list),
        Operation("GET", "/v1/models/{model:path}", INFERENCE, listing.describe),
        *_tokenising(Tokenising(models, config, preparation)),
        *_rendering(Rendering(chat, completions, preparation)),
        *_aborting(Aborting(requests, config)),
        Operation("GET", "/ping", None, sagemaker.ping),
        Operation("POST", "/ping", None, sagemaker.ping),
        generating("/invocations", sagemaker.parse),
    ]


def _tokenising(tokenising: Tokenising) -> list[Operation]:
    # /tokenizer_info shows the chat template, which is the operator's.
    return [
        Operation("POST", "/v1/tokenize", INFERENCE, tokenising.tokenize),
        Operation("POST", "/tokenize", INFERENCE, tokenising.tokenize),
        Operation("POST", "/v1/detokenize", INFERENCE, tokenising.detokenize),
        Operation("POST", "/detokenize", INFERENCE, tokenising.detokenize),
        Operation("GET", "/tokenizer_info", ADMIN, tokenising.info),
    ]


def _rendering(rendering: Rendering) -> list[Operation]:
    return [
        Operation("POST", "/v1/chat/completions/render", INFERENCE, rendering.chat),
        Operation("POST", "/v1/completions/render", INFERENCE, rendering.completions),
    ]


def _aborting(aborting: Aborting) -> list[Operation]:
    return [
        Operation("POST", "/v1/abort", INFERENCE, aborting.abort),
        Operation("POST", "/abort_requests", INFERENCE, aborting.abort),
        Operation("POST", "/abort_request", INFERENCE, aborting.abort),
    ]


async def generate(preparation: Preparation, answering: Answering, parse: Parse, call: Call) -> bytes | Events:
    """What `parse` reads from the call, generated and answered."""
    draft = await preparation.read(call, parse)
    draft, job = await preparation.job(draft)
    return await answering.answer(draft, job, call)
