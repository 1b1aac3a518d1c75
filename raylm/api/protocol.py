"""OpenAI's wire format: request bodies (pydantic: checked, strict types) and answers (msgspec: fast to encode)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast

from raylm.core.options import MAX_NAME_CHARS


def _listed(value: object) -> object:
    """`stop` may be one string; null is none."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _unless_off(value: object) -> object:
    """A number that may be switched off by false, as in a chat."""
    return None if value is False else value


def _not_empty(value: list[object]) -> list[object]:
    if not value:
        raise ValueError("must not be empty")
    return value


def _given(value: str) -> str:
    if not value:
        raise ValueError("must not be empty")
    return value


def _short(value: str) -> str:
    if len(value) > MAX_NAME_CHARS:
        raise ValueError(f"must have at most {MAX_NAME_CHARS} characters")
    return value


_Name = Annotated[str, AfterValidator(_short)]
# A body holds millions of elements at most, and each error costs memory: the first one is enough.
_Strings = Annotated[list[str], FailFast(), BeforeValidator(_listed)]
_Integers = Annotated[list[int], FailFast(), BeforeValidator(_listed)]


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _effort(value: str) -> str:
    if value not in EFFORTS:
        raise ValueError(f"must be one of {', '.join(EFFORTS)}")
    return value


class Body(BaseModel):
    """What the body of a request is made of: no value is converted to another type."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatMessage(Body):
    """One message of a chat; `content` is a string or a list of text parts, and TextProcessor.chat checks it.

    Every role goes to the model's chat template, which knows which there are; so do the other fields.
    """

    role: Annotated[str, AfterValidator(_given), AfterValidator(_short)]
    content: object = None
    name: str | None = None
    refusal: str | None = None
    """What an assistant said instead of a content, in a history of OpenAI's models."""
    tool_calls: object = None
    function_call: object = None
    """The older form of tool_calls."""
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class GenerationRequest(Body):
    """What both ways of asking share. null means the default everywhere."""

    model: str | None = None
    """Where it is left out, the one model that there is."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: object = None
    """An object from token ids, which JSON writes as strings, to numbers. params.py reads it: an error costs no memory
    for each entry there."""
    allowed_token_ids: _Integers = []
    bad_words: _Strings = []
    min_tokens: int | None = None
    logits_processors: _Strings = []
    stop: _Strings = []
    stop_token_ids: _Integers = []
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    """By default off in a chat, whose template writes them, and on elsewhere."""
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    request_id: _Name | None = None
    """vLLM's name of a request, by which it can be aborted; the answer's id ends with it."""
    rid: _Name | None = None
    """The same of SGLang; it is the answer's id."""
    timings: bool | None = None
    """The answer says how long it took."""
    prompt_logprobs: int | None = None
    logprob_token_ids: _Integers = []
    return_tokens_as_token_ids: bool | None = None
    response_format: object = None
    structured_outputs: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_choice: object = None
    guided_grammar: object = None
    json_schema: object = None
    regex: object = None
    ebnf: object = None
    structural_tag: object = None
    """All of these ask for structured output; raylm.api.structure reads them."""
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    user: _Name | None = None
    """The tenant, where the scheduler's policy is fair."""
    priority: int | None = None
    deadline_s: float | None = None
    queue_timeout_s: float | None = None
    cache_salt: _Name | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast(), AfterValidator(_not_empty)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: object = None
    functions: object = None
    function_call: object = None
    """The older forms of tools and tool_choice. generation/tool_reading.py reads all five."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, object]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: Annotated[str | None, AfterValidator(_effort)] = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None
    """vLLM's name; without it an answer leaves out what the model thought."""
    separate_reasoning: bool | None = None
    """SGLang's name; off, what the model thinks is part of the content."""


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt` has four forms; parser.prompts_of sorts them out."""

    prompt: object
    echo: bool | None = None
    logprobs: Annotated[int | None, BeforeValidator(_unless_off)] = None


FinishReason = str | None


class PromptDetails(msgspec.Struct):
    """Tokens of the prompts that the engine had in its prefix cache."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Tokens of the completions that are reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one HTTP request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class CalledFunction(msgspec.Struct):
    """`arguments` is JSON."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class ChatAnswer(msgspec.Struct):
    """`content` is None where the model called tools and said nothing. Where it has reasoned, that stands under the
    names of vLLM, old and new."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CalledTool] | msgspec.UnsetType = msgspec.UNSET
    function_call: CalledFunction | msgspec.UnsetType = msgspec.UNSET
    """Instead of tool_calls, where the request has the older `functions`."""


StopReason = str | int | None
"""The stop string, or the one of stop_token_ids, that ended a choice."""
TokenIds = list[int] | msgspec.UnsetType
"""Left out unless return_token_ids is on."""
PromptList = msgspec.Raw | msgspec.UnsetType
"""Left out unless prompt_logprobs were asked for."""


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatAnswer
    finish_reason: FinishReason
    logprobs: msgspec.Raw | None = None
    stop_reason: StopReason = None
    token_ids: TokenIds = msgspec.UNSET


class TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: FinishReason
    logprobs: msgspec.Raw | None = None
    stop_reason: StopReason = None
    token_ids: TokenIds = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET
    prompt_logprobs: PromptList = msgspec.UNSET


class Timings(msgspec.Struct):
    """How long a request took, in seconds from its arrival at this server, and its tokens a second after the first
    ones; null where it has too few. The time in the queue is part of that to the first token."""

    first_token_s: float | None
    total_s: float
    tokens_per_s: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Completion(msgspec.Struct):
    """The answer to both ways of asking; with no choices it is a stream's last chunk, which carries the usage."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[TextChoice]
    usage: Usage
    system_fingerprint: str
    prompt_token_ids: TokenIds = msgspec.UNSET
    """Of a chat; of other completions each choice has them, since their prompts differ."""
    prompt_logprobs: PromptList = msgspec.UNSET
    """The same."""
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    """Left out unless `timings` asks for them."""


class ModelPermission(msgspec.Struct):
    """What OpenAI once said of who may do what with a model; clients of that time read it."""

    id: str
    created: int
    object: str = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = False
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct):
    """A model. `root` and `parent` are of fine-tuned models: what they were made from."""

    id: str
    created: int
    max_model_len: int
    root: str
    permission: list[ModelPermission]
    parent: str | None = None
    object: str = "model"
    owned_by: str = "raylm"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"
