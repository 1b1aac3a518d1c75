"""The table of operations: every route, every url of a batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from raylm.api import admin, openai_chat, render, running_requests, tokenise
from raylm.api import completions as completions_api
from raylm.api import models as models_api
from raylm.api import sagemaker as sagemaker_api
from raylm.api.about import About
from raylm.api.admin import Administration
from raylm.api.answering import Answering, Draft
from raylm.api.call import Call, Events
from raylm.api.completions import Completions
from raylm.api.dialect import ANTHROPIC, OLLAMA, OPENAI, Dialect
from raylm.api.errors import HttpError
from raylm.api.identity import ADMIN, INFERENCE, Identity
from raylm.api.messages import operation as messages_api
from raylm.api.messages.operation import Messages, count_tokens
from raylm.api.metrics import HttpMetrics
from raylm.api.models import ModelListing
from raylm.api.ollama import models as ollama_models
from raylm.api.ollama import operation as ollama_api
from raylm.api.ollama.models import OllamaModels
from raylm.api.ollama.operation import Ollama
from raylm.api.ollama.operation import answer as ollama_answer
from raylm.api.openai_chat import OpenAIChat
from raylm.api.preparation import Models, Preparation
from raylm.api.render import Rendering
from raylm.api.responses import about as responses_about
from raylm.api.responses.keeper import Keeper
from raylm.api.responses.remote import RemoteTools
from raylm.api.responses.running import Machine
from raylm.api.responses.service import Responses
from raylm.api.running_requests import Aborting, RunningRequests
from raylm.api.sagemaker import SageMaker
from raylm.api.tokenise import Tokenising
from raylm.config.mcp import McpConfig
from raylm.config.serving import HttpConfig
from raylm.errors import ConfigError
from raylm.generation.served_model import ModelCatalog
from raylm.plugins import load_plugins

Parse = Callable[[Call], Draft]
Run = Callable[[Call], Awaitable[bytes | Events]]


class Operation(NamedTuple):
    """One thing that the server can be asked.

    path: starlette's, with its parameters in braces. scope: what a key must be good for; None: no key is wanted.
    run: gives JSON, or the events of a stream; its errors are exceptions of raylm.
    about: what it takes and gives, for the OpenAPI document; None leaves it out there.
    in_batches: lines of a batch may ask for it. dialect: how errors and streams are written.
    is_refused: clients know it and this server does not do it; the answer always says so.
    """

    method: str
    path: str
    scope: str | None
    run: Run
    about: About | None = None
    in_batches: bool = False
    dialect: Dialect = OPENAI
    is_refused: bool = False
    is_counted: bool = False
    """It generates: a tenant has only so many of it."""


def operations(
    catalog: ModelCatalog,
    config: HttpConfig,
    metrics: HttpMetrics,
    keeper: Keeper | None = None,
    mcp: McpConfig | None = None,
    *,
    identity_of: Callable[[str], Identity] = Identity,
) -> list[Operation]:
    """All operations on the models of a catalog. Without a keeper no response is stored, without `mcp` none uses MCP
    servers' tools. `identity_of`: a tenant as it is known now."""
    models = Models(catalog)
    requests = RunningRequests()
    preparation, answering = Preparation(config), Answering(metrics, requests)
    chat, completions = OpenAIChat(models, config), Completions(models, config)
    listing = ModelListing(models)
    machine = Machine(preparation, metrics, requests)
    sagemaker = SageMaker(catalog, chat, completions)
    tools = RemoteTools(mcp or McpConfig())

    def generating(path: str, parse: Parse, about: About, *, in_batches: bool = False) -> Operation:
        run = partial(generate, preparation, answering, parse)
        return Operation("POST", path, INFERENCE, run, about, in_batches, is_counted=True)

    own = [
        generating("/v1/chat/completions", chat.parse, openai_chat.ABOUT, in_batches=True),
        generating("/v1/completions", completions.parse, completions_api.ABOUT, in_batches=True),
        *_messages(models, config, preparation, answering),
        *_ollama(models, config, preparation, answering),
        *_responses(Responses(models, machine, config, tools, keeper, identity_of=identity_of)),
        Operation("GET", "/v1/models", INFERENCE, listing.list, models_api.ABOUT_LIST),
        Operation("GET", "/v1/models/{model:path}", INFERENCE, listing.describe, models_api.ABOUT_ONE),
        *_tokenising(Tokenising(models, config, preparation)),
        *_rendering(Rendering(chat, completions, preparation)),
        *_aborting(Aborting(requests, config, preparation)),
        *_looking_after(Administration(catalog)),
        Operation("GET", "/ping", None, sagemaker.ping, sagemaker_api.ABOUT_PING),
        Operation("POST", "/ping", None, sagemaker.ping, sagemaker_api.ABOUT_PING),
        generating("/invocations", sagemaker.parse, sagemaker_api.ABOUT_INVOCATIONS),
    ]
    return [*own, *_of_plugins(own, catalog, config)]


