"""From the draft of a request to a job for a model. What is large is done in threads: the event loop goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from raylm.api.call import Call
from raylm.api.errors import HttpError
from raylm.api.params import Asking, PromptForm
from raylm.api.threads import SMALL_BODY_BYTES, WorkThreads
from raylm.config.serving import HttpConfig
from raylm.errors import Overloaded, RequestRejected
from raylm.generation.job import EncodedPrompt, Job, check_prompt, plan, too_long
from raylm.generation.quote import MAX_VALUE_CHARS
from raylm.generation.served_model import ModelCatalog, ServedModel
from raylm.text.tokenizer import TooManyTokens
from raylm.text.truncation import MAX_TOKENS as MAX_TRUNCATED

if TYPE_CHECKING:
    from raylm.api.answering import Draft

Result = TypeVar("Result")
START_RETRY_S = 5.0
_TEMPLATE_SIGNS = (b'"chat_template"', b"\\u005", b"\\u006", b"\\u007")
_CALL_CHARS = 256
"""What one more prompt costs, in characters of text to tokenise."""
_LOGPROB_CHARS = 64
"""What a token takes in an answer's log probabilities, about."""
_LISTED_BODIES = 4
"""Log probabilities of prompts may take as much of an answer as so many of the largest bodies."""
_TOKEN_CHARS = 8
"""What a token's id takes in JSON, at most where vocabularies have less than ten million tokens."""


class Models:
    """The models that requests may ask, found by their names."""

    def __init__(self, catalog: ModelCatalog) -> None:
        self._catalog = catalog

    def all(self) -> list[ServedModel]:
        """Those that are up."""
        found = [self._catalog.get(name) for name in self._catalog.names()]
        return [model for model in found if model is not None]

    def names(self) -> list[str]:
        """Every model that was asked for, whether it is up or not; aliases too."""
        return [*self._catalog.names(), *self._catalog.aliases()]

    def get(self, name: str | None) -> ServedModel:
        """The model of this name or alias; without one, the only model that there is. Raises what its absence means."""
        names = self._catalog.names()
        if name is None:
            if len(names) != 1:
                raise RequestRejected(
                    f"model is required: one of {_listed(names)}", param="model", code="missing_field"
                )
            name = names[0]
        aliases = self._catalog.aliases()
        own = aliases.get(name, name)
        model = self._catalog.get(own)
        if model is not None:
            return model
        if own in names:
            why = self._catalog.unready().get(own, "its tokenizer is not loaded")
            raise Overloaded(f"The model {name!r} cannot be asked yet: {why}", retry_after=START_RETRY_S)
        message = f"The model {name[:MAX_VALUE_CHARS]!r} does not exist; this server has {_listed([*names, *aliases])}"
        raise HttpError(404, message, param="model", code="model_not_found")


