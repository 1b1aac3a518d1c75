"""LLMEngine: requests of one model that a caller drives step by step, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from raylm import garbage
from raylm.config.engine import EngineConfig
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.step import ModelInfo, TokenDelta
from raylm.engine.engine import Engine
from raylm.engine.factory import offline_engine
from raylm.engine.feeder import Feeder, Group
from raylm.errors import RequestRejected
from raylm.llm.inputs import Input, Inputs, Prompt
from raylm.llm.results import Completion, GrowingOutput, RequestMetrics
from raylm.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128
"""Of a request without SamplingParams."""


class Metric(NamedTuple):
    """One series of the engine's metrics, under its name at /metrics. A histogram is several: _bucket, _count, _sum."""

    name: str
    labels: dict[str, str]
    value: float


class LLMEngine:
    """One model, on one device of this machine or on several of a Ray cluster. `add_request`, then `step` while
    `has_unfinished_requests`. Not thread-safe: one caller drives it. AsyncLLM drives itself."""

    def __init__(self, model: str | EngineConfig, *, progress: bool = True, **options: Any) -> None:
        """Load a model; arguments are those of LLM. Raises ConfigError."""
        self.inputs = Inputs(model, options, source="LLMEngine(...)")
        self._begin(offline_engine(self.inputs.offline_config, progress=progress))

    @classmethod
    def over(cls, inputs: Inputs, engine: Engine) -> LLMEngine:
        """With parts that are there already; they now belong to this object."""
        self = cls.__new__(cls)
        self.inputs = inputs
        self._begin(engine)
        return self

    def _begin(self, engine: Engine) -> None:
        self.engine = engine
        self._feeder = Feeder(engine)
        self._live: dict[str, dict[str, GrowingOutput]] = {}
        """Request -> the engine's name of a sequence -> the sequence, of those that have not ended."""
        self._garbage = garbage.set_apart()

    @property
    def info(self) -> ModelInfo:
        return self.engine.info

    def params(self, **given: Any) -> SamplingParams:
        """SamplingParams(**given); what is left out is as LLM.params says."""
        return self.inputs.params(given)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        """Queue a prompt under an id that no unfinished request has. Raises RequestRejected."""
        params = params or self.params(max_tokens=DEFAULT_MAX_TOKENS)
        wanted = self.inputs.prompt(prompt, params, add_special_tokens=add_special_tokens)
        wanted = wanted._replace(params=self.inputs.ready(params))
        self.engine.check_request(wanted.completion.prompt_token_ids, wanted.params)
        self.add_checked(request_id, wanted, options)

    def add_checked(self, request_id: str, wanted: Input, options: RequestOptions | None = None) -> None:
        """Queue what `Engine.check_request` has let pass; its params are ready. Raises RequestRejected for an id that
        is in use."""
        if request_id in self._live:
            raise RequestRejected(f"request_id {request_id!r:.200} is that of an unfinished request; give another")
        sequences = growing(request_id, wanted, self.inputs)
        self._live[request_id] = sequences
        prompt_ids = wanted.completion.prompt_token_ids
        self._feeder.put(Group(list(sequences), prompt_ids, wanted.params, options or RequestOptions()))

    def step(self) -> list[Completion]:
        """Run a step; the requests that got tokens, or ended, with all that they have got so far. A request comes as
        the same object every time, which grows: copy what must not change.

        Raises EngineDeadError, and RequestRejected for a beam search that cannot be, whose request is gone then.
        """
        grown = self.advance()
        for output in grown:
            output.show()
        return list({id(output.completion): output.completion for output in grown}.values())

    def advance(self) -> list[GrowingOutput]:
        """As step, but the texts of outputs that go on are not put together."""
        for group in self._feeder.ready():
            try:
                self.engine.add_checked(*group)
            except RequestRejected:
                del self._live[_request_of(group.ids[0])]
                raise
        now = time.time()
        found = (self._take(delta, now) for delta in self.engine.step())
        return [output for output in found if output is not None]

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; they are given no more by `step`. No error for one that has ended."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            for sequence in self._live.pop(request_id, {}):
                if self.engine.abort(sequence) is None:
                    self._feeder.drop(sequence)

    def has_unfinished_requests(self) -> bool:
        return bool(self._live)

    def get_num_unfinished_requests(self) -> int:
        return len(self._live)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: encode, decode, vocab_size, eos_token_ids."""
        return self.inputs.text.tokenizer

    def get_metrics(self) -> list[Metric]:
        """What the engine has counted and measured since its start."""
        return metrics_of(self.inputs, self.engine)

    def reset_prefix_cache(self) -> None:
        """Let nothing be found in the prefix cache that was computed until now."""
        self.engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Give back the model's memory."""
        self.engine.shutdown()
        self.inputs.close()
        self._garbage.take_back()

    def _take(self, delta: TokenDelta, now: float) -> GrowingOutput | None:
        request_id = _request_of(delta.request_id)
        sequences = self._live.get(request_id, {})
        output = sequences.get(delta.request_id)
        if output is None or not output.push(delta, now):
            return output
        if delta.finish_reason is None:
            # A stop string ended it: the engine does not know strings, so it is told.
            self.engine.abort(delta.request_id)
        del sequences[delta.request_id]
        if not sequences:
            del self._live[request_id]
        return output


def growing(request_id: str, wanted: Input, inputs: Inputs) -> dict[str, GrowingOutput]:
    """The outputs of a request that begins now, by the engine's names of its sequences."""
    completion = wanted.completion
    completion.request_id, completion.metrics = request_id, RequestMetrics(arrival_time=time.time())
    return {
        f"{request_id}.{choice}": GrowingOutput(completion, inputs.text, wanted.params, wanted.reading)
        for choice in range(wanted.params.n)
    }


def metrics_of(inputs: Inputs, engine: Engine) -> list[Metric]:
    """The engine's series as /metrics has them."""
    # prometheus_client is for those who ask.
    from raylm.api.engine_metrics import engine_metrics
    from raylm.generation.served_model import EngineStats

    has_prefixes = inputs.config.cache.prefix_caching
    name = inputs.config.model.served_name
    stats = EngineStats(name, "local", engine.stats(), engine.info, has_prefixes, engine.measures())
    return [
        Metric(sample.name, sample.labels, sample.value)
        for family in engine_metrics([stats])
        for sample in family.samples
    ]


def _request_of(sequence: str) -> str:
    """`growing` puts the choice behind the request's id."""
    return sequence.rpartition(".")[0]