def _of_plugins(own: list[Operation], catalog: ModelCatalog, config: HttpConfig) -> list[Operation]:
    """Routes of other packages. Raises ConfigError where one gives something else, or a route that is there."""
    found: list[Operation] = []
    for name, make in load_plugins("raylm.routes").items():
        routes = make(catalog, config) if callable(make) else make
        if not isinstance(routes, list) or not all(isinstance(route, Operation) for route in routes):
            raise ConfigError(f"the plug-in {name!r} (raylm.routes) gives {routes!r}; allowed: a list of operations")
        taken = {(route.method, route.path) for route in [*own, *found]}
        if clash := next((route for route in routes if (route.method, route.path) in taken), None):
            raise ConfigError(f"the plug-in {name!r} (raylm.routes) has {clash.method} {clash.path}, which is there")
        found += routes
    return found


def _messages(models: Models, config: HttpConfig, preparation: Preparation, answering: Answering) -> list[Operation]:
    messages = Messages(models, config)
    create = partial(generate, preparation, answering, messages.parse)
    count = partial(count_tokens, preparation, messages)
    return [
        Operation(
            "POST", "/v1/messages", INFERENCE, create, messages_api.ABOUT_CREATE, dialect=ANTHROPIC, is_counted=True
        ),
        Operation("POST", "/v1/messages/count_tokens", INFERENCE, count, messages_api.ABOUT_COUNT, dialect=ANTHROPIC),
        refused("POST", "/v1/messages/batches", ANTHROPIC, "send the requests of a batch one by one"),
        refused("GET", "/v1/messages/batches", ANTHROPIC, "send the requests of a batch one by one"),
    ]


def _ollama(models: Models, config: HttpConfig, preparation: Preparation, answering: Answering) -> list[Operation]:
    reads, ollama = OllamaModels(models, config, preparation), Ollama(models, config)
    chat = partial(ollama_answer, preparation, answering, ollama.chat)
    generates = partial(ollama_answer, preparation, answering, ollama.generate)
    done: list[tuple[str, str, Run, About]] = [
        ("POST", "/api/chat", chat, ollama_api.ABOUT_CHAT),
        ("POST", "/api/generate", generates, ollama_api.ABOUT_GENERATE),
        ("POST", "/api/show", reads.show, ollama_models.ABOUT_SHOW),
        ("GET", "/api/tags", reads.tags, ollama_models.ABOUT_TAGS),
        ("GET", "/api/ps", reads.processes, ollama_models.ABOUT_PROCESSES),
        ("GET", "/api/version", reads.version, ollama_models.ABOUT_VERSION),
    ]
    models_said = "its configuration says which models it has"
    not_done = {"/api/pull": "POST", "/api/push": "POST", "/api/create": "POST", "/api/copy": "POST"}
    not_done |= {"/api/delete": "DELETE", "/api/blobs/{digest}": "POST"}
    return [
        *(
            Operation(method, path, INFERENCE, run, about, dialect=OLLAMA, is_counted=run in (chat, generates))
            for method, path, run, about in done
        ),
        *(refused(method, path, OLLAMA, models_said) for path, method in not_done.items()),
        *(refused("POST", path, OLLAMA, "it has no models that embed") for path in ("/api/embed", "/api/embeddings")),
    ]


