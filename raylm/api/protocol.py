"""OpenAI's wire format: request bodies (pydantic: checked, strict types) and answers (msgspec: fast to encode)."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, WithJsonSchema

from raylm.core.options import MAX_NAME_CHARS
from raylm.core.sampling_checks import MAX_TOKEN_ID


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


_SHORT = Field(json_schema_extra={"minLength": 1, "maxLength": MAX_NAME_CHARS})
_Name = Annotated[str, AfterValidator(_short), WithJsonSchema({"type": "string", "maxLength": MAX_NAME_CHARS})]
# A body holds millions of elements at most, and each error costs memory: the first one is enough.
_Filled = Annotated[str, Field(min_length=1)]
_TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
_Strings = Annotated[
    list[str], FailFast(), BeforeValidator(_listed, json_schema_input_type=list[_Filled] | _Filled | None)
]
_Integers = Annotated[list[int], FailFast(), BeforeValidator(_listed, json_schema_input_type=list[_TokenId] | None)]
_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
    },
    "required": ["name"],
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}
_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
# What other modules read, as the OpenAPI document says it.
_Object = Annotated[object, WithJsonSchema({"type": ["object", "null"]})]
_Objects = Annotated[object, WithJsonSchema({"type": ["array", "null"], "items": {"type": "object"}})]
_Texts = Annotated[object, WithJsonSchema({"type": ["array", "null"], "items": {"type": "string"}})]
_Text = Annotated[object, WithJsonSchema({"type": ["string", "null"]})]
_Choice = Annotated[object, WithJsonSchema({"type": ["string", "object", "null"]})]
_Schema = Annotated[object, WithJsonSchema({"type": ["object", "boolean", "string", "null"]})]
_Biases = Annotated[object, WithJsonSchema({"type": ["object", "null"], "additionalProperties": {"type": "number"}})]
_Content = Annotated[
    object,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}),
]
_Prompt = Annotated[
    object,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _effort(value: str) -> str:
    if value not in EFFORTS:
        raise ValueError(f"must be one of {', '.join(EFFORTS)}")
    return value


_Effort = Annotated[str, AfterValidator(_effort), WithJsonSchema({"type": "string", "enum": list(EFFORTS)})]
_AtLeastOne = Field(json_schema_extra={"minItems": 1})


class Body(BaseModel):
    """What the body of a request is made of: no value is converted to another type."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class StreamOptions(Body):
    """What the events of a stream hold beside the answer."""

    include_usage: bool | None = None
    """A last event has the usage."""
    continuous_usage_stats: bool | None = None
    """With include_usage: every event has the usage so far."""


