"""POST /v1/tokenize, /v1/detokenize and GET /tokenizer_info, with vLLM's fields and answers."""

from __future__ import annotations

from functools import partial
from typing import Annotated, NamedTuple

import msgspec
from pydantic import FailFast, Field

from raylm.api.about import ON_MODEL, About
from raylm.api.answering import Draft
from raylm.api.call import Call
from raylm.api.openai_chat import OpenAIChat
from raylm.api.parser import parse_plain
from raylm.api.peek import peek
from raylm.api.preparation import Models, Preparation
from raylm.api.protocol import Body, ChatRequest
from raylm.config.serving import HttpConfig
from raylm.core.sampling_checks import MAX_TOKEN_ID
from raylm.errors import RequestRejected
from raylm.generation.job import check_token_ids
from raylm.generation.served_model import ServedModel
from raylm.text.tokenizer import TooManyTokens

MAX_TOKENS = 2**18
"""Tokens of one text, or the model's length where that is more."""


class TokenizeRequest(Body):
    """A text. A conversation has the fields of a chat instead (TokenizeChatRequest)."""

    model: str | None = None
    """Where it is left out, the one model that there is."""
    prompt: str
    """The text."""
    add_special_tokens: bool | None = None
    """Special tokens around the text, such as BOS; by default on."""
    return_token_strs: bool | None = None
    """The answer says what the vocabulary calls each token."""


class TokenizeChatRequest(ChatRequest):
    """A conversation as POST /v1/chat/completions takes it; of its fields those that make the prompt count."""

    return_token_strs: bool | None = None
    """The answer says what the vocabulary calls each token."""


_IDS = Field(json_schema_extra={"items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}})


class DetokenizeRequest(Body):
    """Tokens whose text is asked for."""

    model: str | None = None
    """Where it is left out, the one model that there is."""
    tokens: Annotated[list[int], FailFast(), _IDS]
    """Their ids."""


class Tokens(msgspec.Struct):
    """The tokens of a text. token_strs: what the vocabulary calls them, where that was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """Special tokens are part of the text."""

    prompt: str


class TokenizerInfoAnswer(msgspec.Struct):
    """tokenizer_class: the class of transformers that reads every tokenizer.json."""

    special_tokens: dict[str, str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    model_max_length: int
    vocab_size: int
    tokenizer_class: str = "PreTrainedTokenizerFast"


ABOUT_TOKENIZE = About(
    "The tokens of a text or a chat.", "Tokens", (TokenizeRequest, TokenizeChatRequest), Tokens, errors=ON_MODEL
)
ABOUT_DETOKENIZE = About("The text of tokens.", "Tokens", (DetokenizeRequest,), Detokenized, errors=ON_MODEL)
ABOUT_INFO = About(
    "What a model says of its tokenizer, its chat template too.",
    "Tokens",
    answer=TokenizerInfoAnswer,
    errors=frozenset({400, 404, 503}),
    query={"model": "Which one; it may be left out where the server has one."},
)


class _Asked(NamedTuple):
    model: ServedModel
    text: str
    field: str
    add_special_tokens: bool
    with_names: bool


class Tokenising:
    """Text to tokens and back."""

    def __init__(self, models: Models, config: HttpConfig, preparation: Preparation) -> None:
        self._models = models
        self._config = config
        self._preparation = preparation
        self._chat = OpenAIChat(models, config, TokenizeChatRequest)

    async def tokenize(self, call: Call) -> bytes:
        asked = await self._preparation.read(call, self._read)
        return await self._preparation.tokenise(len(asked.text), partial(_tokenized, asked))

    async def detokenize(self, call: Call) -> bytes:
        request = await self._preparation.read(call, self._read_tokens)
        model = self._models.get(request.model)
        check_token_ids(model, request.tokens, "tokens")
        limit = max(model.max_model_len, MAX_TOKENS)
        if len(request.tokens) > limit:
            message = f"tokens holds {len(request.tokens)} token ids, at most {limit} are allowed"
            raise RequestRejected(message, param="tokens")
        return await self._preparation.tokenise(len(request.tokens), partial(_detokenized, model, request.tokens))

    async def info(self, call: Call) -> bytes:
        """Of the model that the query names; of the only one without."""
        model = self._models.get(call.query.get("model"))
        found = model.text.tokenizer_info
        return msgspec.json.encode(
            TokenizerInfoAnswer(
                found.special_tokens,
                found.bos_token_id,
                found.eos_token_ids,
                found.chat_template,
                model.max_model_len,
                model.vocab_size,
            )
        )

    def _read(self, call: Call) -> _Asked:
        given = peek(call.body)
        if not given.has_messages:
            request = parse_plain(TokenizeRequest, call.body, self._config)
            special = request.add_special_tokens is not False
            model = self._models.get(request.model)
            return _Asked(model, request.prompt, "prompt", special, bool(request.return_token_strs))
        if given.has_prompt:
            raise RequestRejected("prompt is not allowed together with messages", param="prompt")
        return _of_chat(self._chat.parse(call), with_names=given.wants_token_strs)

    def _read_tokens(self, call: Call) -> DetokenizeRequest:
        return parse_plain(DetokenizeRequest, call.body, self._config, ids_field="tokens")


def _of_chat(draft: Draft, *, with_names: bool) -> _Asked:
    text = draft.prompts[0]
    assert isinstance(text, str), "a chat's template writes text"
    return _Asked(draft.model, text, draft.field, draft.asked.prompt.add_special_tokens, with_names)


def _tokenized(asked: _Asked) -> bytes:
    model = asked.model
    limit = max(model.max_model_len, MAX_TOKENS)
    try:
        ids = model.text.encode(asked.text, add_special_tokens=asked.add_special_tokens, max_tokens=limit)
    except TooManyTokens as error:
        raise RequestRejected(
            f"{asked.field} has {len(asked.text)} characters, which are at least {error.least} tokens; at most {limit} "
            "are allowed",
            param=asked.field,
        ) from None
    names = model.text.token_names(ids) if asked.with_names else None
    return msgspec.json.encode(Tokens(len(ids), model.max_model_len, ids, names))


def _detokenized(model: ServedModel, token_ids: list[int]) -> bytes:
    return msgspec.json.encode(Detokenized(model.text.decode(token_ids, skip_special_tokens=False)))