def refused(method: str, path: str, dialect: Dialect, reason: str) -> Operation:
    """An operation that clients know and this server does not do."""

    async def run(call: Call) -> bytes:
        message = f"{method} {path} is not supported by this server: {reason}"
        raise HttpError(404, message, code="not_supported")

    return Operation(method, path, INFERENCE, run, dialect=dialect, is_refused=True)


def _responses(responses: Responses) -> list[Operation]:
    one = "/v1/responses/{response}"
    return [
        Operation("POST", "/v1/responses", INFERENCE, responses.create, responses_about.CREATE, True, is_counted=True),
        Operation("GET", one, INFERENCE, responses.retrieve, responses_about.RETRIEVE),
        Operation("DELETE", one, INFERENCE, responses.delete, responses_about.DELETE),
        Operation("POST", f"{one}/cancel", INFERENCE, responses.cancel, responses_about.CANCEL),
        Operation("GET", f"{one}/input_items", INFERENCE, responses.input_items, responses_about.INPUT_ITEMS),
    ]


def _tokenising(tokenising: Tokenising) -> list[Operation]:
    # /tokenizer_info shows the chat template, which is the operator's.
    return [
        Operation("POST", "/v1/tokenize", INFERENCE, tokenising.tokenize, tokenise.ABOUT_TOKENIZE),
        Operation("POST", "/tokenize", INFERENCE, tokenising.tokenize, tokenise.ABOUT_TOKENIZE),
        Operation("POST", "/v1/detokenize", INFERENCE, tokenising.detokenize, tokenise.ABOUT_DETOKENIZE),
        Operation("POST", "/detokenize", INFERENCE, tokenising.detokenize, tokenise.ABOUT_DETOKENIZE),
        Operation("GET", "/tokenizer_info", ADMIN, tokenising.info, tokenise.ABOUT_INFO),
    ]


def _rendering(rendering: Rendering) -> list[Operation]:
    return [
        Operation("POST", "/v1/chat/completions/render", INFERENCE, rendering.chat, render.ABOUT_CHAT),
        Operation("POST", "/v1/completions/render", INFERENCE, rendering.completions, render.ABOUT_COMPLETIONS),
    ]


def _aborting(aborting: Aborting) -> list[Operation]:
    return [
        Operation("POST", "/v1/abort", INFERENCE, aborting.abort, running_requests.ABOUT),
        Operation("POST", "/abort_requests", INFERENCE, aborting.abort, running_requests.ABOUT),
        Operation("POST", "/abort_request", INFERENCE, aborting.abort, running_requests.ABOUT),
    ]


def _looking_after(administration: Administration) -> list[Operation]:
    return [
        Operation("POST", "/reset_prefix_cache", ADMIN, administration.reset_prefix_cache, admin.ABOUT_RESET),
        Operation("POST", "/start_profile", ADMIN, administration.start_profile, admin.ABOUT_START),
        Operation("POST", "/stop_profile", ADMIN, administration.stop_profile, admin.ABOUT_STOP),
        Operation("POST", "/v1/admin/stacks", ADMIN, administration.stacks, admin.ABOUT_STACKS),
    ]


async def generate(preparation: Preparation, answering: Answering, parse: Parse, call: Call) -> bytes | Events:
    """What `parse` reads from the call, generated and answered."""
    draft = await preparation.read(call, parse)
    draft, job = await preparation.job(draft)
    return await answering.answer(draft, job, call)
