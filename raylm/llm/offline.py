"""Offline use: a model in this process, without a cluster.

from raylm import LLM, SamplingParams

llm = LLM("smollm2-135m")
for completion in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
    print(completion.outputs[0].text)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from tqdm import tqdm

from raylm.config.engine import EngineConfig
from raylm.core.control import StartProfile, StopProfile
from raylm.core.sampling import SamplingParams
from raylm.core.step import ModelInfo
from raylm.engine.engine import Engine
from raylm.engine.factory import offline_engine
from raylm.errors import RaylmError, RequestRejected
from raylm.generation.tool_reading import read_tools
from raylm.llm.engine import DEFAULT_MAX_TOKENS, LLMEngine, Metric
from raylm.llm.inputs import Input, Inputs, Message, Prompt, check_one_name
from raylm.llm.results import Completion
from raylm.text.chat_options import ChatOptions
from raylm.text.processor import TextDelta, TextProcessor
from raylm.text.tokenizer import Tokenizer


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
        inputs = Inputs(model, options, source="LLM(...)")
        self._core = LLMEngine.over(inputs, offline_engine(inputs.offline_config, progress=progress))
        self._count = itertools.count()

    @property
    def config(self) -> EngineConfig:
        return self._core.inputs.config

    @property
    def text(self) -> TextProcessor:
        return self._core.inputs.text

    @property
    def _engine(self) -> Engine:
        return self._core.engine

    @property
    def name(self) -> str:
        return self.config.model.served_name

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    def params(self, **given: Any) -> SamplingParams:
        """SamplingParams(**given); what is left out is as the config's `model.sampling` says, or else the model's own
        generation_config.json (unless `generation.defaults` is neutral)."""
        return self._core.params(**given)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Complete prompts, batched, in the order given.

        `params` holds for all, or is one a prompt; without it, `self.params(max_tokens=128)`. add_special_tokens puts
        around a string what the model wants there, such as BOS. truncate_prompt_tokens keeps as many of a prompt's last
        tokens, -1 as many as fit. sampling_params and use_tqdm are vLLM's names of params and progress. Raises
        RequestRejected before anything runs.
        """
        batch = cast("list[Prompt]", [prompts] if isinstance(prompts, str | dict) else list(prompts))
        each = self._params_list(params, sampling_params, len(batch))
        wanted = []
        with _naming("prompts", len(batch)) as at:
            for index, (prompt, own) in enumerate(zip(batch, each, strict=True)):
                at.index = index
                wanted.append(self._core.inputs.prompt(prompt, own, add_special_tokens=add_special_tokens))
        return self._run("prompts", wanted, truncate_prompt_tokens, progress=progress and use_tqdm)

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
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Answer one conversation, or several, through the model's chat template, which writes BOS and its like itself.

        `tools` and `tool_choice` are OpenAI's. `options`: what else a request may say of its template, such as
        documents and variables. The others are those of `generate`. Raises RequestRejected before anything runs.
        """
        is_one = isinstance(messages, str) or (messages and isinstance(messages[0], dict))
        conversations = cast("list[Sequence[Message]]", [messages] if is_one else list(messages))
        each = self._params_list(params, sampling_params, len(conversations))
        use = read_tools(tools, tool_choice, None)
        wanted = []
        with _naming("conversations", len(conversations)) as at:
            for index, (conversation, own) in enumerate(zip(conversations, each, strict=True)):
                at.index = index
                wanted.append(
                    self._core.inputs.conversation(
                        conversation, own, use, options, add_special_tokens=add_special_tokens
                    )
                )
        return self._run("conversations", wanted, truncate_prompt_tokens, progress=progress and use_tqdm)

    def stream(self, prompt_ids: list[int], params: SamplingParams) -> Iterator[TextDelta]:
        """Generate one sequence and yield its text as it comes; leaving the loop ends the request."""
        params = self._core.inputs.ready(params)
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

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: encode, decode, vocab_size, eos_token_ids."""
        return self._core.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """What the engine has counted and measured since its start, series by series under their names at /metrics."""
        return self._core.get_metrics()

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
        self._core.shutdown()

    def _run(self, kind: str, wanted: list[Input], truncate: int | None, *, progress: bool) -> list[Completion]:
        # One object usually holds for all: it is made ready once.
        inputs = self._core.inputs
        ready = {key: inputs.ready(one) for key, one in {id(each.params): each.params for each in wanted}.items()}
        wanted = [each._replace(params=ready[id(each.params)]) for each in wanted]
        with _naming(kind, len(wanted)) as at:
            for index, each in enumerate(wanted):
                at.index = index
                inputs.truncate(each, truncate, max_model_len=self.info.max_model_len)
                self._engine.check_request(each.completion.prompt_token_ids, each.params)
        ids = [str(next(self._count)) for _ in wanted]
        try:
            for request_id, each in zip(ids, wanted, strict=True):
                self._core.add_checked(request_id, each)
            total = sum(each.params.n for each in wanted)
            with tqdm(total=total, desc="generating", unit="seq", disable=not progress) as bar:
                while self._core.has_unfinished_requests():
                    bar.update(sum(grown.output.finish_reason is not None for grown in self._core.advance()))
        finally:
            self._core.abort_request(ids)
        return [each.completion for each in wanted]

    def _params_list(
        self,
        params: SamplingParams | Sequence[SamplingParams] | None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        count: int,
    ) -> Sequence[SamplingParams]:
        """One a prompt."""
        check_one_name(params, sampling_params)
        wanted = sampling_params if params is None else params
        if wanted is None:
            wanted = self.params(max_tokens=DEFAULT_MAX_TOKENS)
        given = [wanted] * count if isinstance(wanted, SamplingParams) else list(wanted)
        if len(given) != count:
            raise RequestRejected(f"params has {len(given)} entries for {count} prompts", param="params")
        return given


class _Place:
    """Which of several prompts is looked at."""

    index = 0


@contextmanager
def _naming(kind: str, count: int) -> Iterator[_Place]:
    """Of several prompts, say which one is rejected."""
    at = _Place()
    try:
        yield at
    except RequestRejected as error:
        if count == 1:
            raise
        raise RequestRejected(f"{kind}[{at.index}]: {error}", param=error.param, code=error.code) from None
