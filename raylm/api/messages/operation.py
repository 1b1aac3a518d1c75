"""Anthropic's POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from raylm.api.about import GENERATING, ON_MODEL, About
from raylm.api.answering import Draft
from raylm.api.call import Call
from raylm.api.chats import opened_chat
from raylm.api.identity import Identity
from raylm.api.messages.conversation import read_conversation
from raylm.api.messages.encoder import Message, MessageEncoder, MessageForm
from raylm.api.messages.reading import OutputConfig, Thinking, read_output_config, read_thinking
from raylm.api.messages.request import (
    HARMLESS,
    KNOWN,
    UNSUPPORTED,
    ConversationRequest,
    MessagesRequest,
    refuse_unsupported,
)
from raylm.api.messages.tools import read_tools
from raylm.api.params import AnswerForm, Asking, PromptForm, check_num_sequences
from raylm.api.parser import read_fields, validated
from raylm.api.preparation import Models, Preparation
from raylm.api.scheduling import request_options
from raylm.api.structure import Asked
from raylm.api.wire import Reply
from raylm.config.serving import HttpConfig
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.errors import RequestRejected
from raylm.generation.chat import Chat
from raylm.generation.job import Job, TokenLimit, Wanted
from raylm.generation.served_model import ServedModel
from raylm.text.chat_options import ChatOptions

_Request = TypeVar("_Request", bound=ConversationRequest)


class Messages:
    """Reads the bodies of both operations."""

    def __init__(self, models: Models, config: HttpConfig) -> None:
        self._models = models
        self._config = config

    def parse(self, call: Call) -> Draft:
        """What a call of /v1/messages asks for. Raises whatever is wrong with it."""
        request = self._validated(MessagesRequest, call)
        model = self._models.get(request.model)
        thinking = read_thinking(request.thinking, request.max_tokens)
        output = read_output_config(request.output_config, request.output_format)
        asked = _asked(request, model, thinking, call.identity)
        if output.structure is not None:
            asked = asked._replace(structure=Asked(output.structure, output.field))
        check_num_sequences(1, asked.wanted, self._config.max_choices)
        opened, asked = opened_chat(model, _chat(request, thinking, output), asked)
        form = MessageForm(request.max_tokens, thinking.is_on, thinking.is_shown)

        def encoder(reply: Reply, job: Job) -> MessageEncoder:
            return MessageEncoder(reply, job, form)

        return Draft(model, asked, [opened.text], "messages", encoder, id_prefix="msg_", reading=opened.reading)

    def counted(self, call: Call) -> Counted:
        """What a call of /v1/messages/count_tokens asks for. Raises whatever is wrong with it."""
        request = self._validated(ConversationRequest, call)
        model = self._models.get(request.model)
        thinking = read_thinking(request.thinking, None)
        output = read_output_config(request.output_config, request.output_format)
        asked = _asking(SamplingParams(), RequestOptions(), TokenLimit("max_tokens", None, None), stream=False)
        opened, _ = opened_chat(model, _chat(request, thinking, output), asked)
        return Counted(model, opened.text)

    def _validated(self, cls: type[_Request], call: Call) -> _Request:
        data = read_fields(call.body, self._config, KNOWN)
        refuse_unsupported(data)
        return validated(cls, data)


class Counted(NamedTuple):
    """A prompt whose tokens are to be counted."""

    model: ServedModel
    text: str


class InputTokens(msgspec.Struct):
    input_tokens: int


ABOUT_CREATE = About(
    "Anthropic's way of chatting.",
    "Anthropic",
    (MessagesRequest,),
    Message,
    msgspec.Raw,
    GENERATING,
    refused=UNSUPPORTED,
    ignored=HARMLESS,
)
ABOUT_COUNT = About(
    "The number of tokens of a conversation.", "Anthropic", (ConversationRequest,), InputTokens, errors=ON_MODEL
)


async def count_tokens(preparation: Preparation, messages: Messages, call: Call) -> bytes:
    """{"input_tokens": ...} of the conversation in a call, however long that is."""
    counted = await preparation.read(call, messages.counted)
    encode = partial(counted.model.text.encode, counted.text, add_special_tokens=False)
    return msgspec.json.encode(InputTokens(len(await preparation.tokenise(len(counted.text), encode))))


def _chat(request: ConversationRequest, thinking: Thinking, output: OutputConfig) -> Chat:
    conversation = read_conversation(request.system, request.messages)
    options = ChatOptions(
        continue_final_message=conversation.is_open, reasoning_effort=output.effort, kwargs=thinking.variables()
    )
    return Chat(conversation.messages, options, read_tools(request.tools, request.tool_choice))


def _asked(request: MessagesRequest, model: ServedModel, thinking: Thinking, identity: Identity) -> Asking:
    given = request.model_dump(include={"temperature", "top_p", "top_k", "max_tokens"}, exclude_none=True)
    if thinking.budget is not None and model.ability.bounds_thinking:
        given["thinking_token_budget"] = thinking.budget
    stop = tuple(request.stop_sequences)
    try:
        params = SamplingParams(**{**model.sampling.fields(), **given, "stop": stop})
    except RequestRejected as error:
        raise _in_anthropics_words(error) from None
    user = None if request.metadata is None else request.metadata.user_id
    # The answer ends where the model is full, as with Anthropic's models; its stop_reason says so.
    limit = TokenLimit("max_tokens", None, request.max_tokens)
    return _asking(params, request_options(identity, user=user), limit, stream=bool(request.stream))


def _asking(params: SamplingParams, options: RequestOptions, limit: TokenLimit, *, stream: bool) -> Asking:
    prompt = PromptForm(add_special_tokens=False, truncation=None, echo=False)
    answer = AnswerForm(stream, include_usage=False, continuous_usage=False, interval=1, token_ids=False)
    return Asking(Wanted(params, options, limit, 1), prompt, answer, None)


def _in_anthropics_words(error: RequestRejected) -> RequestRejected:
    if error.param != "stop":
        return error
    return RequestRejected(str(error).replace("stop", "stop_sequences", 1), param="stop_sequences", code=error.code)
