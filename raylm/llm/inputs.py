"""From prompts and conversations to what an engine takes: a model's text side, for LLM, LLMEngine and AsyncLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from raylm.config.engine_keys import engine_sections, overridden
from raylm.core.sampling import SamplingParams
from raylm.errors import ConfigError, RequestRejected
from raylm.generation.ability import ability_of
from raylm.generation.chat import Chat, open_chat
from raylm.generation.reader import Reading
from raylm.generation.tools import ToolUse
from raylm.grammar.compiler import GrammarCompiler
from raylm.llm.results import Completion
from raylm.model_files.advice import sampling_defaults
from raylm.model_files.deployed import pinned
from raylm.model_files.source import locate
from raylm.text.chat_options import ChatOptions
from raylm.text.chat_settings import ChatSettings
from raylm.text.processor import TextProcessor
from raylm.text.truncation import Truncation

Message = dict[str, Any]
"""One chat message as OpenAI's clients send it: {"role": ..., "content": ...}."""


Prompt = str | list[int] | dict[str, Any]
"""A text, tokens, or one of them as vLLM wraps it: {"prompt": ...}, {"prompt_token_ids": [...]}."""


class Input(NamedTuple):
    """One request before it is with an engine. `params` still have their grammar as text (`Inputs.ready`)."""

    completion: Completion
    params: SamplingParams
    reading: Reading | None = None


class Inputs:
    """A model's tokenizer, chat template, grammars and advised sampling."""

    def __init__(self, model: str | EngineConfig, options: Mapping[str, Any], *, source: str) -> None:
        """`source` is what the errors call the options. Raises ConfigError."""
        if isinstance(model, str):
            sections = engine_sections(options, source=source)
            model = parse(EngineConfig, overridden({"model": {"path": model}}, sections), source=source)
        elif options:
            raise ConfigError(f"{source}: {next(iter(options))} is given beside a whole EngineConfig, which has it")
        self.config = model = pinned(model)
        self._sampling = sampling_defaults(model)
        found = locate(model.model.reference)
        self.text = TextProcessor.load(found, ChatSettings.of(model))
        self._format = ability_of(self.text.chat_template, model.chat).format
        self.grammars = GrammarCompiler(found)

    @property
    def offline_config(self) -> EngineConfig:
        """The configuration of an engine of this process. Nobody follows it: it would collect events for ever."""
        return self.config.model_copy(update={"cache": self.config.cache.model_copy(update={"events": False})})

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """SamplingParams of what is given; the rest as the configuration or the model's own advice says."""
        own: dict[str, Any] = self._sampling.fields()
        return SamplingParams(**{**own, **given})

    def prompt(self, prompt: Prompt, params: SamplingParams, *, add_special_tokens: bool = True) -> Input:
        """A prompt to go on from. Raises RequestRejected."""
        found = _unwrapped(prompt)
        if isinstance(found, str):
            return Input(Completion(found, self.text.encode(found, add_special_tokens=add_special_tokens), []), params)
        return Input(Completion(None, list(found), []), params)

    def conversation(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        use: ToolUse,
        options: ChatOptions | None = None,
        *,
        add_special_tokens: bool = False,
    ) -> Input:
        """A conversation to answer. Raises RequestRejected."""
        chat = Chat(_messages(messages), options or ChatOptions(), use, params.structure)
        opened = open_chat(self.text, self._format, chat, params)
        ids = self.text.encode(opened.text, add_special_tokens=add_special_tokens)
        ready = opened.params
        if opened.structure is not params.structure:
            ready = dataclasses.replace(ready, structure=opened.structure)
        return Input(Completion(None, ids, []), ready, opened.reading)

    def truncate(self, wanted: Input, keep: int | None, *, max_model_len: int) -> None:
        """Keep as many of the prompt's last tokens; -1: as many as fit."""
        if keep is not None:
            room = max_model_len - (wanted.params.max_tokens or 1)
            completion = wanted.completion
            completion.prompt_token_ids = Truncation(keep).kept(completion.prompt_token_ids, room=room)

    def ready(self, params: SamplingParams) -> SamplingParams:
        """What an engine can take: tokens of bad words, a grammar. Raises RequestRejected."""
        params = self.text.prepare(params)
        if params.structure is None:
            return params
        return dataclasses.replace(params, structure=self.grammars.compile(params.structure))

    async def ready_async(self, params: SamplingParams) -> SamplingParams:
        """As ready, while the event loop goes on."""
        params = self.text.prepare(params)
        if params.structure is None:
            return params
        return dataclasses.replace(params, structure=await self.grammars.compile_async(params.structure))

    def close(self) -> None:
        """End the processes that compile grammars."""
        self.grammars.close()


def check_one_name(params: object, sampling_params: object) -> None:
    """Refuse an argument that is given under both of its names, raylm's and vLLM's. Raises RequestRejected."""
    if params is not None and sampling_params is not None:
        raise RequestRejected("params and sampling_params are two names of one argument; give one", param="params")


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
