"""POST /v1/chat/completions."""

from __future__ import annotations

from raylm.api.answering import Draft
from raylm.api.call import Call
from raylm.api.chat_encoder import ChatEncoder
from raylm.api.params import asking, check_num_sequences
from raylm.api.parser import parse
from raylm.api.preparation import Models
from raylm.api.protocol import ChatRequest
from raylm.api.wire import Reply
from raylm.config.serving import HttpConfig
from raylm.generation.job import Job
from raylm.text.chat_options import ChatOptions


class OpenAIChat:
    """Reads the bodies of this operation."""

    def __init__(self, models: Models, config: HttpConfig) -> None:
        self._models = models
        self._config = config

    def parse(self, call: Call) -> Draft:
        """What the call asks for. Raises whatever is wrong with it."""
        request = parse(ChatRequest, call.body, self._config)
        model = self._models.get(request.model)
        asked = asking(request, model.sampling, default_max_tokens=None)
        check_num_sequences(1, asked.wanted, self._config.max_choices)
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        text = model.text.render(messages, ChatOptions(add_generation_prompt=request.add_generation_prompt))

        def encoder(reply: Reply, job: Job) -> ChatEncoder:
            return ChatEncoder(reply, job, asked.answer)

        return Draft(model, asked, [text], "messages", encoder, id_prefix="chatcmpl-")
