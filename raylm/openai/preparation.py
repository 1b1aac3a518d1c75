"""From the body of a request to a job for a model. What is large is done in threads, so that the event loop goes on."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from raylm.config.serving import HttpConfig
from raylm.errors import Overloaded, RequestRejected
from raylm.openai.adapter import EncodedPrompt, Job, check_prompt, plan, too_long
from raylm.openai.errors import HttpError
from raylm.openai.params import Wanted, check_num_sequences, wanted
from raylm.openai.parser import parse, prompts_of
from raylm.openai.protocol import ChatRequest, CompletionRequest
from raylm.openai.quote import MAX_VALUE_CHARS
from raylm.openai.served_model import ModelCatalog, ServedModel
from raylm.openai.threads import WorkThreads
from raylm.text.tokenizer import TooManyTokens

START_RETRY_S = 5.0
_CALL_CHARS = 256
"""What one more prompt costs, in characters of text to tokenise."""


class Prepared(NamedTuple):
    """A request that may run: of the body nothing else counts any more."""

    model: ServedModel
    job: Job
    chat: bool
    stream: bool
    include_usage: bool


class _Draft(NamedTuple):
    """A request whose prompts are no tokens yet. Their text has what goes around a prompt already if `is_framed`."""

    model: ServedModel
    asked: Wanted
    prompts: list[str | list[int]]
    field: str
    is_framed: bool
    echo: bool
    stream: bool
    include_usage: bool


class Preparation:
    """Reads bodies. Raises whatever is wrong with a request."""

    def __init__(self, models: ModelCatalog, config: HttpConfig) -> None:
        self._models = models
        self._config = config
        self._threads = WorkThreads()

    async def chat(self, body: bytes | bytearray) -> Prepared:
        return await self._finish(await self._threads.read(len(body), partial(self._draft_chat, body)), chat=True)

    async def completion(self, body: bytes | bytearray) -> Prepared:
        return await self._finish(await self._threads.read(len(body), partial(self._draft, body)), chat=False)

    def model(self, name: str | None) -> ServedModel:
        """The model of this name; without one, the only model that there is."""
        names = self._models.names()
        if name is None:
            if len(names) != 1:
                raise RequestRejected(
                    f"model is required: one of {_listed(names)}", param="model", code="missing_field"
                )
            name = names[0]
        model = self._models.get(name)
        if model is not None:
            return model
        if name in names:
            raise Overloaded(f"The model {name!r} is starting", retry_after=START_RETRY_S)
        message = f"The model {name[:MAX_VALUE_CHARS]!r} does not exist; this server has {_listed(names)}"
        raise HttpError(404, message, param="model", code="model_not_found")

    def _draft_chat(self, body: bytes | bytearray) -> _Draft:
        request = parse(ChatRequest, body, self._config)
        model = self.model(request.model)
        asked = wanted(request, model.sampling, default_max_tokens=None)
        check_num_sequences(1, asked, self._config.max_choices)
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        text = model.text.render(messages, add_generation_prompt=request.add_generation_prompt is not False)
        return _Draft(model, asked, [text], "messages", True, False, bool(request.stream), request.includes_usage)

    def _draft(self, body: bytes | bytearray) -> _Draft:
        request = parse(CompletionRequest, body, self._config)
        model = self.model(request.model)
        asked = wanted(request, model.sampling, default_max_tokens=self._config.default_max_tokens)
        prompts = prompts_of(request.prompt)
        check_num_sequences(len(prompts), asked, self._config.max_choices)
        echo, stream = bool(request.echo), bool(request.stream)
        return _Draft(model, asked, prompts, "prompt", False, echo, stream, request.includes_usage)

    async def _finish(self, draft: _Draft, *, chat: bool) -> Prepared:
        size = sum(map(len, draft.prompts)) + _CALL_CHARS * (len(draft.prompts) - 1)
        job = await self._threads.tokenise(size, partial(_job, draft, self._config.max_body_bytes))
        return Prepared(draft.model, job, chat, draft.stream, draft.include_usage)


def _job(draft: _Draft, max_echo_chars: int) -> Job:
    prompts = [_encoded(draft, prompt) for prompt in draft.prompts]
    num_echoed = sum(len(prompt.echo) for prompt in prompts) * draft.asked.params.n
    if num_echoed > max_echo_chars:
        message = f"echo makes {num_echoed} characters of the prompts and their completions, at most {max_echo_chars}"
        raise RequestRejected(f"{message} are allowed", param="echo")
    return plan(draft.model, prompts, draft.asked)


def _encoded(draft: _Draft, prompt: str | list[int]) -> EncodedPrompt:
    model, field = draft.model, draft.field
    if isinstance(prompt, list):
        check_prompt(model, prompt, field)
        return EncodedPrompt(prompt, field, model.text.decode(prompt) if draft.echo else "")
    try:
        ids = model.text.encode(prompt, add_special_tokens=not draft.is_framed, max_tokens=model.max_model_len)
    except TooManyTokens as error:
        raise too_long(model, f"{len(prompt)} characters, which are at least {error.least} tokens", field) from None
    check_prompt(model, ids, field)
    return EncodedPrompt(ids, field, prompt if draft.echo else "")


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
