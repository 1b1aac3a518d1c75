"""POST /v1/chat/completions/render and /v1/completions/render: what an engine would be asked, without asking it.

The answers are those of vLLM, with the prompts' texts.
"""

from __future__ import annotations

from uuid import uuid4

import msgspec

from raylm.api.about import ON_MODEL, About
from raylm.api.answering import Draft
from raylm.api.call import Call
from raylm.api.completions import Completions
from raylm.api.openai_chat import OpenAIChat
from raylm.api.preparation import Preparation
from raylm.api.protocol import ChatRequest, CompletionRequest
from raylm.core.sampling import SamplingParams
from raylm.generation.job import Job, PromptJob


class RenderedSampling(msgspec.Struct):
    """How each prompt would be sampled; the fields are those of the request, with the defaults of server and model."""

    n: int
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    include_stop_str_in_output: bool
    logprobs: int | None
    prompt_logprobs: int | None


class Rendered(msgspec.Struct):
    """One prompt. `text` is None where the prompt came as tokens."""

    request_id: str
    model: str
    token_ids: list[int]
    text: str | None
    sampling_params: RenderedSampling
    stream: bool
    priority: int
    cache_salt: str | None


ABOUT_CHAT = About("The prompt of a chat, without an answer.", "Tokens", (ChatRequest,), Rendered, errors=ON_MODEL)
ABOUT_COMPLETIONS = About(
    "The prompts of completions, without answers.", "Tokens", (CompletionRequest,), list[Rendered], errors=ON_MODEL
)


class Rendering:
    """Makes the prompts of chats and completions."""

    def __init__(self, chat: OpenAIChat, completions: Completions, preparation: Preparation) -> None:
        self._chat = chat
        self._completions = completions
        self._preparation = preparation

    async def chat(self, call: Call) -> bytes:
        draft = await self._preparation.read(call, self._chat.parse)
        return msgspec.json.encode(_rendered(*await self._preparation.job(draft))[0])

    async def completions(self, call: Call) -> bytes:
        draft = await self._preparation.read(call, self._completions.parse)
        return msgspec.json.encode(_rendered(*await self._preparation.job(draft)))


def _rendered(draft: Draft, job: Job) -> list[Rendered]:
    reply_id = draft.id_prefix + uuid4().hex
    return [
        _one(draft, prompt, reply_id if len(job.prompts) == 1 else f"{reply_id}-{number}", draft.prompts[number])
        for number, prompt in enumerate(job.prompts)
    ]


def _one(draft: Draft, prompt: PromptJob, request_id: str, given: str | list[int]) -> Rendered:
    return Rendered(
        request_id,
        draft.model.name,
        prompt.prompt_ids,
        given if isinstance(given, str) else None,
        _sampling(prompt.params),
        draft.asked.answer.stream,
        prompt.options.priority,
        prompt.options.cache_salt or None,
    )


def _sampling(params: SamplingParams) -> RenderedSampling:
    return RenderedSampling(**{name: getattr(params, name) for name in RenderedSampling.__struct_fields__})
