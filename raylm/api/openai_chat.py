"""POST /v1/chat/completions."""

from __future__ import annotations

from raylm.api.about import GENERATING, About
from raylm.api.answering import Draft
from raylm.api.call import Call
from raylm.api.chat_encoder import ChatEncoder
from raylm.api.chats import opened_chat
from raylm.api.chunks import ChatChunk
from raylm.api.params import asking, check_num_sequences
from raylm.api.parser import parse
from raylm.api.preparation import Models
from raylm.api.protocol import ChatChoice, ChatRequest, Completion
from raylm.api.unsupported import CHAT_ONLY, HARMLESS, UNSUPPORTED
from raylm.api.wire import Reply
from raylm.config.serving import HttpConfig
from raylm.generation.chat import Chat
from raylm.generation.job import Job
from raylm.generation.tool_reading import read_tool_use
from raylm.text.chat_options import ChatOptions

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")

ABOUT = About(
    "The answer to a chat.",
    "Chats and completions",
    (ChatRequest,),
    Completion[ChatChoice],
    ChatChunk,
    GENERATING,
    refused={**UNSUPPORTED, **CHAT_ONLY},
    ignored=HARMLESS,
)


class OpenAIChat:
    """Reads the bodies of this operation."""

    def __init__(self, models: Models, config: HttpConfig, request: type[ChatRequest] = ChatRequest) -> None:
        """`request`: what the bodies hold."""
        self._models = models
        self._config = config
        self._request = request

    def parse(self, call: Call) -> Draft:
        """What the call asks for. Raises whatever is wrong with it."""
        request = parse(self._request, call.body, self._config)
        model = self._models.get(request.model)
        tools = read_tool_use({name: getattr(request, name) for name in TOOL_FIELDS})
        asked = asking(request, model.sampling, call.identity, default_max_tokens=None)
        check_num_sequences(1, asked.wanted, self._config.max_choices)
        chat = Chat(
            [message.model_dump(exclude_none=True) for message in request.messages],
            _options(request),
            tools,
            reads_reasoning=request.separate_reasoning is not False,
        )
        opened, asked = opened_chat(model, chat, asked)
        shows_reasoning = request.include_reasoning is not False

        def encoder(reply: Reply, job: Job) -> ChatEncoder:
            return ChatEncoder(reply, job, asked.answer, is_legacy=tools.legacy, shows_reasoning=shows_reasoning)

        return Draft(model, asked, [opened.text], "messages", encoder, "chatcmpl-", reading=opened.reading)


def _options(request: ChatRequest) -> ChatOptions:
    return ChatOptions(
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        reasoning_effort=request.reasoning_effort,
        kwargs=request.chat_template_kwargs or {},
        template=request.chat_template,
    )
