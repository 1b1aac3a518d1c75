"""Offline use: a model in this process, without a cluster.

from raylm import LLM, SamplingParams

llm = LLM("smollm2-135m")
for completion in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
    print(completion.outputs[0].text)
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tqdm import tqdm

from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from raylm.config.engine_keys import engine_sections, overridden
from raylm.core.control import StartProfile, StopProfile
from raylm.core.sampling import SamplingParams
from raylm.core.step import Logprobs, ModelInfo, TokenDelta
from raylm.engine.factory import offline_engine
from raylm.engine.feeder import Feeder, Group
from raylm.errors import ConfigError, RaylmError, RequestRejected
from raylm.generation.ability import ability_of
from raylm.generation.chat import Chat, open_chat
from raylm.generation.choices import Said, ToolCall
from raylm.generation.reader import ChoiceReader, Reading
from raylm.generation.tool_reading import read_tools
from raylm.grammar.compiler import GrammarCompiler
from raylm.model_files.advice import sampling_defaults
from raylm.model_files.deployed import pinned
from raylm.model_files.source import locate
from raylm.text.chat_options import ChatOptions
from raylm.text.chat_settings import ChatSettings
from raylm.text.processor import TextDelta, TextProcessor
from raylm.text.truncation import Truncation

Message = dict[str, Any]
"""One chat message as OpenAI's clients send it: {"role": ..., "content": ...}."""


Prompt = str | list[int] | dict[str, Any]
"""A text, tokens, or one of them as vLLM wraps it: {"prompt": ...}, {"prompt_token_ids": [...]}."""


class TokenLogprob(NamedTuple):
    """A token that could stand at some position, and its log probability. `rank` is 1 for the likeliest; None for a
    token of params.logprob_token_ids, whose rank is not counted. `text` is the token by itself; of a part of a
    character it is U+FFFD."""

    token_id: int
    logprob: float
    rank: int | None
    text: str


class PromptLogprob(NamedTuple):
    """What the model finds of a token of the prompt after those before it; `top` are the likeliest tokens there."""

    logprob: float
    rank: int
    top: list[TokenLogprob]


@dataclasses.dataclass(slots=True)
class Output:
    """One generated sequence. `token_ids` ends with the stop token where one ended it; `text` has no stop string unless
    params.include_stop_str_in_output.

    stop_reason: the stop string, or the one of params.stop_token_ids, that ended it; None where the model's own end or
        the length did.
    reasoning: what the model thought before it answered, in a chat whose model sets that off; no part of text.
    tool_calls: the tools that the model calls, in a chat that offers any. The finish reason is "tool_calls" then, where
        the sequence ended by itself.
    logprobs: the log probability of each of token_ids, and their sum; None unless params.logprobs asked for them.
    ranks, top_logprobs: the rank of each of token_ids among all tokens, and the likeliest tokens at its position (or
        those of params.logprob_token_ids); None with logprobs.
    message: what went wrong, with the finish reasons "error" and "deadline".
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float] | None = None
    cumulative_logprob: float | None = None
    stop_reason: str | int | None = None
    ranks: list[int] | None = None
    top_logprobs: list[list[TokenLogprob]] | None = None
    message: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Completion:
    """What one prompt gave: params.n outputs. `prompt` is None where token ids or messages were given.

    prompt_logprobs: one for each of prompt_token_ids, None for the first, which follows nothing; None unless
        params.prompt_logprobs asked for them.
    num_cached_tokens: tokens of the prompt that were in the prefix cache. It depends on what ran before, the outputs do
    not, so completions are compared without it.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Output]
    num_cached_tokens: int = dataclasses.field(default=0, compare=False)
    prompt_logprobs: list[PromptLogprob | None] | None = None


