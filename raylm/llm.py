"""Offline use: a model in this process, without a cluster.

from raylm import LLM, SamplingParams

llm = LLM("smollm2-135m")
for completion in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
    print(completion.outputs[0].text)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from raylm.config.source import locate
from raylm.core.sampling import MAX_SEED, SamplingParams
from raylm.core.step import ModelInfo, TokenDelta
from raylm.engine.engine import check_prompt
from raylm.engine.factory import local_engine
from raylm.errors import RequestRejected
from raylm.text.processor import TextDelta, TextProcessor, TextStream

Message = dict[str, Any]
"""One chat message as OpenAI's clients send it: {"role": ..., "content": ...}."""


@dataclasses.dataclass(slots=True)
class Output:
    """One generated sequence. `token_ids` ends with the stop token where one ended it; `text` has no stop string."""

    text: str
    token_ids: list[int]
    finish_reason: str


@dataclasses.dataclass(slots=True)
class Completion:
    """What one prompt gave: params.n outputs. `prompt` is None where token ids or messages were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Output]


class LLM:
    """One model on one device of this machine. Batching happens inside: give it all prompts at once."""

    def __init__(
        self,
        model: str | EngineConfig,
        *,
        dtype: str = "auto",
        device: str = "auto",
        load_format: str = "auto",
        max_model_len: int | None = None,
        seed: int = 0,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        num_threads: int | None = None,
        progress: bool = True,
    ) -> None:
        """Load a model: a folder, a .gguf file, a demo name, or a whole EngineConfig (the rest is then ignored).

        Raises ConfigError naming the key, its value and what is allowed.
        """
        if isinstance(model, str):
            settings = {
                "model": {
                    "path": model,
                    "dtype": dtype,
                    "load_format": load_format,
                    "max_model_len": max_model_len,
                    "seed": seed,
                },
                "scheduler": {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens},
                "runtime": {"device": device, "num_threads": num_threads},
            }
            model = parse(EngineConfig, settings, source="LLM(...)")
        self.config = model
        self.text = TextProcessor.load(locate(model.model.path))
        self._engine = local_engine(model, progress=progress)

    @property
    def name(self) -> str:
        return self.config.model.served_name

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete prompts (strings or token ids), batched, in the order given.

        `params` holds for all, or is one a prompt. Raises RequestRejected before anything runs.
        """
        batch: list[str | list[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        encoded = [self.text.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in batch]
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        return self._run(texts, encoded, params, progress=progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Answer one conversation, or several, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        encoded = [self.text.chat(list(conversation)) for conversation in conversations]
        return self._run([None] * len(encoded), encoded, params, progress=progress)

    def stream(self, prompt_ids: list[int], params: SamplingParams) -> Iterator[TextDelta]:
        """Generate one sequence and yield its text as it comes; leaving the loop ends the request."""
        text = self.text.stream(params)
        self._engine.add("stream", prompt_ids, params)
        try:
            while True:
                for delta in self._engine.step():
                    piece = text.push(delta.token_ids, delta.finish_reason)
                    yield piece
                    if piece.finish_reason is not None:
                        return
        finally:
            self._engine.abort("stream")

    def close(self) -> None:
        """Give back the model's memory."""
        self._engine.shutdown()

    def _run(
        self,
        texts: list[str | None],
        encoded: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        progress: bool,
    ) -> list[Completion]:
        each = _params_for_each(params, len(encoded))
        for prompt_ids, own in zip(encoded, each, strict=True):
            check_prompt(prompt_ids, own, max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        completions = [Completion(text, ids, []) for text, ids in zip(texts, encoded, strict=True)]
        job = _Job(self, completions, each)
        job.run(progress=progress)
        return completions


class _Sequence:
    """One output on its way."""

    def __init__(self, completion: Completion, stream: TextStream) -> None:
        self.output = Output("", [], "")
        self._stream = stream
        completion.outputs.append(self.output)

    def push(self, delta: TokenDelta) -> bool:
        """Take a step's tokens; True when the sequence is complete."""
        piece = self._stream.push(delta.token_ids, delta.finish_reason)
        self.output.token_ids += delta.token_ids[: piece.num_tokens]
        self.output.text += piece.text
        if piece.finish_reason is None:
            return False
        self.output.finish_reason = piece.finish_reason
        return True


class _Job:
    """One call's sequences: fed to the engine as its queue has room, driven until all are complete."""

    def __init__(self, llm: LLM, completions: list[Completion], params: list[SamplingParams]) -> None:
        self._engine = llm._engine
        self._room = llm.config.scheduler.max_queued_requests
        self._live: dict[str, _Sequence] = {}
        self._todo: list[tuple[str, list[int], SamplingParams]] = []
        for index, (completion, own) in enumerate(zip(completions, params, strict=True)):
            for choice in range(own.n):
                request_id = f"{index}.{choice}"
                self._live[request_id] = _Sequence(completion, llm.text.stream(own))
                self._todo.append((request_id, completion.prompt_token_ids, params_of_choice(own, choice)))
        self._todo.reverse()

    def run(self, *, progress: bool) -> None:
        try:
            with tqdm(total=len(self._live), desc="generating", unit="seq", disable=not progress) as bar:
                while self._live:
                    self._feed()
                    for delta in self._engine.step():
                        bar.update(self._take(delta))
        finally:
            self._engine.abort_all()

    def _feed(self) -> None:
        while self._todo and self._engine.stats().waiting < self._room:
            self._engine.add(*self._todo.pop())

    def _take(self, delta: TokenDelta) -> bool:
        sequence = self._live.get(delta.request_id)
        if sequence is None or not sequence.push(delta):
            return False
        if delta.finish_reason is None:
            # A stop string ended it: the engine does not know strings, so it is told.
            self._engine.abort(delta.request_id)
        del self._live[delta.request_id]
        return True


def params_of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of one of n choices: a given seed is moved on by the choice's number, so that they differ."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + choice) & MAX_SEED
    return dataclasses.replace(params, n=1, seed=seed)


def _params_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams(max_tokens=128)] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestRejected(f"params has {len(params)} entries for {count} prompts", param="params")
    return list(params)