class ChatMessage(Body):
    """One message of a chat. `content` is a string or a list of text parts. Every role goes to the model's chat
    template, which knows which there are; so do the other fields."""

    # TextProcessor.chat checks the content.

    role: Annotated[str, AfterValidator(_given), AfterValidator(_short), _SHORT]
    content: _Content = None
    name: str | None = None
    refusal: str | None = None
    """What an assistant said instead of a content, in a history of OpenAI's models."""
    tool_calls: _Objects = None
    function_call: _Object = None
    """The older form of tool_calls."""
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class GenerationRequest(Body):
    """What both ways of asking share. null means the default everywhere."""

    model: str | None = None
    """Where it is left out, the one model that there is."""
    stream: bool | None = None
    """The answer comes as server-sent events."""
    stream_options: StreamOptions | None = None
    """Only with stream."""
    stream_interval: int | None = None
    """Tokens of a choice that one event holds at least, but for its first and last."""
    max_tokens: int | None = None
    """Tokens to generate at most; 0 generates none. null means up to the model's length in a chat, and the server's
    http.default_max_tokens (16) elsewhere."""
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
    logit_bias: _Biases = None
    """An object from token ids, which JSON writes as strings, to what is added to their logits, from -100 to 100."""
    # params.py reads it: an error costs no memory for each entry there.
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
    """Special tokens around a prompt, such as BOS. By default off in a chat, whose template writes them, and on
    elsewhere."""
    truncate_prompt_tokens: int | None = None
    """Only so many of the prompt's last tokens are kept; -1: as many as leave room for max_tokens."""
    return_token_ids: bool | None = None
    """The answer has the tokens of prompts and completions."""
    request_id: _Name | None = None
    """vLLM's name of a request, by which it can be aborted; the answer's id ends with it."""
    rid: _Name | None = None
    """The same of SGLang; it is the answer's id."""
    timings: bool | None = None
    """The answer says how long it took."""
    prompt_logprobs: int | None = None
    """Log probabilities of the prompt's tokens, with so many of the likeliest at each place."""
    logprob_token_ids: _Integers = []
    return_tokens_as_token_ids: bool | None = None
    """Log probabilities name tokens as token_id:123."""
    # What asks for structured output; structure.py reads it.
    response_format: _Object = None
    """OpenAI's: {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {...}}."""
    structured_outputs: _Object = None
    """vLLM's: one of json, regex, choice, grammar, json_object, structural_tag."""
    guided_json: _Schema = None
    """A JSON schema that the answer keeps to."""
    guided_regex: _Text = None
    """A regular expression that the answer matches."""
    guided_choice: _Texts = None
    """The answer is one of these texts."""
    guided_grammar: _Text = None
    """A grammar, as EBNF, that the answer keeps to."""
    json_schema: _Schema = None
    """SGLang's guided_json."""
    regex: _Text = None
    """SGLang's guided_regex."""
    ebnf: _Text = None
    """SGLang's guided_grammar."""
    structural_tag: _Schema = None
    """Parts of the answer that keep to schemas."""
    best_of: int | None = None
    """So many completions are made and the best n returned."""
    use_beam_search: bool | None = None
    """The likeliest sequences are looked for instead of sampled; best_of (or n) is the number of beams."""
    length_penalty: float | None = None
    early_stopping: bool | None = None
    user: _Name | None = None
    """The tenant, where the server has no keys and says so (http.user_is_tenant); else it names nobody."""
    priority: int | None = None
    deadline_s: float | None = None
    queue_timeout_s: float | None = None
    cache_salt: _Name | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast(), AfterValidator(_not_empty), _AtLeastOne]
    max_completion_tokens: int | None = None
    """OpenAI's newer name of max_tokens, which it goes before."""
    logprobs: bool | None = None
    """Log probabilities of the answer's tokens."""
    top_logprobs: int | None = None
    """With logprobs: those of so many of the likeliest tokens at each place."""
    # generation/tool_reading.py reads the next five.
    tools: Annotated[object, WithJsonSchema({"type": ["array", "null"], "items": _TOOL})] = None
    """What the model may call."""
    tool_choice: _Choice = None
    """none, auto, required, or the one tool that is to be called."""
    parallel_tool_calls: Annotated[object, WithJsonSchema({"type": ["boolean", "null"]})] = None
    """Whether the model may call several tools at once."""
    functions: Annotated[object, WithJsonSchema({"type": ["array", "null"], "items": _FUNCTION})] = None
    """The older form of tools."""
    function_call: _Choice = None
    """The older form of tool_choice."""
    add_generation_prompt: bool | None = None
    """The prompt ends with the beginning of an answer; by default it does."""
    continue_final_message: bool | None = None
    """The last message is left open, and the answer goes on with it."""
    documents: list[dict[str, object]] | None = None
    """Documents for templates that read them."""
    chat_template: str | None = None
    """A template instead of the model's, where the server allows it."""
    chat_template_kwargs: dict[str, object] | None = None
    """More variables of the template."""
    reasoning_effort: _Effort | None = None
    """How much the model is to think, where its template can say so."""
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None
    """vLLM's name; without it an answer leaves out what the model thought."""
    separate_reasoning: bool | None = None
    """SGLang's name; off, what the model thinks is part of the content."""


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    # parser.prompts_of sorts the forms out.
    prompt: _Prompt
    """A text, a list of texts, the token ids of one, or a list of those."""
    echo: bool | None = None
    """Each completion begins with its prompt."""
    logprobs: Annotated[
        int | None, BeforeValidator(_unless_off, json_schema_input_type=int | Literal[False] | None)
    ] = None
    """Log probabilities of so many of the likeliest tokens at each place, and of the token itself."""


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


Choice = TypeVar("Choice")


class Completion(msgspec.Struct, Generic[Choice]):
    """The answer to both ways of asking; with no choices it is a stream's last chunk, which carries the usage."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
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
    """A model under one of its names; `root` is the first of them. `parent` is of fine-tuned models."""

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
