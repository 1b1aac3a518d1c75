"""AsyncLLM: one model in this process for many callers of an event loop."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from raylm import garbage
from raylm.config.engine import EngineConfig
from raylm.config.resolve import followed
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.step import ModelInfo
from raylm.engine.factory import offline_engine
from raylm.engine.local_client import LocalClient
from raylm.engine.streams import Sequences
from raylm.errors import EngineDeadError, RequestRejected
from raylm.generation.tool_reading import read_tools
from raylm.llm.engine import DEFAULT_MAX_TOKENS, Metric, growing, metrics_of
from raylm.llm.inputs import Input, Inputs, Message, Prompt, check_one_name
from raylm.llm.results import Completion
from raylm.text.chat_options import ChatOptions
from raylm.text.tokenizer import Tokenizer


class AsyncLLM:
    """One model, whose engine a thread of its own drives. `generate` and `chat` belong to one event loop; any number of
    them may run at the same time."""

    def __init__(self, model: str | EngineConfig, *, progress: bool = True, **options: Any) -> None:
        """Load a model, which takes seconds; arguments are those of LLM. Raises ConfigError."""
        self._inputs = Inputs(model, options, source="AsyncLLM(...)")
        self._engine = offline_engine(followed(self._inputs.offline_config), progress=progress)
        self._client = LocalClient(self._engine, holds=False)
        self._live: dict[str, Sequences] = {}
        self._is_closed = False
        self._garbage = garbage.set_apart()

    @property
    def config(self) -> EngineConfig:
        return self._inputs.config

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    def params(self, **given: Any) -> SamplingParams:
        """SamplingParams(**given); what is left out is as LLM.params says."""
        return self._inputs.params(given)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        options: RequestOptions | None = None,
        add_special_tokens: bool = True,
        sampling_params: SamplingParams | None = None,
    ) -> AsyncGenerator[Completion, None]:
        """Complete a prompt: all that there is so far, again and again, the last time with `finished`.

        It is the same object every time, which grows: copy what must not change. Whoever leaves the loop early, or is
        cancelled, ends the request (at once with `contextlib.aclosing`). request_id: no unfinished request has it; one
        is made up where none is given. sampling_params is vLLM's name of params. Raises RequestRejected,
        EngineDeadError.
        """
        params = self._either(params, sampling_params)
        wanted = await asyncio.to_thread(self._inputs.prompt, prompt, params, add_special_tokens=add_special_tokens)
        async with aclosing(self._run(wanted, request_id, options)) as completions:
            async for completion in completions:
                yield completion

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Message] | None = None,
        tool_choice: str | Message | None = None,
        chat_options: ChatOptions | None = None,
        options: RequestOptions | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> AsyncGenerator[Completion, None]:
        """Answer a conversation, as LLM.chat does; the rest is as in `generate`."""
        params = self._either(params, sampling_params)
        use = read_tools(tools, tool_choice, None)
        wanted = await asyncio.to_thread(self._inputs.conversation, messages, params, use, chat_options)
        async with aclosing(self._run(wanted, request_id, options)) as completions:
            async for completion in completions:
                yield completion

    async def abort(self, request_id: str) -> None:
        """End a request: its `generate` gives the finish reason "abort" for each output that has not ended. No error
        for one that has ended."""
        if (sequences := self._live.get(request_id)) is not None:
            sequences.abort()

    @property
    def is_running(self) -> bool:
        return self._client.failure is None and not self._is_closed

    async def check_health(self) -> None:
        """Raises EngineDeadError, with the reason, once the engine has stopped."""
        if not self.is_running:
            raise EngineDeadError(self._client.failure or "the engine was closed")

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: encode, decode, vocab_size, eos_token_ids."""
        return self._inputs.text.tokenizer

    def get_metrics(self) -> list[Metric]:
        """What the engine has counted and measured since its start, series by series under their names at /metrics."""
        return metrics_of(self._inputs, self._engine)

    def shutdown(self) -> None:
        """End every request, whose callers get EngineDeadError, and give back the model's memory. May be called
        twice."""
        if not self._is_closed:
            self._is_closed = True
            self._client.close()
            self._inputs.close()
            self._garbage.take_back()

    def _either(self, params: SamplingParams | None, sampling_params: SamplingParams | None) -> SamplingParams:
        """What was given under one of the argument's two names, or the default."""
        check_one_name(params, sampling_params)
        return params or sampling_params or self.params(max_tokens=DEFAULT_MAX_TOKENS)

    async def _run(
        self, wanted: Input, request_id: str | None, options: RequestOptions | None
    ) -> AsyncGenerator[Completion, None]:
        await self.check_health()
        wanted = wanted._replace(params=await self._inputs.ready_async(wanted.params))
        request_id = uuid.uuid4().hex if request_id is None else request_id
        if request_id in self._live:
            raise RequestRejected(f"request_id {request_id!r:.200} is that of an unfinished request; give another")
        completion = wanted.completion
        outputs = growing(request_id, wanted, self._inputs)
        deltas = self._client.generate(
            list(outputs), completion.prompt_token_ids, wanted.params, options or RequestOptions()
        )
        self._live[request_id] = deltas
        try:
            async for delta in deltas:
                output = outputs[delta.request_id]
                if output.push(delta, time.time()):
                    # Before the yield: a stop string frees the engine before a slow caller has read.
                    deltas.end(delta.request_id)
                else:
                    output.show()
                yield completion
        finally:
            del self._live[request_id]
            await deltas.aclose()