class Preparation:
    """Makes jobs of requests."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._threads = WorkThreads()

    async def read(self, call: Call, parse: Callable[[Call], Result]) -> Result:
        """Run what reads the call's body. Raises whatever is wrong with it."""
        work = partial(parse, call)
        if _brings_template(call.body):
            return await self._threads.aside(len(call.body), work)
        return await self._threads.read(len(call.body), work)

    async def tokenise(self, size: int, work: Callable[[], Result]) -> Result:
        """Run what turns so many characters into tokens, or tokens into text."""
        return await self._threads.tokenise(size, work)

    async def work(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        """Run what goes through so many bytes of JSON."""
        return await self._threads.read(num_bytes, work)

    async def job(self, draft: Draft) -> tuple[Draft, Job]:
        """The draft with its grammar compiled, and what it asks of the engine, ready to run."""
        asked, job = await self.job_of(draft.model, draft.asked, draft.prompts, draft.field)
        return draft._replace(asked=asked), job

    async def job_of(
        self, model: ServedModel, asked: Asking, prompts: list[str | list[int]], field: str
    ) -> tuple[Asking, Job]:
        """The same for prompts of the body's `field`."""
        asked = await _with_grammar(model, asked)
        words = asked.wanted.params.bad_words
        # Each word is tokenised twice: with and without a space before it.
        size = sum(map(len, prompts)) + 2 * sum(map(len, words))
        size += _CALL_CHARS * (len(prompts) - 1 + 2 * len(words))
        make = partial(_job, _Prompts(model, asked, prompts, field), self._config.max_body_bytes)
        return asked, await self._threads.tokenise(size, make)


def _brings_template(body: bytes | bytearray) -> bool:
    """Whether a small body may hold a chat template, a program that may run for a second: its field's name, or letters
    in an escape, in which nobody writes them who hides nothing."""
    # Larger ones are read in a thread whatever they hold.
    return len(body) <= SMALL_BODY_BYTES and any(sign in body for sign in _TEMPLATE_SIGNS)


class _Prompts(NamedTuple):
    model: ServedModel
    asked: Asking
    prompts: list[str | list[int]]
    field: str


async def _with_grammar(model: ServedModel, asked: Asking) -> Asking:
    """With the structure that the request asks for as a grammar."""
    if asked.structure is None:
        return asked
    structure, param = asked.structure.structure, asked.structure.param
    if model.grammars is None:
        raise RequestRejected(
            f"{param}: {model.name} has no structured output", param=param, code="unsupported_parameter"
        )
    ready = await model.grammars.compile_async(structure, param=param)
    wanted = asked.wanted._replace(params=replace(asked.wanted.params, structure=ready))
    return asked._replace(wanted=wanted)


def _job(draft: _Prompts, max_returned_bytes: int) -> Job:
    prompts = [_encoded(draft, prompt) for prompt in draft.prompts]
    _check_returned(draft.asked, prompts, max_returned_bytes)
    return plan(draft.model, prompts, draft.asked.wanted)


def _check_returned(asked: Asking, prompts: list[EncodedPrompt], limit: int) -> None:
    """Refuse what would make a small request's answer endless: prompts that come back with each completion."""
    num_echoed = sum(len(prompt.echo) for prompt in prompts) * asked.wanted.params.n
    if num_echoed > limit:
        message = f"echo makes {num_echoed} characters of the prompts and their completions, at most {limit}"
        raise RequestRejected(f"{message} are allowed", param="echo")
    num_tokens = (
        sum(len(prompt.token_ids) for prompt in prompts) * asked.wanted.params.n if asked.answer.token_ids else 0
    )
    if num_tokens * _TOKEN_CHARS > limit:
        message = f"return_token_ids returns {num_tokens} tokens of prompts, at most {limit // _TOKEN_CHARS}"
        raise RequestRejected(f"{message} are allowed", param="return_token_ids")
    _check_listed(asked, prompts, limit)


def _check_listed(asked: Asking, prompts: list[EncodedPrompt], limit: int) -> None:
    """The same for the log probabilities of prompts."""
    form = asked.answer.logprobs
    most = sum(len(prompt.token_ids) for prompt in prompts) * asked.wanted.params.n
    for field, top in (("prompt_logprobs", form.prompt), ("logprobs", form.top if form.of_echo else None)):
        if top is not None and most * (1 + max(top, 0)) * _LOGPROB_CHARS > limit * _LISTED_BODIES:
            raise RequestRejected(
                f"{field} makes {most * (1 + max(top, 0))} log probabilities of the prompts' tokens, at most "
                f"{limit * _LISTED_BODIES // _LOGPROB_CHARS} are allowed",
                param=field,
            )


def _encoded(draft: _Prompts, prompt: str | list[int]) -> EncodedPrompt:
    model, field = draft.model, draft.field
    form, limit = draft.asked.prompt, draft.asked.wanted.limit
    ids = prompt if isinstance(prompt, list) else _tokens(model, prompt, field, form)
    if form.truncation is not None:
        whole = ids
        output = limit.default if limit.value is None else limit.value
        ids = form.truncation.kept(whole, room=model.max_model_len - max(1, output or 1))
        # The text of what is left is not in the request.
        prompt = prompt if len(ids) == len(whole) else ids
    check_prompt(model, ids, field)
    if not form.echo:
        return EncodedPrompt(ids, field)
    return EncodedPrompt(ids, field, prompt if isinstance(prompt, str) else model.text.decode(ids))


def _tokens(model: ServedModel, text: str, field: str, form: PromptForm) -> list[int]:
    limit = model.max_model_len if form.truncation is None else max(model.max_model_len, MAX_TRUNCATED)
    try:
        return model.text.encode(text, add_special_tokens=form.add_special_tokens, max_tokens=limit)
    except TooManyTokens as error:
        size = f"{len(text)} characters, which are at least {error.least} tokens"
        if form.truncation is None:
            raise too_long(model, size, field) from None
        message = f"The prompt has {size}; at most {limit} can be truncated"
        raise RequestRejected(message, param=field, code="context_length_exceeded") from None


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