class LLM:
    """One model, on one device of this machine or on several of a Ray cluster. Batching happens inside: give it all
    prompts at once."""

    def __init__(
        self,
        model: str | EngineConfig,
        *,
        progress: bool = True,
        **options: Any,
    ) -> None:
        """Load a model: a folder, a .gguf file, a model's name on the hub, a demo name, or a whole EngineConfig.

        `options` are keys of EngineConfig as `raylm serve` has them, with underscores (max_model_len=4096, tensor=2,
        speculation_method="ngram"), or vLLM's names of them (tensor_parallel_size=2): docs/from-vllm.md lists all.
        Raises ConfigError naming the key, its value and what is allowed.
        """
        if isinstance(model, str):
            sections = engine_sections(options, source="LLM(...)")
            settings = overridden({"model": {"path": model}}, sections)
            model = parse(EngineConfig, settings, source="LLM(...)")
        elif options:
            raise ConfigError(f"LLM(...): {next(iter(options))} is given beside a whole EngineConfig, which has it")
        self.config = model = pinned(model)
        self._sampling = sampling_defaults(model)
        source = locate(model.model.reference)
        self.text = TextProcessor.load(source, ChatSettings.of(model))
        self._format = ability_of(self.text.chat_template, model.chat).format
        self._grammars = GrammarCompiler(source)
        # Nobody follows an engine in this process: it would collect events for ever.
        quiet = model.model_copy(update={"cache": model.cache.model_copy(update={"events": False})})
        self._engine = offline_engine(quiet, progress=progress)
        # A model's objects live until it is closed: without them a collection takes microseconds, not a tenth of a
        # second in the middle of a step.
        gc.freeze()

    @property
    def name(self) -> str:
        return self.config.model.served_name

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    def params(self, **given: Any) -> SamplingParams:
        """SamplingParams(**given); what is left out is as the config's `model.sampling` says, or else the model's own
        generation_config.json (unless `generation.defaults` is neutral)."""
        own: dict[str, Any] = self._sampling.fields()
        return SamplingParams(**{**own, **given})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete prompts, batched, in the order given.

        `params` holds for all, or is one a prompt; without it, `self.params(max_tokens=128)`. add_special_tokens puts
        around a string what the model wants there, such as BOS. truncate_prompt_tokens keeps as many of a prompt's last
        tokens, -1 as many as fit. Raises RequestRejected before anything runs.
        """
        batch = [_unwrapped(prompt) for prompt in ([prompts] if isinstance(prompts, str | dict) else list(prompts))]
        encoded = []
        for index, prompt in enumerate(batch):
            with _naming("prompts", index, len(batch)):
                encoded.append(
                    self.text.encode(prompt, add_special_tokens=add_special_tokens)
                    if isinstance(prompt, str)
                    else list(prompt)
                )
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        completions = [Completion(text, ids, []) for text, ids in zip(texts, encoded, strict=True)]
        each = self._params_list(params, len(batch))
        return self._run("prompts", completions, each, truncate_prompt_tokens, progress=progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Message] | None = None,
        tool_choice: str | Message | None = None,
        options: ChatOptions | None = None,
        add_special_tokens: bool = False,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Answer one conversation, or several, through the model's chat template, which writes BOS and its like itself.

        `tools` and `tool_choice` are OpenAI's. `options`: what else a request may say of its template, such as
        documents and variables. The others are those of `generate`. Raises RequestRejected before anything runs.
        """
        is_one = isinstance(messages, str) or (messages and isinstance(messages[0], dict))
        conversations = [messages] if is_one else list(messages)
        each = self._params_list(params, len(conversations))
        use = read_tools(tools, tool_choice, None)
        encoded, opened = [], []
        for index, (conversation, own) in enumerate(zip(conversations, each, strict=True)):
            with _naming("conversations", index, len(conversations)):
                chat = Chat(_messages(conversation), options or ChatOptions(), use, own.structure)
                opened.append(open_chat(self.text, self._format, chat, own))
                encoded.append(self.text.encode(opened[-1].text, add_special_tokens=add_special_tokens))
        ready = [
            one.params if one.structure is own.structure else dataclasses.replace(one.params, structure=one.structure)
            for one, own in zip(opened, each, strict=True)
        ]
        completions = [Completion(None, ids, []) for ids in encoded]
        readings = [one.reading for one in opened]
        return self._run("conversations", completions, ready, truncate_prompt_tokens, readings, progress=progress)

    def stream(self, prompt_ids: list[int], params: SamplingParams) -> Iterator[TextDelta]:
        """Generate one sequence and yield its text as it comes; leaving the loop ends the request."""
        params = self._ready(params)
        text = self.text.stream(params)
        self._engine.add(["stream"], prompt_ids, params)
        try:
            while True:
                for delta in self._engine.step():
                    if delta.finish_reason == "error":
                        raise RaylmError(delta.message or "the engine failed on this request")
                    piece = text.push(delta.token_ids, delta.finish_reason)
                    yield piece
                    if piece.finish_reason is not None:
                        return
        finally:
            self._engine.abort("stream")

    def reset_prefix_cache(self) -> None:
        """Let nothing be found in the prefix cache that was computed until now."""
        self._engine.reset_prefix_cache()

    def start_profile(self, num_steps: int | None = None) -> None:
        """Record steps with torch's profiler, `num_steps` of them or until stop_profile. Raises RequestRejected where
        runtime.profile_folder is not set."""
        self._engine.control(StartProfile(num_steps))

    def stop_profile(self) -> list[str]:
        """End the recording; the file of each worker, or why there is none."""
        return self._engine.control(StopProfile())

    def close(self) -> None:
        """Give back the model's memory."""
        self._engine.shutdown()
        self._grammars.close()
        gc.unfreeze()

    def _run(
        self,
        kind: str,
        completions: list[Completion],
        params: Sequence[SamplingParams],
        truncate: int | None,
        readings: Sequence[Reading | None] = (),
        *,
        progress: bool,
    ) -> list[Completion]:
        each = self._all_ready(params)
        if truncate is not None:
            cut = Truncation(truncate)
            limit = self.info.max_model_len
            for completion, own in zip(completions, each, strict=True):
                room = limit - (own.max_tokens or 1)
                completion.prompt_token_ids = cut.kept(completion.prompt_token_ids, room=room)
        for index, (completion, own) in enumerate(zip(completions, each, strict=True)):
            with _naming(kind, index, len(completions)):
                self._engine.check_request(completion.prompt_token_ids, own)
        job = _Job(self, completions, each, readings or [None] * len(completions))
        job.run(progress=progress)
        return completions

    def _ready(self, params: SamplingParams) -> SamplingParams:
        """What an engine can take: tokens of bad words, a grammar. Raises RequestRejected."""
        params = self.text.prepare(params)
        if params.structure is None:
            return params
        return dataclasses.replace(params, structure=self._grammars.compile(params.structure))

    def _params_list(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        """One a prompt."""
        if params is None:
            params = self.params(max_tokens=128)
        given = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(given) != count:
            raise RequestRejected(f"params has {len(given)} entries for {count} prompts", param="params")
        return given

    def _all_ready(self, params: Sequence[SamplingParams]) -> list[SamplingParams]:
        """Ready for the engine: with the tokens of bad words, and a grammar."""
        # One object usually holds for all: it is made ready once.
        prepared = {key: self._ready(one) for key, one in {id(one): one for one in params}.items()}
        return [prepared[id(one)] for one in params]


class _Sequence:
    """One output on its way."""

    def __init__(
        self, completion: Completion, text: TextProcessor, params: SamplingParams, reading: Reading | None
    ) -> None:
        self._said = Said()
        self._reader = None if reading is None else ChoiceReader(reading)
        self.output = Output("", [], "")
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
            self.output.ranks, self.output.top_logprobs = [], []
        self._text = text
        self._are_ranked = not params.logprob_token_ids
        self._lists_prompt = params.prompt_logprobs is not None
        self._completion = completion
        self._is_first = not completion.outputs
        self._stream = text.stream(params)
        completion.outputs.append(self.output)

    def push(self, delta: TokenDelta) -> bool:
        """Take a step's tokens; True when the sequence is complete."""
        piece = self._stream.push(delta.token_ids, delta.finish_reason)
        output = self.output
        output.token_ids += delta.token_ids[: piece.num_tokens]
        reason = piece.finish_reason
        if self._reader is None:
            self._said.add(piece.text)
        else:
            pieces, reason = self._reader.pieces(piece.text, reason)
            self._said.take(pieces)
        if output.logprobs is not None and delta.logprobs is not None:
            self._list(delta.logprobs.first(piece.num_tokens))
        if self._is_first:
            self._take_news(delta)
        if piece.finish_reason is None:
            return False
        output.text, output.reasoning, output.tool_calls = self._said.text, self._said.reasoning, self._said.calls
        output.finish_reason, output.stop_reason = reason or piece.finish_reason, piece.stop_reason
        output.message = delta.message
        if output.logprobs is not None:
            output.cumulative_logprob = sum(output.logprobs)
        return True

    def _list(self, found: Logprobs) -> None:
        output = self.output
        assert output.logprobs is not None and output.ranks is not None and output.top_logprobs is not None
        output.logprobs += found.values
        output.ranks += found.ranks
        output.top_logprobs += _top_of(found, self._text, are_ranked=self._are_ranked)

    def _take_news(self, delta: TokenDelta) -> None:
        """What the first sequence's first delta says of the prompt."""
        completion = self._completion
        completion.num_cached_tokens += delta.num_cached_tokens
        if not self._lists_prompt or completion.prompt_logprobs is not None:
            return
        completion.prompt_logprobs = [None]
        if (found := delta.prompt_logprobs) is not None:
            top = _top_of(found, self._text, are_ranked=True)
            completion.prompt_logprobs += map(PromptLogprob, found.values, found.ranks, top)


def _top_of(found: Logprobs, text: TextProcessor, *, are_ranked: bool) -> list[list[TokenLogprob]]:
    return [
        [
            TokenLogprob(token, value, rank if are_ranked else None, text.token_bytes(token).decode(errors="replace"))
            for rank, (token, value) in enumerate(zip(ids, values, strict=True), start=1)
        ]
        for ids, values in zip(found.top_ids, found.top_values, strict=True)
    ]


class _Job:
    """One call's sequences: fed to the engine as its queue has room, driven until all are complete."""

    def __init__(
        self,
        llm: LLM,
        completions: list[Completion],
        params: list[SamplingParams],
        readings: Sequence[Reading | None],
    ) -> None:
        self._engine = llm._engine
        self._feeder = Feeder(llm._engine)
        self._live: dict[str, _Sequence] = {}
        for index, (completion, own, reading) in enumerate(zip(completions, params, readings, strict=True)):
            ids = [f"{index}.{choice}" for choice in range(own.n)]
            for request_id in ids:
                self._live[request_id] = _Sequence(completion, llm.text, own, reading)
            self._feeder.put(Group(ids, completion.prompt_token_ids, own))

    def run(self, *, progress: bool) -> None:
        try:
            with tqdm(total=len(self._live), desc="generating", unit="seq", disable=not progress) as bar:
                while self._live:
                    for group in self._feeder.ready():
                        self._engine.add_checked(*group)
                    for delta in self._engine.step():
                        bar.update(self._take(delta))
        finally:
            self._engine.abort_all()

    def _take(self, delta: TokenDelta) -> bool:
        sequence = self._live.get(delta.request_id)
        if sequence is None or not sequence.push(delta):
            return False
        if delta.finish_reason is None:
            # A stop string ended it: the engine does not know strings, so it is told.
            self._engine.abort(delta.request_id)
        del self._live[delta.request_id]
        return True


@contextmanager
def _naming(kind: str, index: int, count: int) -> Iterator[None]:
    """Of several prompts, say which one is rejected."""
    try:
        yield
    except RequestRejected as error:
        if count == 1:
            raise
        raise RequestRejected(f"{kind}[{index}]: {error}", param=error.param, code=error.code) from None


def _unwrapped(prompt: Prompt) -> str | list[int]:
    """The text or the tokens. Raises RequestRejected."""
    if not isinstance(prompt, dict):
        return prompt
    found = [prompt[name] for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    others = sorted(prompt.keys() - {"prompt", "prompt_token_ids"})
    if others or len(found) != 1:
        raise RequestRejected(
            f"a prompt has the keys {sorted(prompt)}; allowed: prompt or prompt_token_ids, one of them"
        )
    value: str | list[int] = found[0]
    return value


def _messages(conversation: object) -> list[Message]:
    if not isinstance(conversation, Sequence) or isinstance(conversation, str):
        raise RequestRejected(
            'a conversation must be a list of messages such as {"role": "user", "content": "..."}, '
            f"got {conversation!r}; a text to go on from is for generate",
            param="messages",
        )
    return list(conversation)
