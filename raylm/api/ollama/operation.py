"""Ollama's POST /api/chat and POST /api/generate."""

from __future__ import annotations

from collections.abc import Callable

from raylm.api.about import GENERATING, About
from raylm.api.answering import Answering, Draft
from raylm.api.call import Call, Events
from raylm.api.chats import opened_chat
from raylm.api.ollama.encoder import Line, OllamaEncoder, OllamaForm, loaded
from raylm.api.ollama.models import named
from raylm.api.ollama.reading import Thinking, num_predict, read_format, read_messages, read_options, read_think
from raylm.api.ollama.request import (
    CHAT_KNOWN,
    GENERATE_KNOWN,
    GENERATE_UNSUPPORTED,
    HARMLESS,
    OPTIONS_KNOWN,
    UNSUPPORTED,
    ChatRequest,
    GenerateRequest,
    OllamaRequest,
    Options,
    refuse_unsupported,
)
from raylm.api.params import AnswerForm, Asking, PromptForm
from raylm.api.parser import check_names, read_fields, validated
from raylm.api.preparation import Models, Preparation
from raylm.api.scheduling import request_options
from raylm.api.wire import Reply
from raylm.config.serving import HttpConfig
from raylm.errors import RequestRejected
from raylm.generation.chat import Chat
from raylm.generation.job import Job, TokenLimit, Wanted
from raylm.generation.served_model import ServedModel
from raylm.generation.tool_reading import read_tools
from raylm.text.chat import Message

Parse = Callable[[Call], Draft | bytes]
ABOUT_CHAT = About(
    "Ollama's way of chatting.", "Ollama", (ChatRequest,), Line, Line, GENERATING, refused=UNSUPPORTED, ignored=HARMLESS
)
ABOUT_GENERATE = About(
    "Ollama's way of going on from a prompt.",
    "Ollama",
    (GenerateRequest,),
    Line,
    Line,
    GENERATING,
    refused={**UNSUPPORTED, **GENERATE_UNSUPPORTED},
    ignored=HARMLESS,
)


class Ollama:
    """Reads the bodies of both operations."""

    def __init__(self, models: Models, config: HttpConfig) -> None:
        self._models = models
        self._config = config

    def chat(self, call: Call) -> Draft | bytes:
        """What a call of /api/chat asks for, or the answer where it has no messages. Raises whatever is wrong."""
        data = read_fields(call.body, self._config, CHAT_KNOWN)
        refuse_unsupported(data, chat=True)
        self._check_options(data)
        request = validated(ChatRequest, data)
        model = named(self._models, request.model)
        if not request.messages:
            return loaded(model.name, is_chat=True, unloads=_unloads(request))
        thinking = _thinking(request, model)
        tools = read_tools(request.tools, None, None)
        chat = Chat(read_messages(request.messages), thinking.options, tools)
        form = OllamaForm(True, thinking.is_shown)
        return _draft(model, chat, _asked(request, model, call), form, "messages")

    def generate(self, call: Call) -> Draft | bytes:
        """What a call of /api/generate asks for, or the answer where it has no prompt. Raises whatever is wrong."""
        data = read_fields(call.body, self._config, GENERATE_KNOWN)
        refuse_unsupported(data, chat=False)
        self._check_options(data)
        request = validated(GenerateRequest, data)
        model = named(self._models, request.model)
        if not request.prompt:
            return loaded(model.name, is_chat=False, unloads=_unloads(request))
        thinking = _thinking(request, model)
        form = OllamaForm(False, thinking.is_shown)
        asked = _asked(request, model, call)
        if request.raw:
            return _raw_draft(model, request.prompt, asked, form)
        system: list[Message] = [{"role": "system", "content": request.system}] if request.system else []
        messages: list[Message] = [*system, {"role": "user", "content": request.prompt}]
        return _draft(model, Chat(messages, thinking.options), asked, form, "prompt")

    def _check_options(self, data: dict[str, object]) -> None:
        options = data.get("options")
        if self._config.strict and isinstance(options, dict):
            check_names(options, OPTIONS_KNOWN, "options.")


async def answer(preparation: Preparation, answering: Answering, parse: Parse, call: Call) -> bytes | Events:
    """What `parse` reads from the call, generated and answered."""
    draft = await preparation.read(call, parse)
    if isinstance(draft, bytes):
        return draft
    draft, job = await preparation.job(draft)
    return await answering.answer(draft, job, call)


def _thinking(request: OllamaRequest, model: ServedModel) -> Thinking:
    thinking = read_think(request.think)
    if request.think and not model.ability.reasons:
        raise RequestRejected(f"{model.name} does not support thinking: think must be false", param="think")
    return thinking


def _unloads(request: OllamaRequest) -> bool:
    """Ollama unloads a model at once with keep_alive 0; here it stays."""
    return request.keep_alive in (0, "0", "0s")


def _asked(request: OllamaRequest, model: ServedModel, call: Call) -> Asking:
    options = request.options or Options()
    params = read_options(options, model.sampling)
    limit = TokenLimit("options.num_predict", None, num_predict(options))
    wanted = Wanted(params, request_options(call.identity), limit, 1)
    raw = isinstance(request, GenerateRequest) and bool(request.raw)
    stream = request.stream is not False
    answer = AnswerForm(stream, include_usage=False, continuous_usage=False, interval=1, token_ids=False)
    prompt = PromptForm(add_special_tokens=raw, truncation=None, echo=False)
    return Asking(wanted, prompt, answer, read_format(request.format))


def _draft(model: ServedModel, chat: Chat, asked: Asking, form: OllamaForm, field: str) -> Draft:
    opened, asked = opened_chat(model, chat, asked)
    return Draft(model, asked, [opened.text], field, _encoder(form), id_prefix="ollama-", reading=opened.reading)


def _raw_draft(model: ServedModel, prompt: str, asked: Asking, form: OllamaForm) -> Draft:
    return Draft(model, asked, [prompt], "prompt", _encoder(form), id_prefix="ollama-", continues_prompt=True)


def _encoder(form: OllamaForm) -> Callable[[Reply, Job], OllamaEncoder]:
    return lambda reply, job: OllamaEncoder(reply, job, form)
